"""Generate with an engine-owned copy of the weights, updated in place.

Owns the copy and the record of its last sync. Reads the training module and never changes it.
Gathers sharded weights one bucket at a time. Called from the training thread, the engine paused.
"""

from collections.abc import Iterator, Sequence

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.model.precision import Precision
from cb_rollout.weights.adapters import has_adapters
from cb_rollout.weights.replica import create_replica, require_match, tensors_by_name
from cb_rollout.weights.source import PlainSource, WeightSource, create_source
from cb_rollout.weights.tensor import Weight, weights_of
from cb_rollout.weights.zero3 import register_head

# Sharded weights gathered at once: enough for one large tensor, little beside a model.
BUCKET_BYTES = 256 * 2**20

Signature = tuple[tuple[int, int], ...]


class CopiedWeights:
    """Follow the training module with a copy that generates."""

    def __init__(
        self, trained: torch.nn.Module, precision: Precision, device: torch.device | None
    ) -> None:
        """Make the copy and fill it.

        Args:
            trained: the training module, wrapped or not.
            precision: dtypes of the copy and its forwards.
            device: device of the copy; None: that of the training module.

        Raises:
            ConfigurationError: an adapter cannot be merged.
            WeightSyncError: the model's config describes other tensors than the model has.
        """
        self.follow(trained)
        self.autocast_dtype = precision.autocast_dtype
        self.is_collective = False
        self._taken: dict[tuple[str, ...], tuple[Signature, tuple[float, ...]]] = {}
        self._matched: tuple[list[int], WeightSource, list[Weight]] | None = None
        _, weights, shapes = self._read()
        device = device or next(trained.parameters()).device
        self.module = create_replica(self._source, weights, shapes, precision, device)
        self._held = tensors_by_name(self.module)
        self.sync()

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a re-wrapped model as the source; FSDP1 and DeepSpeed wrap when training starts."""
        self.trained, self._source = trained, hf_compat.unwrap(trained)
        register_head(self._source)

    def sync(self) -> int:
        """Copy every tensor that may have changed since the last sync; return the bytes written.

        A trainable tensor may always have changed; a frozen one if torch counted a write to it or
        its storage moved. Adapters are merged into a fresh value of the frozen base.
        """
        source, weights = self._matching()
        stale = [weight for weight in weights if self._is_stale(weight, source)]
        # WeightSource replaces a shard's storage, so read the states first.
        states = {weight: _state(weight, source) for weight in stale}
        num_bytes = 0
        with torch.no_grad():
            for weight, value in _values(stale, source):
                target = self._held[weight.names[0]]
                target.copy_(value)
                num_bytes += target.nbytes
                self._taken[weight.names] = states[weight]
        return num_bytes

    def differing(self) -> list[str]:
        """Return the names of the tensors that differ from a fresh full sync in any bit."""
        source, weights, _ = self._read()
        with torch.no_grad():
            return [
                weight.names[0]
                for weight, value in _values(weights, source)
                if not _is_equal(self._held[weight.names[0]], value)
            ]

    def _matching(self) -> tuple[WeightSource, list[Weight]]:
        """Match the training module's present tensors with the copy's.

        The match is kept while the module holds the same tensors, whole and without adapters:
        matching by name takes longer than copying a small model.
        """
        held = [id(self.trained), *map(id, _tensors(self.trained))]
        if self._matched is not None and self._matched[0] == held:
            return self._matched[1:]
        source, weights, shapes = self._read()
        require_match(self.module, weights, shapes)
        is_kept = isinstance(source, PlainSource) and not has_adapters(self._source)
        # The weights keep the tensors alive, so no other tensor takes over an id.
        self._matched = (held, source, weights) if is_kept else None
        return source, weights

    def _read(self) -> tuple[WeightSource, list[Weight], dict[Weight, torch.Size]]:
        # A trainer may have sharded the module since the last sync.
        source = create_source(self.trained)
        self.is_collective = source.is_collective
        weights = weights_of(self._source, source.stored)
        return source, weights, {weight: source.shape(weight.base) for weight in weights}

    def _is_stale(self, weight: Weight, source: WeightSource) -> bool:
        # torch counts no writes to inference tensors.
        if weight.is_buffer or any(t.requires_grad or t.is_inference() for t in weight.tensors):
            return True
        return self._taken.get(weight.names) != _state(weight, source)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield every parameter and buffer, repeated where several modules hold it."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def _state(weight: Weight, source: WeightSource) -> tuple[Signature, tuple[float, ...]]:
    """Return a value that changes when torch counts a write to any tensor of the weight."""
    local = [source.local(tensor) for tensor in weight.tensors]
    writes = (0 if part.is_inference() else part._version for part in local)
    return tuple(zip((p.data_ptr() for p in local), writes, strict=True)), weight.scalings


def _values(
    weights: Sequence[Weight], source: WeightSource
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield each weight with its whole value, which is valid until the next one is requested."""
    for bucket in _buckets(weights, source):
        needed = [tensor for weight in bucket for tensor in weight.tensors]
        with source.whole(needed) as whole:
            start = 0
            for weight in bucket:
                end = start + len(weight.tensors)
                yield weight, weight.value(whole[start:end])
                start = end


def _buckets(weights: Sequence[Weight], source: WeightSource) -> Iterator[list[Weight]]:
    """Group neighbouring weights, each group at least one and up to `BUCKET_BYTES` gathered."""
    bucket: list[Weight] = []
    held: set[int] = set()
    num_bytes = 0
    for weight in weights:
        pieces = source.pieces(weight.tensors)
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
    """Compare elementwise; NaN equals NaN."""
    wanted = value.to(held.device, held.dtype)
    return bool(((held == wanted) | ((held != held) & (wanted != wanted))).all())
