"""Gather whole tensors of a model under FSDP2 (`fully_shard`), or of DTensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from cb_rollout.compat import fsdp as fsdp_compat


class Fsdp2Source:
    """Read a model of which each process holds a shard of every parameter."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Match a model that FSDP2 or DTensors shard."""
        return fsdp_compat.is_sharded(model)

    def __init__(self, model: torch.nn.Module) -> None:
        self._shards = fsdp_compat.fsdp_shards(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard that the optimizer steps, in the dtype it trains in."""
        return self._shards.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return its shape; a DTensor's is the whole one."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's shard."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map each tensor to its whole bytes."""
        return {id(t): self.shape(t).numel() * t.element_size() for t in tensors}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a shard cast to a smaller `dtype`, so that fewer bytes are gathered."""
        is_smaller = tensor.is_floating_point() and dtype.itemsize < tensor.itemsize
        return tensor.to(dtype) if isinstance(tensor, DTensor) and is_smaller else tensor

    @contextmanager
    def whole(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield all-gathered copies."""
        yield [_full(tensor) for tensor in tensors]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Gather CPU-offloaded shards on the device that the mesh communicates on.
    device_type = tensor.device_mesh.device_type
    if tensor.device.type != device_type:
        return tensor.to(device_type).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.full_tensor()
