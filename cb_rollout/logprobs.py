"""Log-probability arithmetic, in float32, on logits as the model gave them.

B: rows, V: vocabulary.
"""

import math
from dataclasses import dataclass
from statistics import fmean

import torch


def chosen_logprobs(
    logits_BV: torch.Tensor, token_ids_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-softmax over the whole vocabulary, at the given tokens.

    On logits/temperature this is what TRL's loss recomputes (its `selective_log_softmax`).

    Args:
        logits_BV: float32, already divided by temperature.
        token_ids_B: int64.

    Returns:
        The log-probabilities (float32, B, natural logarithm) and each row's log-sum-exp, which is
        finite exactly when the row's logits make a distribution.
    """
    normalizers_B = logits_BV.logsumexp(-1)
    chosen_B = logits_BV.gather(1, token_ids_B[:, None])[:, 0]
    return chosen_B - normalizers_B, normalizers_B


@dataclass(frozen=True, slots=True)
class DriftReport:
    """How far sampled log-probabilities are from recomputed ones, in nats."""

    max: float
    mean: float
    num_tokens: int
    request_id: str
    """The sequence that holds the largest difference; empty when nothing was compared."""
    position: int
    """The generated token, from 0, at which it lies."""


def drift(sampled: dict[str, list[float]], recomputed: dict[str, list[float]]) -> DriftReport:
    """Compare log-probabilities token by token, by request id; NaN is as far off as can be."""
    differences = [
        (math.inf if math.isnan(a - b) else abs(a - b), request_id, position)
        for request_id, logprobs in sampled.items()
        for position, (a, b) in enumerate(zip(logprobs, recomputed[request_id], strict=True))
    ]
    if not differences:
        return DriftReport(0.0, 0.0, 0, "", 0)
    largest, request_id, position = max(differences)
    mean = fmean(difference for difference, _, _ in differences)
    return DriftReport(largest, mean, len(differences), request_id, position)
