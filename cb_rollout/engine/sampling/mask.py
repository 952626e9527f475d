"""Compute log-softmax over the token ids that truncation kept, which take 4 bytes each.

A trainer whose weights have moved cannot recompute which tokens top-k, top-p and min-p kept.
N: tokens, V: vocabulary, M: kept ids of all tokens together.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cb_rollout.engine.numerics import operators


def masked_logprobs(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, kept: Sequence[Any], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-softmax over each token's kept ids, at the given tokens, and its entropy.

    Logits are floating point. Token ids are int64, and among the kept ids. `kept` has an
    `array("i")` for each token, as in `GenerationOutput.kept_token_ids`. Both results are float32,
    in nats, one number for each token. Differentiable. Memory: the kept logits, and the gradient of
    all logits.
    """
    device = logits_NV.device
    num_tokens = logits_NV.shape[0]
    counts_N = torch.tensor([len(ids) for ids in kept], dtype=torch.int64)
    rows_M = torch.arange(num_tokens).repeat_interleave(counts_N).to(device)
    ids_M = torch.empty(0, dtype=torch.int32)
    if kept:
        ids_M = torch.frombuffer(bytearray(b"".join(kept)), dtype=torch.int32)
    ids_M = ids_M.to(device=device, dtype=torch.int64)
    logits_M = logits_NV[rows_M, ids_M].float() / temperature
    chosen_N = logits_NV.gather(1, token_ids_N[:, None])[:, 0].float() / temperature
    largest_N = torch.full((num_tokens,), -torch.inf, device=device)
    largest_N = largest_N.scatter_reduce(0, rows_M, logits_M.detach(), "amax")
    weights_M = (logits_M - largest_N[rows_M]).exp()
    if operators.are_installed():
        # Add as log-softmax does, so that the ids' order and number do not matter.
        weights_M = operators.summable(weights_M)
    sums_N = torch.zeros_like(largest_N, dtype=weights_M.dtype).index_add(0, rows_M, weights_M)
    normalizers_N = largest_N + sums_N.log().float()
    logprobs_M = logits_M - normalizers_N[rows_M]
    entropies_N = -torch.zeros_like(largest_N).index_add(0, rows_M, logprobs_M.exp() * logprobs_M)
    return chosen_N - normalizers_N, entropies_N
