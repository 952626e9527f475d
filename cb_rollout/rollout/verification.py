"""Compare a rollout's log-probabilities with plain forwards of the trained model.

Owns the choice of the sequences and the estimates of the difference. The caller decides whether a
difference is an error. Raises if there is nothing to compare, because an empty comparison would
look like a success. An engine's first rollout is compared separately, because the proof of its
decode steps does not cover the run's lengths and numbers of rows. Called from the training thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
import torch.distributed as dist

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.engine.cuda_graphs import ladder
from cb_rollout.engine.numerics import agreement
from cb_rollout.engine.numerics.agreement import Agreement
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.plain_forwards import precise_logprobs, recomputed_logprobs
from cb_rollout.errors import InvalidRequestError

# Sequences of a first rollout that are recomputed, evenly chosen.
NUM_COMPARED = 2

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Difference of recomputed and sampled log-probabilities, in nats.

    `agreement` is true if the difference is within the model's own rounding; it prints as text.
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
    """Index of that sequence's first token whose drift exceeds rounding; None: no token."""
    k1: float = 0.0
    """KL divergence: mean of -log r; unbiased, may be negative."""
    k3: float = 0.0
    """KL divergence: mean of r - 1 - log r; unbiased, never negative."""
    chi_squared: float = 0.0
    """Chi-squared divergence: mean of r**2, minus 1."""
    effective_sample_size: float = 1.0
    """(sum of r)**2 / (num_tokens * sum of r**2): 1 if all r are equal, 1 / num_tokens if one
    dominates."""
    agreement: Agreement | None = None
    """The difference against the model's own rounding; None: it was not measured."""


def drift(
    sampled: dict[str, list[float]], recomputed: dict[str, list[float]], noise: float = 0.0
) -> DriftReport:
    """Compare log-probabilities token by token.

    Args:
        sampled: log-probabilities of each sequence's tokens, by request id.
        recomputed: log-probabilities of the same tokens.
        noise: rounding in nats, from `rounding_noise`.
    """
    log_ratios: list[float] = []
    tokens: list[tuple[str, int]] = []
    for request_id, logprobs in sampled.items():
        pairs = zip(logprobs, recomputed[request_id], strict=True)
        for position, (sampled_logprob, recomputed_logprob) in enumerate(pairs):
            log_ratios.append(recomputed_logprob - sampled_logprob)
            tokens.append((request_id, position))
    if not tokens:
        return DriftReport(max=0.0, mean=0.0, num_tokens=0, request_id="", position=0)
    log_ratios_N = torch.tensor(log_ratios, dtype=torch.float64)
    sizes_N = log_ratios_N.abs().nan_to_num(nan=inf, posinf=inf)
    worst = int(sizes_N.argmax())
    request_id, position = tokens[worst]
    # From the sequence's first token to the worst.
    sizes_of_sequence = sizes_N[worst - position : worst + 1]
    unexplained = (sizes_of_sequence > agreement.LARGEST_MULTIPLE * noise).nonzero()
    report = DriftReport(
        max=float(sizes_N[worst]),
        mean=float(sizes_N.mean()),
        num_tokens=len(tokens),
        request_id=request_id,
        position=position,
        first_position=int(unexplained[0]) if len(unexplained) else None,
    )
    mean_square = float(log_ratios_N.mul(2).exp().mean())
    if not isfinite(mean_square) or not log_ratios_N.isfinite().all():
        # Ratios that are not finite allow no estimate.
        return replace(report, k1=inf, k3=inf, chi_squared=inf, effective_sample_size=0.0)
    ratios_N = log_ratios_N.exp()
    effective_sample_size = 0.0
    if mean_square:
        effective_sample_size = float(ratios_N.mean()) ** 2 / mean_square
    return replace(
        report,
        k1=float(-log_ratios_N.mean()),
        k3=float((ratios_N - 1 - log_ratios_N).mean()),
        chi_squared=mean_square - 1,
        effective_sample_size=effective_sample_size,
    )


def rollout_drift(
    manager: ContinuousBatchingManager,
    rollout: Sequence[Request],
    num_sequences: int,
    is_collective: bool,
) -> DriftReport:
    """Recompute `num_sequences` evenly chosen sequences of the current policy, and compare.

    `is_collective`: the model is sharded, so every process must run equally many forwards.

    Raises:
        InvalidRequestError: `num_sequences` is below 1, or no sequence can be compared, on any
            process of a sharded model.
    """
    if num_sequences < 1:
        raise InvalidRequestError(f"num_sequences={num_sequences} is below 1.")
    if is_collective:
        rollout = _alike_on_all_processes(rollout)
    comparable = [request for request in rollout if _is_comparable(request, manager)]
    _require_any(comparable, rollout, manager, is_collective)
    stride = max(1, len(comparable) // num_sequences)
    chosen = comparable[::stride][:num_sequences]
    # Processes of a sharded model that have fewer sequences run the first one again.
    num_extra = num_sequences - len(chosen) if is_collective else 0
    forwards = list(rollout[:1]) * num_extra + chosen
    sampled = {request.request_id: request.logprobs for request in chosen}
    recomputed: dict[str, list[float]] = {}
    with manager.loop.paused(runs_module=True):
        for request in forwards:
            recomputed[request.request_id] = recomputed_logprobs(manager.engine, request)
    if not chosen:
        return drift({}, {})
    measured = chosen[: agreement.NUM_MEASURED]
    noise = agreement.overall_noise(
        _values(recomputed, measured),
        None if is_collective else _precise_values(manager, measured),
        manager.engine.runner.compute_dtype,
    )
    compared = agreement.agrees(
        _values(sampled, chosen), _values(recomputed, chosen), noise.expand(len(chosen))
    )
    return replace(drift(sampled, recomputed, float(noise)), agreement=compared)


def _require_any(
    comparable: Sequence[Request],
    rollout: Sequence[Request],
    manager: ContinuousBatchingManager,
    is_collective: bool,
) -> None:
    """Raise `InvalidRequestError` if there is nothing to compare, on any process if collective."""
    num_comparable = len(comparable)
    if is_collective:
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, num_comparable)
        num_comparable = sum(counts)
    if num_comparable:
        return
    lead = "verify() has nothing to compare"
    if not rollout:
        raise InvalidRequestError(f"{lead}: no rollout was generated yet; call generate_batch.")
    version = manager.policy_version
    num_empty = sum(request.num_generated == 0 for request in rollout)
    num_older = 0
    for request in rollout:
        if request.num_generated and not _is_of_version(request, version):
            num_older += 1
    reasons: list[str] = []
    if num_older:
        reasons.append(
            f"{num_older} were sampled before the current policy version, {version}; call verify() "
            "after generate_batch and before sync_weights()"
        )
    if num_empty:
        reasons.append(f"{num_empty} have no generated token")
    num_changed = len(rollout) - num_older - num_empty
    if num_changed:
        reasons.append(
            f"{num_changed} were sampled from changed logits (penalties, truncation or a grammar), "
            "whose log-probabilities a plain forward cannot reproduce; leave these settings out"
        )
    sequences = f"{len(rollout)} sequences of the last rollout"
    raise InvalidRequestError(f"{lead}. Of the {sequences}: {'; '.join(reasons)}.")


def _is_of_version(request: Request, version: int) -> bool:
    return request.policy_versions == [(version, request.num_generated)]


class FirstRollout:
    """Decides whether an engine's first rollout must be sampled again on a lower rung."""

    def __init__(self, manager: ContinuousBatchingManager, *, is_collective: bool) -> None:
        """Compare nothing yet.

        Args:
            manager: the engine's manager.
            is_collective: True if other processes must run each forward too; then nothing is
                compared.
        """
        self._manager = manager
        is_proved = manager.engine.device.type in ladder.PROVED_DEVICES
        self._is_due = is_proved and not is_collective

    def is_wrong(self, rollout: Sequence[Request]) -> bool:
        """Return whether to sample a rollout again because decode steps stepped down.

        If log-probabilities differ from a plain forward by more than 25 times the model's own
        noise, decode steps move one rung down. Comparisons end with the first rollout that agrees,
        or on the lowest rung.

        Args:
            rollout: the finished sequences of the rollout.
        """
        manager = self._manager
        if not self._is_due or not any(_is_comparable(request, manager) for request in rollout):
            return False
        report = rollout_drift(manager, rollout, NUM_COMPARED, is_collective=False)
        if report.agreement is None:
            return False
        multiple = report.agreement.largest_multiple
        if multiple <= agreement.LARGEST_MULTIPLE:
            self._is_due = False
            return False
        with manager.loop.paused():
            has_stepped = manager.engine.paged_model.step_down(
                f"log-probabilities are {multiple:.3g} times the model's own noise off a plain "
                f"forward ({report.mean:.2g} nats in the mean)"
            )
        self._is_due = has_stepped
        if has_stepped:
            _LOGGER.warning("the first rollout is sampled again: %s", manager.decode_path)
            return True
        _LOGGER.warning(
            "log-probabilities of the first rollout are %.3g times the model's own noise off a "
            "plain forward (%.2g nats in the mean), and there is no plainer way to run decode "
            "steps; compare with generator.verify() before you train on them.",
            multiple,
            report.mean,
        )
        return False


def _is_comparable(request: Request, manager: ContinuousBatchingManager) -> bool:
    """Return whether a plain forward of the current weights should reproduce a sequence."""
    if not _is_of_version(request, manager.policy_version):
        return False
    replays_masks = manager.config.sampling_mask == SamplingMaskMode.REPLAY
    is_processed = manager.config.logprobs_mode == LogprobsMode.PROCESSED
    if replays_masks:
        return not request.params.is_adjusted
    if is_processed:
        return not request.params.is_adjusted and not request.params.is_truncated
    return True


def _precise_values(
    manager: ContinuousBatchingManager, requests: Sequence[Request]
) -> list[torch.Tensor] | None:
    """Recompute the log-probabilities in a higher precision; None if unsupported or too slow."""
    values: list[torch.Tensor] = []
    with manager.loop.paused(runs_module=True):
        for request in requests:
            logprobs = precise_logprobs(manager.engine, request)
            if logprobs is None:
                return None
            values.append(torch.tensor(logprobs))
    return values


def _values(logprobs: dict[str, list[float]], requests: Sequence[Request]) -> list[torch.Tensor]:
    return [torch.tensor(logprobs[request.request_id]) for request in requests]


def _alike_on_all_processes(rollout: Sequence[Request]) -> list[Request]:
    """Return the sequences with images if every process has some, otherwise those without.

    Only a forward with images gathers a sharded vision tower, so all processes must make the same
    choice.
    """
    # For each process, whether it has sequences with images (True) and without (False).
    has_images = {request.images is not None for request in rollout}
    of_processes = [set[bool]()] * dist.get_world_size()
    dist.all_gather_object(of_processes, has_images)
    common = set.intersection(*of_processes)
    if not common and any(of_processes):
        raise InvalidRequestError(
            "a sharded model is verified either on rows with images or on rows without, and "
            "neither kind is on all processes; give every process prompts of the same kind."
        )
    return [request for request in rollout if (request.images is not None) is max(common)]
