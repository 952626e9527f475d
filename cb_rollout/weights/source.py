"""Read tensors wherever a trainer keeps them; one `PlainSource` for each framework.

To add one, write a subclass and list it in `SOURCES`. The only file that imports deepspeed, which
is optional: it is imported when a parameter carries its marks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import zero3 as zero3_compat
from cb_rollout.compat.tensor_parallel import Split, Splits, parts, unsharded_part


class PlainSource:
    """Read a model that each process holds whole, alone or under DDP."""

    is_collective = False
    """True: every process must request the same tensors in the same order."""

    def __init__(self, model: torch.nn.Module) -> None: ...

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Return True if this source reads `model`, given with its wrappers."""
        return True

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor behind one that the module shows."""
        return tensor

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of the whole tensor."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's shard; its storage and version reveal a write."""
        return fsdp_compat.local_part(tensor)

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map the identity of each unit that must be gathered to read `tensors` to its bytes."""
        return {id(t): self.shape(t).numel() * t.element_size() for t in tensors}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what to gather of a tensor that will be stored in `dtype`."""
        return tensor

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Gather tensors, valid inside the context only.

        Args:
            tensors: `stored` tensors.
            splits: for each tensor the division of which to read this process's part, or None to
                read all of it; None: all of every tensor.
        """
        yield parts(tensors, splits)


class Fsdp1Source(PlainSource):
    """Read a model of FSDP1, whose units each keep one flat parameter, sliced over processes."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        return bool(fsdp_compat.fsdp1_units(model))

    def __init__(self, model: torch.nn.Module) -> None:
        self._placements, self._behind = fsdp_compat.fsdp1_parameters(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice that the optimizer steps; a forward shows a whole view of it."""
        return self._behind.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        placement = self._placements.get(id(tensor))
        return placement.shape if placement else tensor.shape

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        return {id(p.unit): p.unit_bytes for p in self._placements_of(tensors)}

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and slices again after it."""
        gathering = FullyShardedDataParallel.summon_full_params
        with ExitStack() as stack:
            for unit in {id(p.unit): p.unit for p in self._placements_of(tensors)}.values():
                stack.enter_context(gathering(unit, recurse=False, writeback=False))
            yield parts([tensor.data for tensor in tensors], splits)

    def _placements_of(
        self, tensors: Sequence[torch.Tensor]
    ) -> Iterator[fsdp_compat.Fsdp1Placement]:
        return (self._placements[id(t)] for t in tensors if id(t) in self._placements)


class Zero3Source(PlainSource):
    """Read a model of DeepSpeed ZeRO-3: a process holds a flat slice of every parameter."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        return any(zero3_compat.is_zero3(parameter) for parameter in model.parameters())

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        return zero3_compat.zero3_shape(tensor) if zero3_compat.is_zero3(tensor) else tensor.shape

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and emptied after it."""
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        # Two tensors of a copy may hold one weight in different dtypes.
        unique = dict.fromkeys(tensors)
        sharded: list[Any] = [tensor for tensor in unique if zero3_compat.is_zero3(tensor)]
        with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
            yield parts([tensor.data for tensor in tensors], splits)


def register_head(model: PreTrainedModel) -> None:
    """Tell ZeRO-3 that the model itself reads the weight of its language-model head.

    TRL 1.16's loss multiplies by it without calling the head. DeepSpeed 0.19 detects that, but not
    after a forward that did call the head; the backward then meets an empty weight.
    """
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and zero3_compat.is_zero3(weight):
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        deepspeed.zero.register_external_parameter(model, weight)


class Fsdp2Source(PlainSource):
    """Read a model of FSDP2 or of DTensors: a process holds a shard of every parameter."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        return fsdp_compat.is_sharded(model)

    def __init__(self, model: torch.nn.Module) -> None:
        self._shards = fsdp_compat.fsdp_shards(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard that the optimizer steps, in the dtype it trains in."""
        return self._shards.get(id(tensor), tensor)

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
        wanted = [None] * len(tensors) if splits is None else splits
        yield [_gathered(tensor, split) for tensor, split in zip(tensors, wanted, strict=True)]


def _gathered(tensor: torch.Tensor, split: Split | None) -> torch.Tensor:
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
    if len(sharded) != 1:
        return split.part(tensor.full_tensor() if sharded else tensor.to_local())
    (mesh_dim,) = sharded
    shard_dim = tensor.placements[mesh_dim].dim % tensor.ndim  # pyright: ignore[reportAttributeAccessIssue]
    group = tensor.device_mesh.get_group(mesh_dim)
    ranks = distributed.get_process_group_ranks(group)
    shard = tensor.to_local()
    # FSDP2 cuts as `torch.chunk` does.
    indices = torch.arange(tensor.shape[shard_dim])
    chunks = list(indices.chunk(len(ranks)))
    chunks += [indices[:0]] * (len(ranks) - len(chunks))
    own_chunk, is_same = chunks[distributed.get_rank(group)], shard_dim == split.dim
    sent = []
    for rank in ranks:
        wanted = split.indices[rank % len(split.indices)]
        chosen = _positions(own_chunk, wanted) if is_same else wanted
        sent.append(shard.index_select(split.dim, chosen.to(shard.device)))
    # Where the rows of each process go in this one's part.
    rows = [_positions(split.own, chunk) if is_same else chunk for chunk in chunks]
    shape = list(tensor.shape)
    shape[split.dim] = len(split.own)
    shapes = [[*shape[:shard_dim], len(row), *shape[shard_dim + 1 :]] for row in rows]
    part = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    for row, piece in zip(rows, _all_to_all(sent, shapes, group), strict=True):
        part.index_copy_(shard_dim, row.to(part.device), piece)
    return part


def _positions(holder: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return where in `holder` the indices lie that are in `wanted` too."""
    return torch.isin(holder, wanted).nonzero()[:, 0]


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


# The first source that matches a model reads it.
SOURCES: list[type[PlainSource]] = [Fsdp1Source, Zero3Source, Fsdp2Source, PlainSource]


def create_source(model: torch.nn.Module) -> PlainSource:
    """Create the source of a model, given with its wrappers, as it is laid out now.

    A trainer may shard the model at any time.
    """
    return next(source for source in SOURCES if source.matches(model))(model)
