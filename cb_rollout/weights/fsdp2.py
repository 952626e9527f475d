"""Gather tensors of a model under FSDP2 (`fully_shard`), or of DTensors, whole or in parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat.tensor_parallel import unsharded_part
from cb_rollout.weights.split import Split, Splits


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
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield all-gathered copies; where there is a split, this process's part, exchanged.

        A part is never cut out of a whole tensor: processes send each other what each one needs.
        """
        chosen = [None] * len(tensors) if splits is None else splits
        yield [_read(tensor, split) for tensor, split in zip(tensors, chosen, strict=True)]


def _read(tensor: torch.Tensor, split: Split | None) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor if split is None else split.part(tensor)
    # Gather CPU-offloaded shards on the device that the mesh communicates on.
    device_type = tensor.device_mesh.device_type
    if tensor.device.type != device_type:
        moved = tensor.to(device_type)
        assert isinstance(moved, DTensor)
        tensor = moved
    if split is None:
        return tensor.full_tensor()
    part = unsharded_part(tensor)
    return _exchanged(tensor, split) if part is None else part


def _exchanged(tensor: DTensor, split: Split) -> torch.Tensor:
    """Return this process's part of a tensor of which each process holds a shard; collective.

    Every process sends each other one the overlap of its shard with the other's part.
    """
    sharded = [n for n, placement in enumerate(tensor.placements) if placement.is_shard()]
    if not sharded:
        return split.part(tensor.to_local())
    if len(sharded) > 1:
        return split.part(tensor.full_tensor())
    (mesh_dim,) = sharded
    shard_dim = tensor.placements[mesh_dim].dim % tensor.ndim  # pyright: ignore[reportAttributeAccessIssue]
    group = tensor.device_mesh.get_group(mesh_dim)
    ranks = distributed.get_process_group_ranks(group)
    place = distributed.get_rank(group)
    shard = tensor.to_local()
    held = _chunks(tensor.shape[shard_dim], len(ranks))
    is_same = shard_dim == split.dim
    sent = []
    for rank in ranks:
        wanted = split.indices[rank % len(split.indices)]
        chosen = _positions(held[place], wanted) if is_same else wanted
        sent.append(shard.index_select(split.dim, chosen.to(shard.device)))
    # Where the rows of each process go in this one's part.
    rows = [_positions(split.own, chunk) if is_same else chunk for chunk in held]
    shape = list(tensor.shape)
    shape[split.dim] = len(split.own)
    received = _all_to_all(sent, [_with_size(shape, shard_dim, len(row)) for row in rows], group)
    part = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    for row, piece in zip(rows, received, strict=True):
        part.index_copy_(shard_dim, row.to(part.device), piece)
    return part


def _chunks(size: int, count: int) -> list[torch.Tensor]:
    """Return the indices of each process's shard: FSDP2 cuts as `torch.chunk` does."""
    indices = torch.arange(size)
    chunks = list(indices.chunk(count))
    return chunks + [indices[:0]] * (count - len(chunks))


def _positions(holder: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return where in `holder` the indices lie that are in `wanted` too."""
    return torch.isin(holder, wanted).nonzero()[:, 0]


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _all_to_all(
    sent: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    group: distributed.ProcessGroup,
) -> list[torch.Tensor]:
    """Send each process of a group its tensor, and return what each sent, of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([tensor.flatten() for tensor in sent])
    received = flat.new_empty(sum(sizes))
    distributed.all_to_all_single(
        received, flat, sizes, [tensor.numel() for tensor in sent], group=group
    )
    return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
