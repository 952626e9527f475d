"""Packed attention is the model's own, of each sequence alone, whatever computes it."""

from types import SimpleNamespace

import pytest
import torch
from plain_attention import varlen_attn, varlen_attn_of_grouped_heads
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward

from cb_rollout import ConfigurationError
from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.attention.packed import MAX_BUCKET_KEYS, PackedAttention, Segment, no_mask
from cb_rollout.packing.batch import PackingLayout, pack
from cb_rollout.packing.rows import PackedRow

HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8
SCALE = HEAD_SIZE**-0.5
CPU = torch.device("cpu")

# Lengths far apart make several buckets; the third prompt has one completion, and so no prefix. Two
# rows leave the longest ones in their midst, and a third one of these.
LENGTHS = [(200, 3), (200, 150), (200, 2), (3, 1), (3, 260), (3, 7), (4, 5)]
ROWS = [PackedRow([prompt] * prompt, [n] * new) for n, (prompt, new) in enumerate(LENGTHS)]
ROWS += [PackedRow([200] * 200, [1] * 70 + [7] * 9), PackedRow([3] * 3, [4] * 90 + [8] * 40)]
ROWS += [PackedRow([3] * 3, [4] * 90 + [8] * 30 + [9] * 6)]


def segments_of_rows():
    (batch,) = pack(ROWS, range(len(ROWS)), PackingLayout.SHARED_PREFIXES, CPU)
    assert {len(segment.prefix) for segment in batch.segments} == {0, 1, 2}
    return batch.segments


def a_layer(implementation="sdpa", **settings):
    config = SimpleNamespace(_attn_implementation=implementation, **settings)
    groups = HEADS // KEY_HEADS
    layer = torch.nn.Module()
    layer.config, layer.num_key_value_groups, layer.is_causal = config, groups, True
    layer.layer_idx = 0
    return layer.eval()


def states(num_tokens, num_keys=None):
    torch.manual_seed(0)
    lengths = num_tokens, num_keys or num_tokens, num_keys or num_tokens
    sizes = zip((HEADS, KEY_HEADS, KEY_HEADS), lengths, strict=True)
    shapes = [(1, heads, length, HEAD_SIZE) for heads, length in sizes]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def continued(*rows):
    """Segments of (history, new tokens), whose keys stand row by row, history first."""
    segments, start, key = [], 0, 0
    for history, length in rows:
        segments.append(Segment(start, length, (range(key, key + history),), key + history))
        start, key = start + length, key + history + length
    return segments, start, key


def by_definition(query, key, value, segments, window=None, sinks=None):
    """Each token over its prefix and its segment, in float64, (N, H, D)."""
    key, value = (s[0].double().repeat_interleave(HEADS // KEY_HEADS, 0) for s in (key, value))
    rows = []
    for segment in segments:
        keys = torch.tensor(segment.keys)
        own = torch.arange(segment.prefix_length, segment.num_keys)[:, None]
        distance = own - torch.arange(len(keys))
        seen = (distance >= 0) & (distance < (window or len(keys)))
        queries = query[0, :, list(segment.tokens)].double()
        scores = queries @ key[:, keys].transpose(1, 2) * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, segment.length, 1)
            scores = torch.cat([scores, sink], -1)
        rows.append(scores.softmax(-1)[..., : len(keys)] @ value[:, keys])
    return torch.cat(rows, 1).transpose(0, 1)


def flash(module, query, key, value, attention_mask, **kwargs):
    """What a flash kernel computes unpadded: queries are the last of their keys."""
    assert attention_mask is None
    ends_q, ends_k = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    assert kwargs["cu_seq_lens_q"].dtype == kwargs["cu_seq_lens_k"].dtype == torch.int32
    window = kwargs.get("sliding_window")
    key, value = (s[0].repeat_interleave(module.num_key_value_groups, 0) for s in (key, value))
    outputs, longest_q, longest_k = [], 0, 0
    for index in range(len(ends_q) - 1):
        q = query[0, :, ends_q[index] : ends_q[index + 1]]
        k, v = (s[:, ends_k[index] : ends_k[index + 1]] for s in (key, value))
        num_q, num_k = q.shape[1], k.shape[1]
        longest_q, longest_k = max(longest_q, num_q), max(longest_k, num_k)
        distance = torch.arange(num_k - num_q, num_k)[:, None] - torch.arange(num_k)
        seen = (distance >= 0) & (distance < (window or num_k))
        scores = (q @ k.transpose(1, 2) * kwargs["scaling"]).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (longest_q, longest_k)
    assert (len(outputs), ends_k[-1]) == (len(ends_k) - 1, key.shape[1])
    return torch.cat(outputs, 1).transpose(0, 1)[None], None


def gradients(output, inputs):
    weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs)


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
@pytest.mark.parametrize(
    ("implementation", "own_attention"),
    [
        ("sdpa", sdpa_attention_forward),
        ("eager", eager_attention_forward),
        ("flash_attention_2", flash),
        ("eager", with_sinks),
    ],
    ids=["sdpa", "eager", "flash", "sinks"],
)
def test_each_token_attends_to_its_own_sequence(implementation, own_attention, window):
    segments = segments_of_rows()
    layer = a_layer(implementation)
    has_sinks = own_attention is with_sinks
    if has_sinks:
        layer.sinks = torch.linspace(-1, 1, HEADS)
    inputs = states(sum(segment.length for segment in segments))
    attend = PackedAttention(segments, CPU)
    window_argument = {} if window is None else {"sliding_window": window}
    output, weights = attend(own_attention, layer, *inputs, None, scaling=SCALE, **window_argument)
    assert weights is None
    expected = by_definition(*inputs, segments, window, layer.sinks if has_sinks else None)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(output[0], inputs), gradients(expected, inputs), strict=True)
    for gradient, other in pairs:
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)
    assert attend.num_calls == 1


@pytest.mark.parametrize("varlen", [varlen_attn, varlen_attn_of_grouped_heads])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_on_a_gpu_pytorchs_own_kernel_takes_segments_unpadded(
    monkeypatch, window, continues, varlen
):
    monkeypatch.setattr(torch_compat, "varlen_attn", varlen)
    monkeypatch.setattr(torch_compat, "has_varlen", lambda *_: True)
    segments = segments_of_rows()
    inputs = states(sum(segment.length for segment in segments))
    if continues:
        segments, num_tokens, num_keys = continued((30, 4), (0, 9), (200, 1))
        inputs = states(num_tokens, num_keys)
    named = {} if window is None else {"sliding_window": window}
    attend = PackedAttention(segments, CPU)
    output, _ = attend(sdpa_attention_forward, a_layer(), *inputs, None, scaling=SCALE, **named)
    expected = by_definition(*inputs, segments, window)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_under_autocast_sdpa_takes_what_autocast_casts():
    seen = []

    def counted(module, query, key, value, *rest, **named):
        seen.append({states.dtype for states in (query, key, value)})
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    segments, num_tokens, num_keys = continued((30, 4), (0, 9))
    query, key, value = states(num_tokens, num_keys)
    layer = a_layer()
    outputs = []
    for keys in key.bfloat16(), key:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            attend = PackedAttention(segments, CPU)
            outputs.append(attend(counted, layer, query, keys, value, None, scaling=SCALE)[0])
    assert seen == [{torch.bfloat16}] * len(seen)
    assert torch.equal(*outputs)


def test_segments_of_about_one_length_share_a_call():
    calls = []

    def counted(module, query, key, *rest, **named):
        calls.append((query.shape[0], query.shape[2], key.shape[2]))
        return sdpa_attention_forward(module, query, key, *rest, **named)

    segments = segments_of_rows()
    inputs = states(sum(segment.length for segment in segments))
    PackedAttention(segments, CPU)(counted, a_layer(), *inputs, None, scaling=SCALE)
    assert sum(number for number, *_ in calls) == len(segments)
    needed = sum(s.length * (s.prefix_length + s.length) for s in segments)
    padded = sum(number * queries * keys for number, queries, keys in calls)
    assert 1 < len(calls) < len(segments)
    assert padded <= 1.5 * needed + len(calls) * (1 << 14)


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
@pytest.mark.parametrize(
    ("implementation", "own_attention"),
    [("sdpa", sdpa_attention_forward), ("flash_attention_2", flash)],
)
def test_rows_that_continue_see_their_history(implementation, own_attention, window):
    segments, num_tokens, num_keys = continued((30, 4), (0, 9), (200, 1), (7, 70), (31, 4), (0, 2))
    inputs = states(num_tokens, num_keys)
    named = {} if window is None else {"sliding_window": window}
    attend = PackedAttention(segments, CPU)
    layer = a_layer(implementation)
    output, _ = attend(own_attention, layer, *inputs, no_mask(CPU), scaling=SCALE, **named)
    expected = by_definition(*inputs, segments, window)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_are_copied_for_few_segments_at_a_time_and_never_for_one_alone():
    copied, shared = [], []

    def counted(module, query, key, *rest, **named):
        is_shared = key.untyped_storage().data_ptr() == inputs[1].untyped_storage().data_ptr()
        (shared if is_shared else copied).append(key.shape[0] * key.shape[2])
        return sdpa_attention_forward(module, query, key, *rest, **named)

    rows = [(1000, 20), (900, 20)] * 4 + [(3 * MAX_BUCKET_KEYS, 3)]
    segments, num_tokens, num_keys = continued(*rows)
    inputs = states(num_tokens, num_keys)
    with torch.no_grad():
        PackedAttention(segments, CPU)(counted, a_layer(), *inputs, None, scaling=SCALE)
    assert copied == [4 * 1020, 4 * 920]
    assert max(copied) <= MAX_BUCKET_KEYS
    assert shared == [3 * MAX_BUCKET_KEYS + 3]


def refused(said, layer, *, num_tokens=7, mask=None, max_length=None, **kwargs):
    segments = [Segment(0, 3), Segment(3, 4, (range(3),))]
    attend = PackedAttention(segments, CPU, max_length=max_length)
    with pytest.raises(ConfigurationError, match=said):
        attend(sdpa_attention_forward, layer, *states(num_tokens), mask, scaling=SCALE, **kwargs)


def test_attention_that_segments_cannot_compute_is_refused():
    refused("window of 6 tokens to itself", a_layer(sliding_window=6))
    chunked = {"layer_types": ["chunked_attention"], "attention_chunk_size": 5}
    refused("window of 5 tokens to itself", a_layer(**chunked))
    refused("window of 9 tokens to itself", a_layer(sliding_window=9), max_length=10)
    refused("full attention passes", a_layer(layer_types=["full_attention"]), sliding_window=6)
    refused("sees other tokens", a_layer(), num_tokens=8)
    refused("a mask of its own", a_layer(), mask=torch.zeros(1, 1, 7, 7))
    refused("a bias by position", a_layer(), position_bias=torch.zeros(1))
    refused("'flex_attention' takes an unknown mask", a_layer("flex_attention"))


def test_a_window_longer_than_every_sequence_is_no_window():
    segments = [Segment(0, 3), Segment(3, 4, (range(3),))]
    inputs = states(7)
    attend = PackedAttention(segments, CPU)
    layer = a_layer(sliding_window=7)
    output, _ = attend(sdpa_attention_forward, layer, *inputs, None, scaling=SCALE)
    expected = by_definition(*inputs, segments)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)
