"""Append each sequence's next token, sampled from its logits, or end the sequence as failed.

Owns the sampling parameters that consecutive steps of the same rows share. Called by the thread
that steps the engine.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

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
    """The distribution of reported log-probabilities."""
    counters: EngineCounters
    never_sampled: Sequence[int] = ()
    """Token ids that are never sampled, unless a `logit_bias` names them."""
    keeps_ids: bool = False
    """True if the ids that truncation kept are recorded."""
    _cached: "_Prepared | None" = field(default=None, init=False)
    """Parameters of the last step, if the next step was expected to have the same rows."""

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

        If sampling raises, halves of the rows are sampled again, so only the faulty rows fail.
        `logits_BV` are float32; `is_recurring`: the next call is likely to have the same rows.
        """
        try:
            prepared = self._prepared(requests, logits_BV.shape[-1], is_recurring)
            indices_B = devices.to_device([r.num_generated for r in requests], self.device)
            processed_BV = None
            if prepared.processing is not None:
                processed_BV = prepared.processing(logits_BV)
            sampled = sample(logits_BV, prepared.batch, indices_B, self.mode, processed_BV)
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
            num_extended = 0
            for half in (slice(middle), slice(middle, None)):
                num_extended += self.extend(
                    requests[half], logits_BV[half], policy_version, is_recurring=False
                )
            return num_extended
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
        top = _top_logprobs(requests, results)
        num_appended = 0
        for row, request in enumerate(requests):
            if append_row(request, results, row, policy_version, top.get(request)):
                num_appended += 1
        return num_appended

    def _record_truncation(
        self, requests: Sequence[Request], results: "HostSampled", kept_RV: torch.Tensor | None
    ) -> None:
        masses = [mass for mass in results.log_masses if isfinite(mass)]
        self.counters.truncated_tokens += len(masses)
        self.counters.log_kept_mass += sum(masses)
        self.counters.kept_tokens += sum(results.nums_kept)
        if not self.keeps_ids or kept_RV is None:
            return
        truncated = [request for request in requests if request.params.is_truncated]
        # The ids of all rows, one row after another.
        kept_ids = kept_RV.nonzero()[:, 1].int().cpu().numpy()
        start = 0
        for request, count in zip(truncated, results.nums_kept, strict=True):
            of_row = kept_ids[start : start + count]
            request.kept_token_ids.append(array("i", of_row.tobytes()))
            start += count

    def _prepared(
        self, requests: Sequence[Request], vocab_size: int, is_recurring: bool
    ) -> "_Prepared":
        """Return the parameters that all steps of these rows share, reused from the last step."""
        if is_recurring and self._cached is not None and self._cached.requests == requests:
            return self._cached
        never_sampled = [token for token in self.never_sampled if token < vocab_size]
        batch = create_sampling_batch(requests, self.device)
        processing = None
        if never_sampled or any(request.is_adjusted for request in requests):
            processing = create_processing(requests, vocab_size, self.device, never_sampled)
        prepared = _Prepared(list(requests), batch, processing)
        if is_recurring:
            self._cached = prepared
        return prepared


class _Prepared(NamedTuple):
    """The sampling parameters of some rows, for consecutive steps of the same rows."""

    requests: list[Request]
    batch: SamplingBatch
    processing: Processing | None
    """Changes the logits; None: they are sampled unchanged."""


def keeps_ids(config: RolloutConfig) -> bool:
    """Return whether the token ids that truncation kept are recorded for a replay."""
    return config.sampling_mask == SamplingMaskMode.REPLAY


def reported_mode(config: RolloutConfig) -> LogprobsMode:
    """Return the distribution of reported log-probabilities."""
    return LogprobsMode.PROCESSED if keeps_ids(config) else LogprobsMode(config.logprobs_mode)


class HostSampled(NamedTuple):
    """A `Sampled` in system memory."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logarithms."""
    is_valid: list[bool]
    """False: the row has no token."""
    is_possible: Sequence[bool] = ()
    """False: logits processors left the row no token; empty: each row has one."""
    top_ids: Sequence[list[int]] = ()
    """The likeliest tokens of each row that asks for `top_logprobs`."""
    top_logprobs: Sequence[list[float]] = ()
    """Natural logarithms of `top_ids`."""
    log_masses: Sequence[float] = ()
    """The logarithm of each truncated row's kept probability."""
    nums_kept: Sequence[int] = ()
    """The number of tokens that truncation kept in each truncated row."""


def _to_host(sampled: Sampled) -> HostSampled:
    """Copy a `Sampled` to system memory, in one transfer."""
    tensors = {
        "tokens": sampled.token_ids_B,
        "logprobs": sampled.logprobs_B,
        "is_valid": sampled.is_valid_B,
    }
    if sampled.is_possible_B is not None:
        tensors["is_possible"] = sampled.is_possible_B
    if sampled.top_KN is not None:
        tensors["top_ids"], tensors["top_logprobs"] = sampled.top_KN
    if sampled.log_mass_R is not None:
        tensors["log_masses"] = sampled.log_mass_R
    if sampled.kept_RV is not None:
        tensors["nums_kept"] = sampled.kept_RV.sum(-1)
    lists: dict[str, Any] = dict(zip(tensors, devices.to_host(*tensors.values()), strict=True))
    return HostSampled(**lists)


def append_row(
    request: Request,
    results: HostSampled,
    row: int,
    policy_version: int,
    top_logprobs: list[tuple[int, float]] | None = None,
) -> bool:
    """Append a row's token, or fail the sequence if it has none.

    Args:
        request: the sequence.
        results: the samples of all rows.
        row: the sequence's row.
        policy_version: version of the weights that sampled.
        top_logprobs: the likeliest tokens at its position, each with its log-probability in nats;
            None: not requested.

    Returns:
        Whether the sequence got a token.
    """
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
    """Return the likeliest tokens of each sequence that asks for them, most likely first."""
    top: dict[Request, list[tuple[int, float]]] = {}
    if not results.top_ids:
        return top
    wanting = (request for request in requests if request.params.top_logprobs)
    for request, ids, values in zip(wanting, results.top_ids, results.top_logprobs, strict=True):
        wanted = request.params.top_logprobs
        # A token of probability zero is no alternative.
        pairs = zip(ids[:wanted], values[:wanted], strict=True)
        top[request] = [(token, value) for token, value in pairs if value > -torch.inf]
    return top
