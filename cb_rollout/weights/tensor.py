"""Find every tensor of the plain model inside a training module, and read their values.

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

# Sharded weights gathered at once, twice that under FSDP2: little beside a model.
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter or buffer, and the low-rank updates that active adapters add to it."""

    names: tuple[str, ...]
    """Its names in the plain model; several where it is tied or shared."""
    base: torch.Tensor
    """Base tensor; maybe a shard, maybe frozen."""
    low_ranks: tuple[LowRank, ...]
    is_buffer: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The base, then A and B of each adapter."""
        return [self.base, *(t for added in self.low_ranks for t in (added.A, added.B))]

    def value(self, read: Sequence[torch.Tensor], split: Split | None = None) -> torch.Tensor:
        """Compute the weight of the plain model, or this process's part of it.

        Adds adapters in float32 or wider, out of place, to the pristine base. The value is rounded
        once, when it is stored, so rounding never accumulates. `read`: the base, or its part of a
        split, then the whole A and B of each adapter.
        """
        value, *factors = read
        for added, A, B in zip(self.low_ranks, factors[::2], factors[1::2], strict=True):
            dtype = torch.promote_types(value.dtype, torch.float32)
            value = value.to(dtype) + added.delta(A, B, dtype, split)
        return value


def weights_of(
    model: torch.nn.Module,
    stored: Callable[[torch.Tensor], torch.Tensor],
    held_dtype: Callable[[torch.nn.Module, torch.dtype], torch.dtype] = lambda _, dtype: dtype,
    *,
    merges_adapters: bool = True,
) -> list[Weight]:
    """List every tensor of the plain model inside `model`, in the model's order.

    A tensor is listed once for each dtype that its modules hold it in, by `held_dtype` of a plain
    module and a parameter's dtype. `stored` maps a tensor that a module shows to the trained one.
    Refuses an adapter that cannot be expressed as a plain model's weight; without `merges_adapters`
    lists adapters as modules of their own, with the names that they have inside the model.
    """
    grouped: dict[tuple[object, ...], Weight] = {}
    for path, module, low_ranks in plain_modules(model, merges_adapters=merges_adapters):
        added = tuple(replace(pair, A=stored(pair.A), B=stored(pair.B)) for pair in low_ranks)
        buffers = dict(module.named_buffers(recurse=False))
        for name, base in (dict(module.named_parameters(recurse=False)) | buffers).items():
            is_buffer = name in buffers
            low_ranks = added if name == "weight" and not is_buffer else ()
            weight = Weight((path + name,), stored(base), low_ranks, is_buffer)
            dtype = weight.base.dtype
            key = dtype if is_buffer else held_dtype(module, dtype), *map(id, weight.tensors)
            if key in grouped:
                weight = replace(weight, names=(*grouped[key].names, *weight.names))
            grouped[key] = weight
    return list(grouped.values())


def plain_modules(
    model: torch.nn.Module,
    prefix: str = "",
    added: tuple[LowRank, ...] = (),
    *,
    merges_adapters: bool = True,
) -> Iterator[tuple[str, torch.nn.Module, tuple[LowRank, ...]]]:
    """Yield each module of the plain model: its path, itself, and updates of its `weight`.

    A path is empty or ends with a dot. A module in several places is yielded for each. Without
    `merges_adapters` a module of PEFT is one of the model's.
    """
    inner = wrapped_by_peft(model) if merges_adapters else None
    if inner is not None:
        added = low_ranks_of(model)
    else:
        inner = torch_compat.wrapped_layer(model)
    if inner is not None:
        yield from plain_modules(inner, prefix, added, merges_adapters=merges_adapters)
        return
    yield prefix, model, added
    # `named_children` leaves out a child that it has yielded under another name.
    for name, child in model._modules.items():
        if child is not None:
            path = f"{prefix}{name}."
            yield from plain_modules(child, path, merges_adapters=merges_adapters)


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
    which a weight will be stored, which the value's is or exceeds, and the split of which the value
    is this process's part; None: it is whole.
    """
    asked: deque[tuple[list[Weight], list[Split | None]]] = deque()

    def requests() -> Iterator[Request]:
        for bucket in _buckets(weights, source):
            needed: list[torch.Tensor] = []
            splits: list[Split | None] = []
            for weight in bucket:
                dtype, split = stored_as(weight)
                # An adapter's sum is rounded once: its terms come as they are, and small ones
                # whole.
                needed += weight.tensors
                if not weight.low_ranks:
                    needed[-1] = source.narrowed(weight.base, dtype)
                splits += [split, *[None] * (len(weight.tensors) - 1)]
            asked.append((bucket, splits))
            yield needed, splits

    for read in source.read_each(requests()):
        bucket, splits = asked.popleft()
        start = 0
        for weight in bucket:
            end = start + len(weight.tensors)
            yield weight, weight.value(read[start:end], splits[start])
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
            bucket, gathered, num_bytes, added = [], set(), 0, sum(pieces.values())
        bucket.append(weight)
        gathered.update(pieces)
        num_bytes += added
    if bucket:
        yield bucket
