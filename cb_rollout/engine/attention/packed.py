"""Attend over packed tokens: each segment to its prefix and, causally, to itself.

The model's own attention function runs on padded segments of about one length at a time. Flash
kernels take segments unpadded, and so does PyTorch's own where the model calls sdpa on a GPU in 16
bits. Serves a prefill, whose prefixes are in pages, and the loss. Called at every layer of a packed
forward, and again when gradient checkpointing recomputes a layer, by the thread that runs it.

N: packed tokens, T: keys, H: heads, D: head size, C: segments of a bucket, Q: longest segment, K:
longest prefix and segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory.device import moved, to_device
from cb_rollout.errors import ConfigurationError

# A bucket computes at most this many times its pairs of queries and keys.
MAX_PADDED_PAIRS = 1.5

# Pairs that cost as much as one more call: small segments are padded further.
CALL_PAIRS = 1 << 14

# Most keys of a bucket of several segments, padding included. They are copied for the call, and
# repeated where the model's function repeats heads.
MAX_BUCKET_KEYS = 1 << 12


class Segment(NamedTuple):
    """Adjacent tokens of a packed batch that attend to a prefix and, causally, to each other."""

    start: int
    """Index of its first token among the packed tokens."""
    length: int
    prefix: tuple[range, ...] = ()
    """Indices of the prefix among the keys: parts of other segments, in the order of the tokens."""
    key_start: int | None = None
    """Index of the first token's own key; None: `start`, where packed tokens are all the keys."""

    @property
    def prefix_length(self) -> int:
        return sum(map(len, self.prefix))

    @property
    def num_keys(self) -> int:
        return self.prefix_length + self.length

    @property
    def tokens(self) -> range:
        return range(self.start, self.start + self.length)

    @property
    def keys(self) -> list[int]:
        """Return the indices of all keys, those of the prefix first."""
        indices: list[int] = []
        for part in self.prefix:
            indices += part
        indices += self.own_keys
        return indices

    @property
    def own_keys(self) -> range:
        first = self.start if self.key_start is None else self.key_start
        return range(first, first + self.length)


def no_mask(device: torch.device) -> torch.Tensor:
    """Return an attention mask with which a model builds no mask of all tokens, `(1, 1, 1, 1)`.

    transformers 5.23 keeps a mask of four axes as it is.
    """
    return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Segments of about one length."""

    num_segments: int
    num_queries: int
    """Q."""
    num_keys: int
    """K."""
    queries: torch.Tensor | slice
    """int64, (C x Q): indices of the tokens; any index in the padding."""
    keys: torch.Tensor | slice
    """int64, (C x K): indices of the keys of prefix and segment; any index in the padding."""
    kept: torch.Tensor | None
    """int64: indices of `queries` that are not padding; None: all."""
    prefix_lengths: torch.Tensor
    """int64, (C, 1, 1)."""
    has_prefix: bool


class PackedAttention:
    """Attention of one packed batch, in place of the model's own lookup."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, *, max_length: int | None = None
    ) -> None:
        """Attend in these segments.

        Args:
            segments: they cover the packed tokens, in their order.
            device: device of the model's inputs.
            max_length: tokens of the longest sequence that may come; a layer that would hide some
                of them by itself is refused. None: the longest of these segments.
        """
        self._segments = segments
        self._device = device
        self._num_tokens = sum(segment.length for segment in segments)
        self._num_keys = max(segment.own_keys.stop for segment in segments)
        self._longest = max_length or max(segment.num_keys for segment in segments)
        self._masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}
        self.num_calls = 0

    @cached_property
    def _buckets(self) -> tuple[list[_Bucket], torch.Tensor | None]:
        """Buckets, and int64 indices of the tokens among their results; None: in their order."""
        buckets: list[_Bucket] = []
        tokens: list[int] = []
        for segments in _of_one_size(self._segments):
            buckets.append(_bucket(segments, self._device))
            for segment in segments:
                tokens += segment.tokens
        if tokens == list(range(self._num_tokens)):
            return buckets, None
        return buckets, moved(torch.tensor(tokens).argsort(), self._device)

    @cached_property
    def _varlen_arguments(self) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """The indices of keys, and transformers' arguments of unpadded flash attention.

        Indices are None if they select all keys in order.
        """
        keys: list[int] = []
        ends_q = [0]
        ends_k = [0]
        for segment in self._segments:
            keys += segment.keys
            ends_q.append(ends_q[-1] + segment.length)
            ends_k.append(len(keys))
        arguments = {
            "cu_seq_lens_q": to_device(ends_q, self._device, torch.int32),
            "cu_seq_lens_k": to_device(ends_k, self._device, torch.int32),
            "max_length_q": max(segment.length for segment in self._segments),
            "max_length_k": max(segment.num_keys for segment in self._segments),
        }
        if keys == list(range(max(keys) + 1)):
            return None, arguments
        return to_device(keys, self._device), arguments

    def __call__(
        self,
        own_attention: Any,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the model's own attention, computed separately for each sequence.

        Args:
            own_attention: the model's attention function.
            module: the attention layer.
            query: (1, H, N, D).
            key: (1, key heads, T, D).
            value: (1, key heads, T, size of a value).
            attention_mask: that of `no_mask`, or None: segments define the mask.
            kwargs: further arguments of the attention function.

        Returns:
            The outputs, (1, N, H, D), and no weights.

        Raises:
            ConfigurationError: the model's attention cannot be computed in segments.
        """
        self.num_calls += 1
        sizes = (query.shape[0], query.shape[2], key.shape[2])
        if sizes != (1, self._num_tokens, self._num_keys):
            raise ConfigurationError("its attention sees other tokens than the packed ones")
        if attention_mask is not None and attention_mask.numel() > 1:
            raise ConfigurationError("its attention makes a mask of its own")
        if kwargs.get("position_bias") is not None:
            raise ConfigurationError("its attention adds a bias by position")
        window = hf_compat.attention_window(module, kwargs, self._longest)
        implementation = hf_compat.attention_implementation(module)
        if implementation == "sdpa" and torch.is_autocast_enabled(query.device.type):
            # Autocast casts what sdpa takes, but knows no unpadded kernel.
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        if implementation.startswith("flash"):
            # Flash kernels of transformers 5.23 take the ends of queries and keys.
            indices, varlen = self._varlen_arguments
            if indices is not None:
                key = key.index_select(2, indices)
                value = value.index_select(2, indices)
            arguments = kwargs | varlen
            return own_attention(module, query, key, value, None, **arguments)[0], None
        if implementation == "sdpa" and torch_compat.has_varlen(query, value, kwargs):
            return self._attend_varlen(query, key, value, window, kwargs.get("scaling"))
        dtype = hf_compat.attention_mask_dtype(implementation, query.dtype)
        queries = query[0].transpose(0, 1)
        keys = key[0].transpose(0, 1)
        values = value[0].transpose(0, 1)
        buckets, order = self._buckets
        outputs: list[torch.Tensor] = []
        for index, bucket in enumerate(buckets):
            mask = None
            if bucket.has_prefix or window is not None or dtype is not torch.bool:
                mask = self._mask(index, window, dtype)
            output_CQHD, _ = own_attention(
                module,
                _heads(queries, bucket.queries, bucket.num_segments),
                _heads(keys, bucket.keys, bucket.num_segments),
                _heads(values, bucket.keys, bucket.num_segments),
                mask,
                **kwargs,
            )
            outputs.append(_chosen(output_CQHD.flatten(0, 1), bucket.kept))
        return _chosen(torch.cat(outputs), order)[None], None

    def _mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return a bucket's mask, (C, 1, Q, K): True or 0 for visible keys."""
        known = self._masks.get((index, window, dtype))
        if known is not None:
            return known
        buckets, _ = self._buckets
        bucket = buckets[index]
        # Keys in the padding come after every key that a query sees.
        queries_Q1 = torch.arange(bucket.num_queries, device=self._device)[:, None]
        own_CQ1 = bucket.prefix_lengths + queries_Q1
        distances_CQK = own_CQ1 - torch.arange(bucket.num_keys, device=self._device)
        mask = distances_CQK >= 0
        if window is not None:
            mask &= distances_CQK < window
            # In the padding a query may see nothing at all, and its gradient would be NaN.
            mask |= ~mask.any(-1, keepdim=True)
        mask = mask[:, None]
        if dtype is not torch.bool:
            lowest = torch.finfo(dtype).min
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)
        self._masks[index, window, dtype] = mask
        return mask

    def _attend_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, None]:
        """Call PyTorch's own flash attention of segments, which sdpa has no arguments for.

        Args:
            query: as in `__call__`, like key and value.
            key: (1, key heads, T, D).
            value: (1, key heads, T, size of a value).
            window: newest tokens that are seen; None: all.
            scale: multiplies the scores; None: one over the root of D.
        """
        indices, varlen = self._varlen_arguments
        queries = query[0].transpose(0, 1)
        keys = key[0].transpose(0, 1)
        values = value[0].transpose(0, 1)
        # Tokens before the query's own that it sees; -1: all.
        num_before = -1 if window is None else window - 1
        output_NHD = torch_compat.varlen_of_grouped_heads(
            queries.contiguous(),
            _chosen(keys, indices).contiguous(),
            _chosen(values, indices).contiguous(),
            varlen["cu_seq_lens_q"],
            varlen["cu_seq_lens_k"],
            varlen["max_length_q"],
            varlen["max_length_k"],
            scale=scale,
            window_size=(num_before, 0),
        )
        return output_NHD[None], None


def _heads(
    states_NHD: torch.Tensor, indices: torch.Tensor | slice, num_segments: int
) -> torch.Tensor:
    """Return the states at `indices`, (C, H, length, D)."""
    return _chosen(states_NHD, indices).unflatten(0, (num_segments, -1)).transpose(1, 2)


def _chosen(states_NHD: torch.Tensor, indices: torch.Tensor | slice | None) -> torch.Tensor:
    """Return the states at `indices`; all states, without a copy, for None."""
    if indices is None:
        return states_NHD
    if isinstance(indices, torch.Tensor):
        return states_NHD.index_select(0, indices)
    return states_NHD[indices]


def _of_one_size(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return segments in buckets of about one length, those without a prefix apart."""

    def size(segment: Segment) -> tuple[bool, int, int]:
        return segment.prefix_length > 0, -segment.length.bit_length(), -segment.num_keys

    buckets: list[list[Segment]] = []
    # Of the last bucket: pairs without padding, longest segment, and most keys.
    num_pairs = 0
    Q = 0
    K = 0
    for segment in sorted(segments, key=size):
        if not buckets or not _fits(segment, buckets[-1], num_pairs, Q, K):
            buckets.append([])
            num_pairs = 0
            Q = 0
            K = 0
        buckets[-1].append(segment)
        num_pairs += segment.length * segment.num_keys
        Q = max(Q, segment.length)
        K = max(K, segment.num_keys)
    return buckets


def _fits(segment: Segment, bucket: list[Segment], num_pairs: int, Q: int, K: int) -> bool:
    """Return whether a segment may be computed with those of a bucket, padded.

    Args:
        segment: the one to add.
        bucket: at least one segment.
        num_pairs: pairs of queries and keys of the bucket, without padding.
        Q: tokens of its longest segment.
        K: most keys of its segments.
    """
    has_prefix = segment.prefix_length > 0
    if has_prefix != (bucket[0].prefix_length > 0):
        return False
    num_segments = len(bucket) + 1
    most_keys = max(K, segment.num_keys)
    num_padded = num_segments * max(Q, segment.length) * most_keys
    num_own = num_pairs + segment.length * segment.num_keys
    is_wide = num_padded > MAX_PADDED_PAIRS * num_own + CALL_PAIRS
    is_large = num_segments * most_keys > MAX_BUCKET_KEYS
    return not (is_wide or is_large)


def _bucket(segments: list[Segment], device: torch.device) -> _Bucket:
    """Pad segments to one length, on a device."""
    Q = max(segment.length for segment in segments)
    K = max(segment.num_keys for segment in segments)
    queries: list[int] = []
    keys: list[int] = []
    kept: list[int] = []
    for segment in segments:
        kept += range(len(queries), len(queries) + segment.length)
        queries += segment.tokens
        queries += [segment.start] * (Q - segment.length)
        own_keys = segment.keys
        keys += own_keys
        keys += [own_keys[-1]] * (K - len(own_keys))
    prefix_lengths = [segment.prefix_length for segment in segments]
    has_padding = len(kept) < len(queries)
    return _Bucket(
        num_segments=len(segments),
        num_queries=Q,
        num_keys=K,
        queries=_range(queries) or to_device(queries, device),
        keys=_range(keys) or to_device(keys, device),
        kept=to_device(kept, device) if has_padding else None,
        prefix_lengths=to_device(prefix_lengths, device).view(-1, 1, 1),
        has_prefix=any(prefix_lengths),
    )


def _range(indices: list[int]) -> slice | None:
    """Return the slice that equals these indices; None if no slice does."""
    first = indices[0]
    end = first + len(indices)
    if indices == list(range(first, end)):
        return slice(first, end)
    return None
