"""Read a trainer's tensors in each framework's layout, with a subclass of `PlainSource` for each.

To add a framework, write a subclass and list it in `SOURCES`. Only this file imports deepspeed,
which is optional: it is imported when a parameter has deepspeed's attributes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat.tensor_parallel import Split, unsharded_part

Request = tuple[Sequence[torch.Tensor], Sequence[Split | None]]
"""Tensors to read, and for each the split of which this process reads its part; None: all of it."""


class PlainSource:
    """Read a model whose weights are complete in each process, plain or under DDP."""

    is_collective = False
    """True: every process must request the same tensors in the same order."""

    def __init__(self, model: torch.nn.Module) -> None: ...

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Return True if this source reads `model`, given with its wrappers."""
        return True

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor behind a tensor of the module."""
        return tensor

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of the whole tensor."""
        return tensor.shape

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return the bytes of each unit to gather for `tensors`, by the unit's identity."""
        return {id(t): self.shape(t).numel() * t.element_size() for t in tensors}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor to gather for storage in `dtype`."""
        return tensor

    @contextmanager
    def gathering(self, tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """Gather `stored` tensors; they are valid inside the context only."""
        yield tensors

    def read_each(self, requests: Iterable[Request]) -> Iterator[list[torch.Tensor]]:
        """Read one request after another; a yielded value is valid until the next one."""
        for tensors, splits in requests:
            with self.gathering(tensors) as whole:
                yield [_part(tensor, split) for tensor, split in zip(whole, splits, strict=True)]


def _part(tensor: torch.Tensor, split: Split | None) -> torch.Tensor:
    """Return this process's part of a whole tensor."""
    return tensor if split is None else split.part(tensor)


class Fsdp1Source(PlainSource):
    """Read an FSDP1 model: each unit has one flat parameter, sliced over processes."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        return bool(fsdp_compat.fsdp1_units(model))

    def __init__(self, model: torch.nn.Module) -> None:
        self._placements, self._behind = fsdp_compat.fsdp1_parameters(model)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice that the optimizer steps; in a forward, the module has a whole view."""
        return self._behind.get(id(tensor), tensor)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        placement = self._placements.get(id(tensor))
        return placement.shape if placement else tensor.shape

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        return {id(p.unit): p.unit_bytes for p in self._placements_of(tensors)}

    @contextmanager
    def gathering(self, tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and slices again after it."""
        units: dict[int, torch.nn.Module] = {}
        for placement in self._placements_of(tensors):
            units[id(placement.unit)] = placement.unit
        with ExitStack() as stack:
            for unit in units.values():
                gathered = FullyShardedDataParallel.summon_full_params(
                    unit, recurse=False, writeback=False
                )
                stack.enter_context(gathered)
            yield [tensor.data for tensor in tensors]

    def _placements_of(
        self, tensors: Sequence[torch.Tensor]
    ) -> Iterator[fsdp_compat.Fsdp1Placement]:
        for tensor in tensors:
            placement = self._placements.get(id(tensor))
            if placement is not None:
                yield placement


class Zero3Source(PlainSource):
    """Read a DeepSpeed ZeRO-3 model: a process has a flat slice of every parameter."""

    is_collective = True

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        return any(fsdp_compat.is_zero3(parameter) for parameter in model.parameters())

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        return fsdp_compat.zero3_shape(tensor) if fsdp_compat.is_zero3(tensor) else tensor.shape

    @contextmanager
    def gathering(self, tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and emptied after it."""
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        # Two tensors of a copy may hold one weight in different dtypes.
        unique = dict.fromkeys(tensors)
        sharded: list[Any] = [tensor for tensor in unique if fsdp_compat.is_zero3(tensor)]
        with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
            yield [tensor.data for tensor in tensors]


def register_head(model: PreTrainedModel) -> None:
    """Tell ZeRO-3 that the model itself reads the weight of its language-model head.

    TRL 1.16's loss multiplies by it without calling the head. DeepSpeed 0.19 detects that, but not
    after a forward that did call the head; the backward then meets an empty weight.
    """
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and fsdp_compat.is_zero3(weight):
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        deepspeed.zero.register_external_parameter(model, weight)


class Fsdp2Source(PlainSource):
    """Read an FSDP2 or DTensor model: a process has a shard of every parameter."""

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
        if isinstance(tensor, DTensor) and is_smaller:
            return tensor.to(dtype)
        return tensor

    def read_each(self, requests: Iterable[Request]) -> Iterator[list[torch.Tensor]]:
        """Start to gather the next request while the present one is used; both are in memory.

        Over gloo, each gather finishes before the next one starts.
        """
        gathers = map(_begin_gathers, requests)
        tensors = next(gathers, None)
        while tensors is not None:
            following = next(gathers, None)
            yield tensors
            tensors = following


def _begin_gathers(request: Request) -> list[torch.Tensor]:
    """Start to gather a request's tensors; the first operator on each tensor waits for it."""
    tensors, splits = request
    return [_gathered(tensor, split) for tensor, split in zip(tensors, splits, strict=True)]


def _gathered(tensor: torch.Tensor, split: Split | None) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return _part(tensor, split)
    # Gather CPU-offloaded shards on the device that the mesh communicates on.
    device_type = tensor.device_mesh.device_type
    if tensor.device.type != device_type:
        moved = tensor.to(device_type)
        assert isinstance(moved, DTensor)
        tensor = moved
    if split is None:
        whole = [Replicate()] * tensor.device_mesh.ndim
        is_async = fsdp_compat.may_overlap(tensor.device_mesh)
        return tensor.redistribute(placements=whole, async_op=is_async).to_local()
    part = unsharded_part(tensor)
    if part is None:
        return split.part(tensor.full_tensor())
    return part


# The first source that matches a model reads it.
SOURCES: list[type[PlainSource]] = [Fsdp1Source, Zero3Source, Fsdp2Source, PlainSource]


def create_source(model: torch.nn.Module) -> PlainSource:
    """Create the source for a model's present layout; `model` includes its wrappers.

    A trainer may shard the model at any time.
    """
    for source in SOURCES:
        if source.matches(model):
            return source(model)
    raise AssertionError("PlainSource matches every model")
