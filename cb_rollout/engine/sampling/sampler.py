"""Append each sequence's next token, sampled from its logits, or end the sequence as failed.

Owns the sampling parameters that consecutive steps of the same rows share. Called by the thread
that steps the engine.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import Sampled, SamplingBatch, create_sampling_batch, sample
from cb_rollout.engine.sampling.logits_processors import Processing, create_processing
from cb_rollout.metrics.registry import EngineCounters


@dataclass(eq=False)
class TokenSampler:
    """The sampler of one engine."""

    device: torch.device
    mode: LogprobsMode
    """The distribution that log-probabilities are taken from."""
    counters: EngineCounters
    never_sampled: Sequence[int] = ()
    """Token ids that a `logit_bias` alone allows."""
    keeps_ids: bool = False
    """True if the ids that truncation kept are recorded."""
    _cached: tuple[list[Request], SamplingBatch, Processing | None] | None = field(
        default=None, init=False
    )

    def forget_rows(self) -> None:
        self._cached = None

    def extend(
        self,
        requests: Sequence[Request],
        logits_BV: torch.Tensor,
        policy_version: int,
        *,
        is_recurring: bool,
    ) -> int:
        """Append a token to every sequence, or end it as failed; return how many got a token.

        Where sampling raises, halves of the rows are sampled again, so only the rows at fault fail.
        `logits_BV` are float32; `is_recurring`: the next call is likely to have the same rows.
        """
        try:
            batch, processing = self._prepared(requests, logits_BV.shape[-1], is_recurring)
            indices_B = devices.to_device([r.num_generated for r in requests], self.device)
            processed_BV = None if processing is None else processing(logits_BV)
            sampled = sample(logits_BV, batch, indices_B, self.mode, processed_BV)
            results = _to_host(sampled)
        except Exception as error:
            if devices.is_out_of_memory(error):
                raise
            self.forget_rows()
            if len(requests) == 1:
                (request,) = requests
                if not request.status.is_final:
                    cause = f"raised {type(error).__name__}: {error}"
                    action = f"sampling after {request.num_tokens} tokens"
                    request.fail(f"{action} {cause}; change its sampling parameters.", error)
                return 0
            middle = len(requests) // 2
            return sum(
                self.extend(requests[half], logits_BV[half], policy_version, is_recurring=False)
                for half in (slice(middle), slice(middle, None))
            )
        return self.append(requests, results, policy_version, sampled.kept_RV)

    def append(
        self,
        requests: Sequence[Request],
        results: "HostSampled",
        policy_version: int,
        kept_RV: torch.Tensor | None = None,
    ) -> int:
        """Append tokens that a CUDA graph or `extend` sampled; return how many got a token."""
        if results.log_masses:
            self._record_truncation(requests, results, kept_RV)
        top = _top_logprobs(requests, results) if results.top_ids else {}
        rows = enumerate(requests)
        return sum(append_row(r, results, row, policy_version, top.get(r)) for row, r in rows)

    def _record_truncation(
        self, requests: Sequence[Request], results: "HostSampled", kept_RV: torch.Tensor | None
    ) -> None:
        masses = list(filter(isfinite, results.log_masses))
        self.counters.truncated_tokens += len(masses)
        self.counters.log_kept_mass += sum(masses)
        self.counters.kept_tokens += sum(results.nums_kept)
        if not self.keeps_ids or kept_RV is None:
            return
        truncated = (request for request in requests if request.params.is_truncated)
        ids, start = kept_RV.nonzero()[:, 1].int().cpu().numpy(), 0
        for request, count in zip(truncated, results.nums_kept, strict=True):
            request.kept_token_ids.append(array("i", ids[start : start + count].tobytes()))
            start += count

    def _prepared(
        self, requests: Sequence[Request], vocab_size: int, is_recurring: bool
    ) -> tuple[SamplingBatch, Processing | None]:
        if is_recurring and self._cached is not None and self._cached[0] == requests:
            return self._cached[1:]
        never_sampled = [token for token in self.never_sampled if token < vocab_size]
        batch = create_sampling_batch(requests, self.device)
        processing = None
        if never_sampled or any(request.is_adjusted for request in requests):
            processing = create_processing(requests, vocab_size, self.device, never_sampled)
        if is_recurring:
            self._cached = (list(requests), batch, processing)
        return batch, processing


def keeps_ids(config: RolloutConfig) -> bool:
    """Return whether the token ids that truncation kept are recorded for a replay."""
    return config.sampling_mask == SamplingMaskMode.REPLAY


def reported_mode(config: RolloutConfig) -> LogprobsMode:
    """Return the distribution that log-probabilities are taken from."""
    return LogprobsMode.PROCESSED if keeps_ids(config) else LogprobsMode(config.logprobs_mode)


class HostSampled(NamedTuple):
    """A `Sampled` in system memory."""

    tokens: list[int]
    logprobs: list[float]
    is_valid: list[bool]
    is_possible: list[bool]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    log_masses: list[float]
    nums_kept: list[int]


def _to_host(sampled: Sampled) -> HostSampled:
    """Copy a `Sampled` to system memory by one transfer; an absent tensor becomes an empty list."""
    kept_RV = sampled.kept_RV
    tensors = (
        *(sampled.token_ids_B, sampled.logprobs_B, sampled.is_valid_B, sampled.is_possible_B),
        *(sampled.top_KN or (None, None)),
        *(sampled.log_mass_R, None if kept_RV is None else kept_RV.sum(-1)),
    )
    lists = iter(devices.to_host(*(tensor for tensor in tensors if tensor is not None)))
    return HostSampled(*([] if tensor is None else next(lists) for tensor in tensors))


def append_row(
    request: Request,
    results: HostSampled,
    row: int,
    policy_version: int,
    top_logprobs: list[tuple[int, float]] | None = None,
) -> bool:
    """Append a row's token, or fail the sequence if it has none; return whether it got one."""
    if request.status.is_final:
        # A logits processor or a grammar raised.
        return False
    if not results.is_valid[row]:
        advice = "look at the weights (a diverged step?) or raise rollout_dtype."
        logits = f"the model's logits after {request.num_tokens} tokens"
        request.fail(f"{logits} are NaN or infinite; {advice}")
        return False
    if results.is_possible and not results.is_possible[row]:
        cause = f"{', '.join(request.params.adjustments)} left no finite score to sample from"
        advice = "loosen them, or lower max_new_tokens."
        request.fail(f"after {request.num_tokens} tokens none may follow: {cause}; {advice}")
        return False
    request.append(results.tokens[row], results.logprobs[row], policy_version, top_logprobs)
    return True


def _top_logprobs(
    requests: Sequence[Request], results: HostSampled
) -> dict[Request, list[tuple[int, float]]]:
    top: dict[Request, list[tuple[int, float]]] = {}
    wanting = (request for request in requests if request.params.top_logprobs)
    for request, ids, values in zip(wanting, results.top_ids, results.top_logprobs, strict=True):
        wanted = request.params.top_logprobs
        # A token of probability zero is no alternative.
        pairs = zip(ids[:wanted], values[:wanted], strict=True)
        top[request] = [(token, value) for token, value in pairs if value > -torch.inf]
    return top
