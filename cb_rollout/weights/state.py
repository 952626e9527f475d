"""Detect whether a training model has changed since an earlier time.

Reads weights, buffers, settings and active adapters, and the contents of trainable tensors, because
torch does not count a write through `.data`. Changes nothing. Called from the training thread.
"""

from collections.abc import Iterable

import torch

from cb_rollout.compat.fsdp import local_part, write_state
from cb_rollout.compat.module_state import model_settings, module_code, watched_tensors
from cb_rollout.weights.source import create_source

# Integers that a weight's numbers are read as, by their bytes. There are no 64-bit integers: their
# sums in int64 would lose an even count of changed signs.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

# Numbers in a block of the checksum. Odd, so that no usual width is a multiple of it: blocks cut
# across rows and columns, and two rows or columns cannot change places unnoticed.
BLOCK = 1021


def model_state(model: torch.nn.Module) -> list[object]:
    """Return a value that changes when a training model, wrapped or not, changes.

    A process reads only its own shards. Two kinds of writes go unnoticed: a write through `.data`
    to a frozen weight, and one that only moves numbers within a block of `BLOCK` neighbours.
    """
    return [*weights_state(model), module_code(model)]


def weights_state(model: torch.nn.Module) -> list[object]:
    """Return `model_state` without the code: another thread's forward may add hooks to it."""
    source = create_source(model)
    tensors = [source.stored(tensor) for tensor in watched_tensors(model)]
    trained = [local_part(tensor) for tensor in tensors if tensor.requires_grad]
    writes = [write_state(tensor) for tensor in tensors]
    return [writes, _checksums(trained), model_settings(model)]


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a checksum of each tensor's bits; the host waits once for a device."""
    checksums_of_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        checksum = _checksum(tensor.detach())
        checksums_of_device.setdefault(tensor.device, []).append(checksum)
    values: list[int] = []
    for checksums in checksums_of_device.values():
        values.extend(torch.stack(checksums).tolist())
    return values


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bits that depends on their order: an int64 scalar.

    Numbers are read as integers. Each block's sum is weighted by the block's position, and each
    number after the last whole block by the number's position.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = tensor.flatten().view(INTEGERS[tensor.element_size()])
    num_in_blocks = integers.numel() // BLOCK * BLOCK
    blocks = integers[:num_in_blocks].view(-1, BLOCK).sum(dim=1, dtype=torch.int64)
    rest = integers[num_in_blocks:].to(torch.int64)
    return _weighted_sum(blocks) + _weighted_sum(rest)


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of values, the i-th (from 0) times 2 i + 1, modulo 2 ** 64."""
    odd_numbers = torch.arange(1, 2 * values.numel() + 1, 2, device=values.device)
    return (values * odd_numbers).sum()
