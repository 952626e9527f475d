"""Compare a rollout's log-probabilities with plain forwards of the trained model.

Owns the choice of the sequences and the estimates of the difference. Raises nothing on a large one:
the caller does. Called from the training thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
import torch.distributed as dist

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.engine.numerics import agreement
from cb_rollout.engine.numerics.agreement import Agreement
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Difference of recomputed and sampled log-probabilities, in nats.

    Divergences are of the sampling distribution from the recomputed one. r is the recomputed over
    the sampled probability (k1 and k3: Schulman 2020, "Approximating KL divergence").
    """

    max: float
    mean: float
    num_tokens: int
    request_id: str
    """Sequence with the largest difference; empty if no sequence was compared."""
    position: int
    """Index of the generated token with the largest difference, from 0."""
    first_position: int | None = None
    """Index of the first token of that sequence that rounding does not explain, if there is one."""
    k1: float = 0.0
    """KL divergence: mean of -log r; unbiased, may be negative."""
    k3: float = 0.0
    """KL divergence: mean of r - 1 - log r; unbiased, never negative."""
    chi_squared: float = 0.0
    """Chi-squared divergence: mean of r**2, less 1."""
    effective_sample_size: float = 1.0
    """(sum of r)**2 / (num_tokens * sum of r**2): 1 if all r are equal, 1 / num_tokens if one
    dominates."""
    agreement: Agreement | None = None
    """The difference against the model's own rounding; None: it was not measured."""


def drift(
    sampled: dict[str, list[float]], recomputed: dict[str, list[float]], noise: float = 0.0
) -> DriftReport:
    """Compare log-probabilities token by token; `noise`: rounding in nats, of `rounding_noise`."""
    pairs = [
        (a, b, request_id, position)
        for request_id, logprobs in sampled.items()
        for position, (a, b) in enumerate(zip(logprobs, recomputed[request_id], strict=True))
    ]
    if not pairs:
        return DriftReport(0.0, 0.0, 0, "", 0)
    log_ratios_N = torch.tensor([b - a for a, b, _, _ in pairs], dtype=torch.float64)
    sizes_N = log_ratios_N.abs().nan_to_num(nan=inf, posinf=inf)
    worst = int(sizes_N.argmax())
    _, _, request_id, position = pairs[worst]
    notable = (sizes_N[worst - position : worst + 1] > agreement.LARGEST_MULTIPLE * noise).nonzero()
    first = int(notable[0]) if len(notable) else None
    # Ratios that are not finite allow no estimate.
    estimates = (inf, inf, inf, 0.0)
    ratios_N, square = log_ratios_N.exp(), float(log_ratios_N.mul(2).exp().mean())
    if isfinite(square) and log_ratios_N.isfinite().all():
        k1, k3 = float(-log_ratios_N.mean()), float((ratios_N - 1 - log_ratios_N).mean())
        estimates = (k1, k3, square - 1, float(ratios_N.mean()) ** 2 / square if square else 0.0)
    largest, mean = float(sizes_N[worst]), float(sizes_N.mean())
    return DriftReport(largest, mean, len(pairs), request_id, position, first, *estimates)


def rollout_drift(
    manager: ContinuousBatchingManager,
    rollout: Sequence[Request],
    num_sequences: int,
    is_collective: bool,
) -> DriftReport:
    """Recompute `num_sequences` >= 1 finished sequences, evenly chosen, of this policy; compare.

    `is_collective`: the model is sharded, so every process must run equally many forwards.
    """
    if num_sequences < 1:
        raise InvalidRequestError(f"num_sequences={num_sequences} is below 1.")
    if is_collective:
        rollout = _alike_on_all_processes(rollout)
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
    num_extra = num_sequences - len(chosen) if is_collective else 0
    forwards = list(rollout[:1]) * num_extra + chosen
    sampled = {request.request_id: request.logprobs for request in chosen}
    with manager.loop.paused():
        recomputed = {r.request_id: manager.engine.recompute(r) for r in forwards}
    if not chosen:
        return drift({}, {})
    measured, precise = chosen[: agreement.NUM_MEASURED], [None]
    if not is_collective:
        with manager.loop.paused():
            precise = [manager.engine.recompute_precisely(request) for request in measured]
    noise = agreement.overall_noise(
        _values(recomputed, measured),
        None if None in precise else [torch.tensor(logprobs) for logprobs in precise],
        manager.engine.runner.compute_dtype,
    )
    compared = agreement.agrees(
        _values(sampled, chosen), _values(recomputed, chosen), noise.expand(len(chosen))
    )
    return replace(drift(sampled, recomputed, float(noise)), agreement=compared)


def _values(logprobs: dict[str, list[float]], requests: Sequence[Request]) -> list[torch.Tensor]:
    return [torch.tensor(logprobs[request.request_id]) for request in requests]


def _alike_on_all_processes(rollout: Sequence[Request]) -> list[Request]:
    """Return the sequences with images where every process has any, else those without.

    Only a forward with images gathers the parts of a sharded vision tower, so all processes must
    run the same of the two.
    """
    kinds = [set[bool]()] * dist.get_world_size()
    dist.all_gather_object(kinds, {request.images is not None for request in rollout})
    common = set.intersection(*kinds)
    if not common and any(kinds):
        raise InvalidRequestError(
            "a sharded model is verified on rows with images, or without, on all processes alike, "
            "and no kind is on all of them; give every process prompts of one kind."
        )
    return [request for request in rollout if (request.images is not None) is max(common)]
