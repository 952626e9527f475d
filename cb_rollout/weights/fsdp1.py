"""Whole tensors of a model under FSDP1 (`FullyShardedDataParallel`), a wrapped unit at a time."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from cb_rollout.compat import fsdp as _compat_fsdp


class Fsdp1Gathering:
    """Each process holds a slice of every unit's one flat parameter."""

    is_collective = True

    def __init__(self, model: torch.nn.Module) -> None:
        """Find which unit each parameter lies in, and what stands behind a forward's views."""
        self._held, self._behind = _compat_fsdp.fsdp1_parameters(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice that the optimizer steps, of which a forward shows a whole view."""
        return self._behind.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """What its unit notes of it."""
        held = self._held.get(id(tensor))
        return held.shape if held else tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This process's slice, which may be empty."""
        return tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Whole units: they are gathered together or not at all."""
        held = (self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        return {id(one.unit): one.unit_bytes for one in held}

    @contextmanager
    def whole(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The parameters themselves, filled inside the context and slices again after it."""
        held = (self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        units = {id(one.unit): one.unit for one in held}
        with ExitStack() as stack:
            for unit in units.values():
                stack.enter_context(
                    FullyShardedDataParallel.summon_full_params(
                        unit, recurse=False, writeback=False
                    )
                )
            yield [tensor.data for tensor in tensors]
