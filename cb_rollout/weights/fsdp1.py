"""Gather whole tensors of a model under FSDP1 (`FullyShardedDataParallel`), unit by unit."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.weights.split import Splits, parts


class Fsdp1Source:
    """Read a model whose units each keep one flat parameter, sliced over processes."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Match a model with FSDP1 units."""
        return bool(fsdp_compat.fsdp1_units(model))

    def __init__(self, model: torch.nn.Module) -> None:
        self._held, self._behind = fsdp_compat.fsdp1_parameters(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice that the optimizer steps; a forward shows a whole view of it."""
        return self._behind.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape that the unit recorded."""
        held = self._held.get(id(tensor))
        return held.shape if held else tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's slice, which may be empty."""
        return tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map whole units to their bytes; a unit is gathered at once."""
        held = (self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        return {id(one.unit): one.unit_bytes for one in held}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor: FSDP1 gathers a unit in its own dtype."""
        return tensor

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and slices again after it."""
        held = (self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        units = {id(one.unit): one.unit for one in held}
        with ExitStack() as stack:
            for unit in units.values():
                stack.enter_context(
                    FullyShardedDataParallel.summon_full_params(
                        unit, recurse=False, writeback=False
                    )
                )
            yield parts([tensor.data for tensor in tensors], splits)
