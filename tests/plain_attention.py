"""Attention by its definition, which every kernel is held against."""

import torch


def softmax_attention(query_HD, keys_LKD, values_LKE, form):
    """One new token over all of its keys, in float64: `[heads, size of a value]`."""
    repeats = query_HD.shape[0] // keys_LKD.shape[1]
    keys, values = (s.double().repeat_interleave(repeats, 1) for s in (keys_LKD, values_LKE))
    scores = torch.einsum("hd,lhd->hl", query_HD.double(), keys) * form.scale
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if form.window:
        scores[:, : max(0, len(keys) - form.window)] = -torch.inf
    if form.sinks_H is not None:
        scores = torch.cat([scores, form.sinks_H.double()[:, None]], 1)
    return torch.einsum("hl,lhe->he", scores.softmax(-1)[:, : len(keys)], values)
