"""Find every tensor of the plain model inside a training module, and read its value.

Sees through PEFT, compile and checkpointing wrappers. Gathers sharded weights one bucket at a time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat.tensor_parallel import Split
from cb_rollout.weights.adapters import LowRank, low_ranks_of, wrapped_by_peft
from cb_rollout.weights.source import PlainSource, Request

# Sharded weights gathered at once, twice that under FSDP2: little compared with a model.
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter or buffer, and the low-rank updates that active adapters add to it."""

    names: tuple[str, ...]
    """Its names in the plain model; several if it is tied or shared."""
    base: torch.Tensor
    """Base tensor; it may be a shard, and it may be frozen."""
    low_ranks: tuple[LowRank, ...]
    is_buffer: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The base, then A and B of each adapter."""
        tensors = [self.base]
        for low_rank in self.low_ranks:
            tensors.append(low_rank.A)
            tensors.append(low_rank.B)
        return tensors

    def value(self, read: Sequence[torch.Tensor], split: Split | None = None) -> torch.Tensor:
        """Compute the weight of the plain model, or this process's part of it.

        Adds adapters in float32 or wider, out of place, to the unchanged base. The value is rounded
        once, when it is stored, so rounding never accumulates. `read`: the base, or its part of a
        split, then the whole A and B of each adapter.
        """
        value = read[0]
        for index, low_rank in enumerate(self.low_ranks):
            A = read[1 + 2 * index]
            B = read[2 + 2 * index]
            dtype = torch.promote_types(value.dtype, torch.float32)
            value = value.to(dtype) + low_rank.delta(A, B, dtype, split)
        return value


def weights_of(
    model: torch.nn.Module,
    stored: Callable[[torch.Tensor], torch.Tensor],
    held_dtype: Callable[[torch.nn.Module, torch.dtype], torch.dtype] = lambda _, dtype: dtype,
    *,
    merges_adapters: bool = True,
    adapter: str | None = None,
) -> list[Weight]:
    """List every tensor of the plain model inside `model`, in the model's order.

    A tensor is listed once for each dtype in which its modules store it.

    Args:
        model: the training module, wrapped or not.
        stored: returns the trained tensor behind a module's tensor.
        held_dtype: maps a plain module and the dtype of its parameter to the dtype in which the
            parameter will be held.
        merges_adapters: False: list adapters as plain modules, with the names that they have
            inside the model.
        adapter: the only adapter to merge; None: the active ones.

    Raises:
        ConfigurationError: an adapter cannot be expressed as a plain model's weight.
    """
    weights: dict[tuple[object, ...], Weight] = {}

    def add(weight: Weight, dtype: torch.dtype) -> None:
        key = (dtype, *map(id, weight.tensors))
        if key in weights:
            names = weights[key].names + weight.names
            weight = replace(weight, names=names)
        weights[key] = weight

    modules = plain_modules(model, merges_adapters=merges_adapters, adapter=adapter)
    for path, module, low_ranks in modules:
        buffers = dict(module.named_buffers(recurse=False))
        for name, parameter in module.named_parameters(recurse=False):
            added: tuple[LowRank, ...] = ()
            if name == "weight":
                added = tuple(replace(x, A=stored(x.A), B=stored(x.B)) for x in low_ranks)
            weight = Weight(
                names=(path + name,), base=stored(parameter), low_ranks=added, is_buffer=False
            )
            add(weight, held_dtype(module, weight.base.dtype))
        for name, buffer in buffers.items():
            weight = Weight(names=(path + name,), base=stored(buffer), low_ranks=(), is_buffer=True)
            add(weight, weight.base.dtype)
    return list(weights.values())


def plain_modules(
    model: torch.nn.Module,
    prefix: str = "",
    added: tuple[LowRank, ...] = (),
    *,
    merges_adapters: bool = True,
    adapter: str | None = None,
) -> Iterator[tuple[str, torch.nn.Module, tuple[LowRank, ...]]]:
    """Yield each module of the plain model: its path, itself, and updates of its `weight`.

    A path is empty or ends with a dot. A module in several places is yielded for each.

    Args:
        model: a module, wrapped or not.
        prefix: its path.
        added: updates of its `weight` by the modules around it.
        merges_adapters: False: PEFT's modules count as modules of the model.
        adapter: the adapter whose updates are yielded; None: the active ones.
    """
    inner = wrapped_by_peft(model, adapter) if merges_adapters else None
    if inner is not None:
        added = low_ranks_of(model, adapter)
    else:
        inner = torch_compat.wrapped_layer(model)
    if inner is not None:
        yield from plain_modules(
            inner, prefix, added, merges_adapters=merges_adapters, adapter=adapter
        )
        return
    yield prefix, model, added
    # `named_children` leaves out a child that it has yielded under another name.
    for name, child in model._modules.items():
        if child is not None:
            path = f"{prefix}{name}."
            yield from plain_modules(child, path, merges_adapters=merges_adapters, adapter=adapter)


def module_classes(model: torch.nn.Module) -> dict[str, type]:
    """Return each plain module's class, by its path."""
    return {
        path.removesuffix(".") or "the model": torch_compat.plain_class(module)
        for path, module, _ in plain_modules(model)
    }


def values_of(
    weights: Sequence[Weight],
    source: PlainSource,
    stored_as: Callable[[Weight], tuple[torch.dtype, Split | None]],
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield each weight with its value, which is valid until the next one is requested.

    Every process of a collective source reads the same weights. `stored_as` returns the dtype in
    which a weight will be stored; the value's dtype is that or wider. It also returns the split
    whose local part the value is; None: the value is whole.
    """
    # Buckets that were requested and are not read yet, with the split of each weight.
    requested: deque[tuple[list[Weight], list[Split | None]]] = deque()

    def requests() -> Iterator[Request]:
        for bucket in _buckets(weights, source):
            tensors: list[torch.Tensor] = []
            splits_of_tensors: list[Split | None] = []
            splits: list[Split | None] = []
            for weight in bucket:
                dtype, split = stored_as(weight)
                splits.append(split)
                splits_of_tensors.append(split)
                if weight.low_ranks:
                    # The sum is rounded once, so its terms are read as they are, adapters whole.
                    tensors.extend(weight.tensors)
                    splits_of_tensors.extend([None] * (len(weight.tensors) - 1))
                else:
                    tensors.append(source.narrowed(weight.base, dtype))
            requested.append((bucket, splits))
            yield tensors, splits_of_tensors

    for read in source.read_each(requests()):
        bucket, splits = requested.popleft()
        start = 0
        for weight, split in zip(bucket, splits, strict=True):
            end = start + len(weight.tensors)
            yield weight, weight.value(read[start:end], split)
            start = end
        # Freed before more is gathered.
        del read


def _buckets(weights: Sequence[Weight], source: PlainSource) -> Iterator[list[Weight]]:
    """Group neighbouring weights, each group at least one and up to `BUCKET_BYTES` gathered."""
    bucket: list[Weight] = []
    gathered: set[int] = set()
    num_bytes = 0
    for weight in weights:
        pieces = source.pieces(weight.tensors)
        added = sum(size for piece, size in pieces.items() if piece not in gathered)
        if bucket and added and num_bytes + added > BUCKET_BYTES:
            yield bucket
            bucket = []
            gathered = set()
            num_bytes = 0
            added = sum(pieces.values())
        bucket.append(weight)
        gathered.update(pieces)
        num_bytes += added
    if bucket:
        yield bucket
