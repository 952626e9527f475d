"""Whole tensors of a model under FSDP2 (`fully_shard`), or of any made of DTensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from cb_rollout.compat import fsdp as _compat_fsdp


class Fsdp2Gathering:
    """Each process holds a shard of every parameter."""

    is_collective = True

    def __init__(self, model: torch.nn.Module) -> None:
        """Find the shards of what a forward left whole."""
        self._shards = _compat_fsdp.fsdp_shards(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shard that the optimizer steps, in the dtype it trains in."""
        return self._shards.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """A DTensor's own is the whole one."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This process's shard."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The tensors."""
        return {id(t): self.shape(t).numel() * t.element_size() for t in tensors}

    @contextmanager
    def whole(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """All-gathered copies."""
        yield [_full(tensor) for tensor in tensors]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards that are offloaded to the CPU are gathered where the mesh communicates.
    device_type = tensor.device_mesh.device_type
    if tensor.device.type != device_type:
        return tensor.to(device_type).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.full_tensor()
