"""Log-probability arithmetic, in float32, on logits as the model gave them.

B: rows, V: vocabulary.
"""

import math
from dataclasses import dataclass

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
    """How far recomputed log-probabilities are from the sampled ones, in nats.

    Estimates of a divergence are over the sampled tokens, each counted once, of the distribution
    that was sampled from against the recomputed one; r is the recomputed probability over the
    sampled one (Schulman 2020, "Approximating KL divergence", for k1 and k3).
    """

    max: float
    mean: float
    num_tokens: int
    request_id: str
    """The sequence that holds the largest difference; empty when nothing was compared."""
    position: int
    """The generated token, from 0, at which it lies."""
    first_position: int | None = None
    """That sequence's first token beyond `NOTABLE_DRIFT`; None: none is."""
    k1: float = 0.0
    """KL divergence: mean of -log r; unbiased, may be negative."""
    k3: float = 0.0
    """KL divergence: mean of r - 1 - log r; unbiased, never negative."""
    chi_squared: float = 0.0
    """Chi-squared divergence: mean of r**2, less 1."""
    effective_sample_size: float = 1.0
    """(sum of r)**2 over num_tokens * (sum of r**2): 1 where all weigh alike, near 0 where one
    token outweighs all."""


NOTABLE_DRIFT = 0.01
# Nats. Float32 rounding stays a thousand times below, and no clip range notices less.


def drift(sampled: dict[str, list[float]], recomputed: dict[str, list[float]]) -> DriftReport:
    """Compare log-probabilities token by token, by request id; NaN is as far off as can be."""
    pairs = [
        (a, b, request_id, position)
        for request_id, logprobs in sampled.items()
        for position, (a, b) in enumerate(zip(logprobs, recomputed[request_id], strict=True))
    ]
    if not pairs:
        return DriftReport(0.0, 0.0, 0, "", 0)
    log_ratios_N = torch.tensor([b - a for a, b, _, _ in pairs], dtype=torch.float64)
    sizes_N = log_ratios_N.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    worst = int(sizes_N.argmax())
    _, _, request_id, position = pairs[worst]
    starts_at = worst - position
    notable = (sizes_N[starts_at : worst + 1] > NOTABLE_DRIFT).nonzero()
    # Nothing can be estimated from ratios that are not numbers: as far off as can be.
    k1 = k3 = chi_squared = math.inf
    effective_sample_size = 0.0
    square = float(log_ratios_N.mul(2).exp().mean())
    if math.isfinite(square) and log_ratios_N.isfinite().all():
        ratios_N = log_ratios_N.exp()
        k1 = float(-log_ratios_N.mean())
        k3 = float((ratios_N - 1 - log_ratios_N).mean())
        chi_squared = square - 1
        effective_sample_size = float(ratios_N.mean()) ** 2 / square if square else 0.0
    return DriftReport(
        max=float(sizes_N[worst]),
        mean=float(sizes_N.mean()),
        num_tokens=len(pairs),
        request_id=request_id,
        position=position,
        first_position=int(notable[0]) if len(notable) else None,
        k1=k1,
        k3=k3,
        chi_squared=chi_squared,
        effective_sample_size=effective_sample_size,
    )
