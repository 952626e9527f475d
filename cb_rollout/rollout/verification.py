"""Compare a rollout's log-probabilities with plain forwards of the trained model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import InvalidRequestError

# Nats. Float32 rounding stays a thousand times below, and no clip range notices less.
NOTABLE_DRIFT = 0.01


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Measure the difference of recomputed and sampled log-probabilities, in nats.

    The divergences are of the sampling distribution against the recomputed one, estimated over the
    sampled tokens, each counted once; r is recomputed over sampled probability (Schulman 2020,
    "Approximating KL divergence", for k1 and k3).
    """

    max: float
    mean: float
    num_tokens: int
    request_id: str
    """Sequence with the largest difference; empty when nothing was compared."""
    position: int
    """Index of that generated token, from 0."""
    first_position: int | None = None
    """First token of that sequence beyond `NOTABLE_DRIFT`; None: there is none."""
    k1: float = 0.0
    """KL divergence: mean of -log r; unbiased, may be negative."""
    k3: float = 0.0
    """KL divergence: mean of r - 1 - log r; unbiased, never negative."""
    chi_squared: float = 0.0
    """Chi-squared divergence: mean of r**2, less 1."""
    effective_sample_size: float = 1.0
    """(sum of r)**2 over num_tokens * (sum of r**2): 1 where all weights are equal, near 0
    where one token outweighs all."""


def drift(sampled: dict[str, list[float]], recomputed: dict[str, list[float]]) -> DriftReport:
    """Compare log-probabilities token by token, by request id; NaN counts as infinitely far."""
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
    # Ratios that are not finite allow no estimate.
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


def verified(
    manager: ContinuousBatchingManager,
    rollout: Sequence[Request],
    num_sequences: int,
    is_collective: bool,
) -> DriftReport:
    """Recompute `num_sequences` finished sequences, taken evenly over a rollout, and compare.

    Args:
        manager: whose engine generated them.
        rollout: its sequences; those whose log-probabilities are not the policy's now are passed
            over.
        num_sequences: at least 1.
        is_collective: every process of a sharded model calls this, and must run as many forwards.
    """
    if num_sequences < 1:
        raise InvalidRequestError(f"num_sequences={num_sequences} is below 1.")
    config, policy_version = manager.config, manager.policy_version
    replays = config.sampling_mask == SamplingMaskMode.REPLAY
    is_processed = replays or config.logprobs_mode == LogprobsMode.PROCESSED
    comparable = [
        request
        for request in rollout
        if request.policy_versions == [(policy_version, request.num_generated)]
        and not (is_processed and request.params.is_adjusted)
        and not (is_processed and request.params.is_truncated and not replays)
    ]
    stride = max(1, len(comparable) // num_sequences)
    chosen = comparable[::stride][:num_sequences]
    num_spare = num_sequences - len(chosen) if is_collective else 0
    forwards = list(rollout[:1]) * num_spare + chosen
    sampled = {request.request_id: request.logprobs for request in chosen}
    return drift(sampled, manager.recompute(forwards))
