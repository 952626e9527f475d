"""Attention by its definition, which every kernel is held against."""

import torch


def softmax_attention(query_HD, keys_LKD, values_LKE, spec):
    """One new token over all of its keys, in float64: `[heads, size of a value]`."""
    repeats = query_HD.shape[0] // keys_LKD.shape[1]
    keys, values = (s.double().repeat_interleave(repeats, 1) for s in (keys_LKD, values_LKE))
    scores = torch.einsum("hd,lhd->hl", query_HD.double(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.window:
        scores[:, : max(0, len(keys) - spec.window)] = -torch.inf
    if spec.sinks_H is not None:
        scores = torch.cat([scores, spec.sinks_H.double()[:, None]], 1)
    return torch.einsum("hl,lhe->he", scores.softmax(-1)[:, : len(keys)], values)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """Do what torch 2.11's `varlen_attn` does on a GPU: it takes fewer key heads as they are."""
    ends_q, ends_k = (getattr(ends, "held", ends).tolist() for ends in (cu_seq_q, cu_seq_k))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (query.shape[0], key.shape[0]) == (ends_q[-1], ends_k[-1])
    assert window_size[1] == 0
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    outputs, longest = [], [0, 0]
    for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        num_q, num_k = end_q - start_q, end_k - start_k
        longest = [max(longest[0], num_q), max(longest[1], num_k)]
        distance = torch.arange(num_k - num_q, num_k, device=query.device)[:, None]
        distance = distance - torch.arange(num_k, device=query.device)
        seen = distance >= 0
        if window_size[0] >= 0:
            seen = seen & (distance <= window_size[0])
        queries = query[start_q:end_q].float().transpose(0, 1)
        keys, values = (s[start_k:end_k].float().transpose(0, 1) for s in (key, value))
        # Products that autocast does not round.
        scores = (queries[:, :, None] * keys[:, None]).sum(-1) * scale
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((shares[..., None] * values[:, None]).sum(2).transpose(0, 1))
    assert [max_q, max_k] == longest
    return torch.cat(outputs).to(query.dtype)


def varlen_attn_of_grouped_heads(query, key, value, *segments, enable_gqa=False, **named):
    """Do what torch 2.13's does: it refuses fewer key heads unless it is told of them."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return varlen_attn(query, key, value, *segments, **named)
