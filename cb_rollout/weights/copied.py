"""An engine-owned copy of the weights, updated in place.

Owns the copy and what it last took over. The training module is read, never changed; sharded
weights are made whole a bucket at a time. Called from the training thread, the engine paused.
"""

from collections.abc import Iterator, Sequence

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.model.precision import Precision
from cb_rollout.weights.adapters import has_adapters
from cb_rollout.weights.gathering import Gathering, PlainGathering, create_gathering
from cb_rollout.weights.replica import create_replica, require_match, tensors_by_name
from cb_rollout.weights.tensor import Weight, weights_of
from cb_rollout.weights.zero3 import register_head

BUCKET_BYTES = 256 * 2**20
# Sharded weights made whole at once: enough for one large tensor, little beside a model.

Signature = tuple[tuple[int, int], ...]


class CopiedWeights:
    """Generates with its own module; the trainer's may change meanwhile."""

    def __init__(
        self, trained: torch.nn.Module, precision: Precision, device: torch.device | None
    ) -> None:
        """Make the copy and fill it.

        Args:
            trained: the training module, wrapped or not.
            precision: what the copy computes in.
            device: where it lies; None: where the training module does.

        Raises:
            ConfigurationError: an adapter cannot be merged.
            WeightSyncError: the model's config describes other tensors than the model has.
        """
        self.follow(trained)
        self.autocast_dtype = precision.autocast_dtype
        self.is_collective = False
        self._taken: dict[tuple[str, ...], tuple[Signature, tuple[float, ...]]] = {}
        self._matched: tuple[list[int], Gathering, list[Weight]] | None = None
        _, weights, shapes = self._read()
        device = device or next(trained.parameters()).device
        self.module = create_replica(self._source, weights, shapes, precision, device)
        self._held = tensors_by_name(self.module)
        self.sync()

    def follow(self, trained: torch.nn.Module) -> None:
        """FSDP1 and deepspeed wrap a model when training starts, and its forward is theirs then."""
        self.trained, self._source = trained, hf_compat.unwrap(trained)
        register_head(self._source)

    def sync(self) -> int:
        """Copy every tensor that could have changed since the last time; returns bytes written.

        Trainable tensors always could; frozen ones where torch counted a write to them, or their
        storage moved. Adapters are merged into a fresh value of the frozen base.
        """
        gathering, weights = self._matching()
        stale = [weight for weight in weights if self._is_stale(weight, gathering)]
        # While a shard is whole, its storage is another one.
        states = {weight: _state(weight, gathering) for weight in stale}
        num_bytes = 0
        with torch.no_grad():
            for weight, value in _values(stale, gathering):
                target = self._held[weight.names[0]]
                target.copy_(value)
                num_bytes += target.nbytes
                self._taken[weight.names] = states[weight]
        return num_bytes

    def differing(self) -> list[str]:
        """Names of the tensors whose bits are not those of a fresh full sync."""
        gathering, weights, _ = self._read()
        with torch.no_grad():
            return [
                weight.names[0]
                for weight, value in _values(weights, gathering)
                if not _is_equal(self._held[weight.names[0]], value)
            ]

    def _matching(self) -> tuple[Gathering, list[Weight]]:
        """The training module as it is now, every tensor of which the copy has.

        What was found is kept while the module holds the very same tensors, whole and without
        adapters: matching them by name takes longer than copying a small model.
        """
        held = [id(self.trained), *map(id, _tensors(self.trained))]
        if self._matched is not None and self._matched[0] == held:
            return self._matched[1:]
        gathering, weights, shapes = self._read()
        require_match(self.module, weights, shapes)
        is_kept = isinstance(gathering, PlainGathering) and not has_adapters(self._source)
        # The weights keep the tensors, so no other tensor takes over an id.
        self._matched = (held, gathering, weights) if is_kept else None
        return gathering, weights

    def _read(self) -> tuple[Gathering, list[Weight], dict[Weight, torch.Size]]:
        """The training module as it is now; a trainer may have sharded it since the last time."""
        gathering = create_gathering(self.trained)
        self.is_collective = gathering.is_collective
        weights = weights_of(self._source, gathering.stored)
        return gathering, weights, {weight: gathering.shape(weight.base) for weight in weights}

    def _is_stale(self, weight: Weight, gathering: Gathering) -> bool:
        # torch counts no writes to inference tensors.
        if weight.is_buffer or any(t.requires_grad or t.is_inference() for t in weight.tensors):
            return True
        return self._taken.get(weight.names) != _state(weight, gathering)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer, as often as it is held."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def _state(weight: Weight, gathering: Gathering) -> tuple[Signature, tuple[float, ...]]:
    """Changes when torch knows of a write to any tensor that the weight depends on."""
    local = [gathering.local(tensor) for tensor in weight.tensors]
    writes = (0 if part.is_inference() else part._version for part in local)
    return tuple(zip((p.data_ptr() for p in local), writes, strict=True)), weight.scalings


def _values(
    weights: Sequence[Weight], gathering: Gathering
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Each weight with its whole value, which is good until the next one is asked for."""
    for bucket in _buckets(weights, gathering):
        needed = [tensor for weight in bucket for tensor in weight.tensors]
        with gathering.whole(needed) as whole:
            start = 0
            for weight in bucket:
                end = start + len(weight.tensors)
                yield weight, weight.value(whole[start:end])
                start = end


def _buckets(weights: Sequence[Weight], gathering: Gathering) -> Iterator[list[Weight]]:
    """Neighbours together, up to `BUCKET_BYTES` of what is made whole, and at least one."""
    bucket: list[Weight] = []
    held: set[int] = set()
    num_bytes = 0
    for weight in weights:
        pieces = gathering.pieces(weight.tensors)
        added = sum(size for piece, size in pieces.items() if piece not in held)
        if bucket and added and num_bytes + added > BUCKET_BYTES:
            yield bucket
            bucket, held, added = [], set(), sum(pieces.values())
            num_bytes = 0
        bucket.append(weight)
        held.update(pieces)
        num_bytes += added
    if bucket:
        yield bucket


def _is_equal(held: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether every element is the same, a NaN where a NaN is."""
    wanted = value.to(held.device, held.dtype)
    return bool(((held == wanted) | ((held != held) & (wanted != wanted))).all())
