"""Apply top-k, top-p and min-p, as transformers does, sorting as little as possible.

Arithmetic on logits; keeps no state. R: rows, V: vocabulary, M: candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.memory import device as devices

# More tokens than any vocabulary has.
NO_TOP_K = 2**31 - 1

# A smaller top-p may be zero in float32, which would exclude even the most likely token.
LEAST_TOP_P = 1e-30

# Number of most likely tokens, among which top-p and min-p look for the last token to keep.
NUM_CANDIDATES = 1024

# If more than one token in four is a candidate, sorting the vocabulary costs little more.
SORTED_SHARE = 4


# Cumulative sums are counted in this many units of a row's total, as fine as float64's rounding.
CUMULATIVE_UNITS = 2.0**52


def cumulative_units(values_BK: torch.Tensor, totals_B1: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums of values >= 0, as int64 counts of `total / CUMULATIVE_UNITS`.

    Integers, because `torch.use_deterministic_algorithms` refuses a cumulative sum of floats on a
    GPU. An integer sum has the same bits in any order.
    """
    shares_BK = values_BK.double() / totals_B1.double()
    return (shares_BK * CUMULATIVE_UNITS).round().long().cumsum(-1)


@dataclass(frozen=True, slots=True)
class Truncation:
    """The truncation parameters of some rows."""

    top_k_R: torch.Tensor
    """int64; `NO_TOP_K`: none."""
    top_p_R: torch.Tensor
    """float32; 1: none."""
    min_p_R: torch.Tensor
    """float32; 0: none."""
    has_whole: bool
    """True: some row has no top-k, so its top-p counts its whole vocabulary."""
    num_candidates: int
    """The number of most likely tokens to look at first."""


def create_truncation(params: Sequence[SamplingParams], device: torch.device) -> Truncation | None:
    """Collect the truncation parameters of rows; None: there are no rows."""
    if not params:
        return None
    top_k: list[int] = []
    top_p: list[float] = []
    min_p: list[float] = []
    num_candidates = 0
    for of_row in params:
        wanted = NUM_CANDIDATES
        if of_row.top_k:
            # More than k, since other tokens may be as likely as the k-th.
            wanted = 2 * of_row.top_k
        num_candidates = max(num_candidates, wanted)
        top_k.append(of_row.top_k or NO_TOP_K)
        top_p.append(max(of_row.top_p, LEAST_TOP_P))
        min_p.append(of_row.min_p)
    return Truncation(
        top_k_R=devices.to_device(top_k, device),
        top_p_R=devices.to_device(top_p, device, torch.float32),
        min_p_R=devices.to_device(min_p, device, torch.float32),
        has_whole=NO_TOP_K in top_k,
        num_candidates=num_candidates,
    )


def truncate(logits_RV: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return float32 logits, already divided by temperature, with excluded tokens at -inf.

    Each rule keeps the most likely tokens up to some point. If the last candidate is excluded, so
    are all less likely tokens, and the vocabulary need not be sorted.
    """
    if truncation.num_candidates * SORTED_SHARE <= logits_RV.shape[-1]:
        values_RM, order_RM = logits_RV.topk(truncation.num_candidates)
        keep_RM, is_last_in_R = _keep(values_RM, logits_RV, truncation)
        if not is_last_in_R.any():
            nothing_RV = torch.full_like(logits_RV, -torch.inf)
            kept_RM = values_RM.masked_fill(~keep_RM, -torch.inf)
            return nothing_RV.scatter_(-1, order_RM, kept_RM)
    sorted_RV, order_RV = logits_RV.sort(-1, descending=True)
    keep_RV, _ = _keep(sorted_RV, logits_RV, truncation)
    kept_RV = sorted_RV.masked_fill(~keep_RV, -torch.inf)
    return torch.empty_like(kept_RV).scatter_(-1, order_RV, kept_RV)


def _keep(
    values_RM: torch.Tensor, logits_RV: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the tokens to keep among each row's most likely ones, in order.

    Returns:
        A bool mask, `[R, M]`, and whether the M candidates may be too few, bool, `[R]`. They may be
        too few without top-k if the last candidate is kept, and with top-k if it is among the k,
        since equally likely tokens may follow.
    """
    M = values_RM.shape[-1]
    top_k_R1 = truncation.top_k_R[:, None]
    top_p_R1 = truncation.top_p_R[:, None]
    last_values_R1 = values_RM.gather(-1, top_k_R1.clamp(max=M) - 1)
    left_RM = (values_RM >= last_values_R1) & (values_RM > -torch.inf)
    # Top-p counts the tokens that top-k keeps; without top-k, the whole vocabulary.
    total_R1 = values_RM.masked_fill(~left_RM, -torch.inf).logsumexp(-1, keepdim=True)
    is_whole_R1 = top_k_R1 == NO_TOP_K
    if truncation.has_whole:
        total_R1 = torch.where(is_whole_R1, logits_RV.logsumexp(-1, keepdim=True), total_R1)
    probabilities_RM = (values_RM - total_R1).exp()
    ends_RM = cumulative_units(probabilities_RM, torch.ones_like(top_p_R1))
    mass_before_RM = ends_RM / CUMULATIVE_UNITS - probabilities_RM
    keep_RM = left_RM & ((top_p_R1 >= 1) | (mass_before_RM < top_p_R1))
    keep_RM &= probabilities_RM >= truncation.min_p_R[:, None] * probabilities_RM[:, :1]
    # Equally likely tokens stay or go together, so that no order of sorting decides.
    least_R1 = values_RM.masked_fill(~keep_RM, torch.inf).amin(-1, keepdim=True)
    keep_RM |= left_RM & (values_RM >= least_R1)
    return keep_RM, torch.where(is_whole_R1, keep_RM, left_RM)[:, -1]
