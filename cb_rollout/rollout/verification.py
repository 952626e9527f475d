"""Holds what a rollout reported against plain forwards of the model that trains."""

from collections.abc import Sequence

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.logprobs import DriftReport, drift
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import InvalidRequestError


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
    engine = manager.engine
    replays = engine.config.sampling_mask == SamplingMaskMode.REPLAY
    is_processed = replays or engine.config.logprobs_mode == LogprobsMode.PROCESSED
    comparable = [
        request
        for request in rollout
        if request.policy_versions == [(engine.policy_version, request.num_generated)]
        and not (is_processed and request.params.is_adjusted)
        and not (is_processed and request.params.is_truncated and not replays)
    ]
    stride = max(1, len(comparable) // num_sequences)
    chosen = comparable[::stride][:num_sequences]
    num_spare = num_sequences - len(chosen) if is_collective else 0
    forwards = list(rollout[:1]) * num_spare + chosen
    with manager.loop.paused():
        recomputed = {request.request_id: engine.recompute(request) for request in forwards}
    return drift({request.request_id: request.logprobs for request in chosen}, recomputed)
