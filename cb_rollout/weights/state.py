"""Tell whether a training model still computes what it computed at an earlier time.

Reads weights, buffers, settings and active adapters, and the contents of what trains, because a
write through `.data` leaves no other trace. Changes nothing. Called from the training thread.
"""

from collections.abc import Iterable

import torch

from cb_rollout.compat.fsdp import local_part, write_state
from cb_rollout.compat.module_state import model_settings, module_code, watched_tensors
from cb_rollout.weights.source import create_source

# Integers of as many bytes as a number of a weight.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_state(model: torch.nn.Module) -> list[object]:
    """Return a value that changes when a training model, wrapped or not, computes something else.

    A process reads its own shards alone. Not seen is a write through `.data` to a frozen weight,
    and one that leaves the sum of all bits of a weight as it was.
    """
    source = create_source(model)
    tensors = [source.stored(tensor) for tensor in watched_tensors(model)]
    trained = [local_part(tensor) for tensor in tensors if tensor.requires_grad]
    writes = [write_state(tensor) for tensor in tensors]
    return [writes, _checksums(trained), model_settings(model), module_code(model)]


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sum of each tensor's bits, read as integers; the host waits once for a device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        integers = tensor.detach().view(INTEGERS[tensor.element_size()])
        sums.setdefault(tensor.device, []).append(integers.sum(dtype=torch.int64))
    return [value for of_device in sums.values() for value in torch.stack(of_device).tolist()]
