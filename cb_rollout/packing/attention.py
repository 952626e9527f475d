"""Attend over packed tokens: each segment to its prefix and, causally, to itself.

The model's own attention function computes it, on segments of about one length at a time, padded.
Flash kernels take them unpadded: PyTorch's own too, where the model calls sdpa on a GPU in 16 bits.
Called at every layer of a packed forward, and again where gradient checkpointing computes a layer
again, by the thread that does.

N: packed tokens, H: heads, D: head size, C: segments of a bucket, Q: longest segment, K: longest
prefix and segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory.device import to_device
from cb_rollout.errors import ConfigurationError
from cb_rollout.packing.batch import Segment

# A bucket computes at most this many times its pairs of queries and keys.
MAX_PADDED_PAIRS = 1.5

# Pairs that cost as much as one more call: small segments are padded further.
CALL_PAIRS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Segments of about one length."""

    num_segments: int
    queries: torch.Tensor
    """int64, (C x Q): packed positions of the queries; any position in the padding."""
    keys: torch.Tensor
    """int64, (C x K): packed positions of prefix and segment; any position in the padding."""
    kept: torch.Tensor
    """int64: indices of `queries` that are no padding."""
    prefix_lengths: torch.Tensor
    """int64, (C, 1, 1)."""
    has_prefix: bool


class PackedAttention:
    """Attention of one packed batch, in place of the model's own lookup."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        """Sort segments into buckets.

        Args:
            segments: they cover the packed tokens; each prefix is a segment too.
            device: device of the model's inputs.
        """
        self._segments = segments
        self._num_tokens = sum(segment.length for segment in segments)
        self._longest = max(segment.prefix_length + segment.length for segment in segments)
        self._buckets = [_bucket(part, device) for part in _of_one_size(segments)]
        kept = torch.cat([bucket.queries[bucket.kept] for bucket in self._buckets])
        self._order = kept.argsort()
        self._masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}
        self._varlen: dict[str, Any] | None = None
        self.num_calls = 0

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
        """Return what the model's own attention function does for each sequence alone.

        Args:
            own_attention: that function.
            module: the model's attention module.
            query: (1, H, N, D).
            key: (1, key heads, N, D).
            value: as `key`, or with heads of another size.
            attention_mask: not used; the segments define the mask.
            kwargs: the model's other arguments.

        Returns:
            (1, N, H, D), and no weights.

        Raises:
            ConfigurationError: the model's attention cannot be computed in segments.
        """
        del attention_mask
        self.num_calls += 1
        if query.shape[0] != 1 or query.shape[2] != self._num_tokens:
            raise ConfigurationError("its attention sees other tokens than the packed ones")
        if kwargs.get("position_bias") is not None:
            raise ConfigurationError("its attention adds a bias by position")
        window = hf_compat.attention_window(module, kwargs, self._longest)
        implementation = hf_compat.attention_implementation(module)
        if implementation.startswith("flash"):
            return self._attend_unpadded(own_attention, module, query, key, value, kwargs)
        if implementation == "sdpa" and torch_compat.has_varlen(query, value, kwargs):
            return self._attend_varlen(query, key, value, window, kwargs.get("scaling"))
        dtype = hf_compat.attention_mask_dtype(implementation, query.dtype)
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        outputs = []
        for index, bucket in enumerate(self._buckets):
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
            outputs.append(output_CQHD.flatten(0, 1).index_select(0, bucket.kept))
        return torch.cat(outputs).index_select(0, self._order)[None], None

    def _mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return a bucket's mask, (C, 1, Q, K): True or 0 where a key is seen."""
        known = self._masks.get((index, window, dtype))
        if known is not None:
            return known
        bucket = self._buckets[index]
        Q, K = (len(ids) // bucket.num_segments for ids in (bucket.queries, bucket.keys))
        device = bucket.queries.device
        # Keys in the padding come after every key that a query sees.
        own_CQ1 = bucket.prefix_lengths + torch.arange(Q, device=device)[:, None]
        distances_CQK = own_CQ1 - torch.arange(K, device=device)
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

    def _attend_unpadded(
        self,
        own_attention: Any,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """Call a flash kernel of transformers 5.23 with the ends of queries and keys."""
        if self._varlen is None:
            self._varlen = _varlen_arguments(self._segments, query.device)
        varlen = dict(self._varlen)
        keys = varlen.pop("keys")
        output, _ = own_attention(
            module,
            query,
            key.index_select(2, keys),
            value.index_select(2, keys),
            None,
            **(kwargs | varlen),
        )
        return output, None

    def _attend_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, None]:
        """Call PyTorch's own flash attention of segments, which sdpa has no arguments for."""
        if self._varlen is None:
            self._varlen = _varlen_arguments(self._segments, query.device)
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        output_NHD = torch_compat.varlen_attn(
            queries.contiguous(),
            keys.index_select(0, self._varlen["keys"]),
            values.index_select(0, self._varlen["keys"]),
            self._varlen["cu_seq_lens_q"],
            self._varlen["cu_seq_lens_k"],
            self._varlen["max_length_q"],
            self._varlen["max_length_k"],
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )
        return output_NHD[None], None


def _heads(states_NHD: torch.Tensor, indices: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Return the states at `indices`, (C, H, length, D)."""
    chosen = states_NHD.index_select(0, indices)
    return chosen.unflatten(0, (num_segments, -1)).transpose(1, 2)


def _of_one_size(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return segments in buckets of about one length, those without a prefix apart."""
    buckets: list[list[Segment]] = []
    has_prefix, num_pairs, Q, K = None, 0, 0, 0
    for segment in sorted(segments, key=lambda s: (s.prefix_length > 0, -s.length)):
        num_keys = segment.prefix_length + segment.length
        own_pairs = segment.length * num_keys
        padded = max(Q, segment.length) * max(K, num_keys) * (len(buckets[-1]) + 1 if Q else 0)
        is_wide = padded > MAX_PADDED_PAIRS * (num_pairs + own_pairs) + CALL_PAIRS
        if not buckets or is_wide or has_prefix != (segment.prefix_length > 0):
            buckets.append([])
            has_prefix, num_pairs, Q, K = segment.prefix_length > 0, 0, 0, 0
        buckets[-1].append(segment)
        num_pairs, Q, K = num_pairs + own_pairs, max(Q, segment.length), max(K, num_keys)
    return buckets


def _bucket(segments: list[Segment], device: torch.device) -> _Bucket:
    Q = max(segment.length for segment in segments)
    K = max(segment.prefix_length + segment.length for segment in segments)
    queries: list[int] = []
    keys: list[int] = []
    kept: list[int] = []
    for start, length, prefix_start, prefix_length in segments:
        kept += range(len(queries), len(queries) + length)
        queries += [*range(start, start + length), *[start] * (Q - length)]
        seen = [*range(prefix_start, prefix_start + prefix_length), *range(start, start + length)]
        keys += [*seen, *[start] * (K - len(seen))]
    prefix_lengths = to_device([segment.prefix_length for segment in segments], device)
    return _Bucket(
        len(segments),
        to_device(queries, device),
        to_device(keys, device),
        to_device(kept, device),
        prefix_lengths.view(-1, 1, 1),
        any(segment.prefix_length for segment in segments),
    )


def _varlen_arguments(segments: Sequence[Segment], device: torch.device) -> dict[str, Any]:
    """Return transformers' arguments of unpadded flash attention, and the positions of its keys."""
    keys: list[int] = []
    ends_q, ends_k = [0], [0]
    for start, length, prefix_start, prefix_length in segments:
        keys += [*range(prefix_start, prefix_start + prefix_length), *range(start, start + length)]
        ends_q.append(ends_q[-1] + length)
        ends_k.append(len(keys))
    return {
        "keys": to_device(keys, device),
        "cu_seq_lens_q": to_device(ends_q, device, torch.int32),
        "cu_seq_lens_k": to_device(ends_k, device, torch.int32),
        "max_length_q": max(segment.length for segment in segments),
        "max_length_k": max(segment.prefix_length + segment.length for segment in segments),
    }
