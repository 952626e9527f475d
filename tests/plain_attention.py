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
