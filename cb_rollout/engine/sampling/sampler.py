"""Gives sequences their next tokens: logits in, tokens appended, or the sequence ended.

Owns what is kept between steps of the same rows. Called by the thread that steps the engine.
"""

from array import array
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import torch

from cb_rollout.config.enums import LogprobsMode, SamplingMaskMode
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling import cpu as cpp_sampler
from cb_rollout.engine.sampling.draw import Sampled, SamplingBatch, create_sampling_batch, sample
from cb_rollout.engine.sampling.logits_processors import LogitsProcessing
from cb_rollout.metrics.counters import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus


class TokenSampler:
    """Samples for one engine."""

    def __init__(
        self,
        device: torch.device,
        mode: LogprobsMode,
        counters: EngineCounters,
        *,
        keeps_ids: bool = False,
    ) -> None:
        """Keep nothing yet.

        Args:
            device: where the logits are.
            mode: which distribution the log-probabilities are of.
            counters: told how much truncation left.
            keeps_ids: whether sequences remember what truncation left them.
        """
        self._counters, self._keeps_ids = counters, keeps_ids
        self._device = device
        self._mode = mode
        self._kept: tuple[list[Request], SamplingBatch, LogitsProcessing | None] | None = None

    def forget_rows(self) -> None:
        """Drop the parameters that are kept for rows that recur."""
        self._kept = None

    def extend(
        self,
        requests: Sequence[Request],
        logits_BV: torch.Tensor,
        policy_version: int,
        *,
        is_recurring: bool,
    ) -> int:
        """Append a token to every sequence, or end it as failed where there is none for it.

        Args:
            requests: the rows' sequences.
            logits_BV: float32 logits after each one's last token.
            policy_version: what the tokens are stamped with.
            is_recurring: whether the same rows are likely to come next time.

        Returns:
            How many got a token.
        """
        batch, processing = self._prepared(requests, logits_BV.shape[-1], is_recurring)
        indices_B = devices.to_device([r.num_generated for r in requests], self._device)
        processed_BV = None if processing is None else processing(logits_BV, indices_B)
        sampled = sample(logits_BV, batch, indices_B, self._mode, processed_BV)
        told = _told(sampled)
        if sampled.kept_RV is not None:
            self._note_truncation(requests, told, sampled.kept_RV)
        if processed_BV is not None or batch.top_rows is not None:
            return _append_one_by_one(requests, told, policy_version)
        return append_each(requests, told.tokens, told.logprobs, told.is_valid, policy_version)

    def extend_drafted(
        self,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        logits_BV: torch.Tensor,
        policy_version: int,
    ) -> list[int]:
        """Append to every sequence what is sampled as long as it is what was drafted, and one more.

        Args:
            requests: sequences of plain parameters; their logits are not adjusted.
            drafts: what each was expected to say; may be empty.
            logits_BV: float32 logits after each one's last token, then after each token drafted.
            policy_version: what the tokens are stamped with.

        Returns:
            How many each got.
        """
        rows = [r for r, draft in zip(requests, drafts, strict=True) for _ in range(len(draft) + 1)]
        places = [place for draft in drafts for place in range(len(draft) + 1)]
        batch = create_sampling_batch(rows, self._device)
        indices = [r.num_generated + place for r, place in zip(rows, places, strict=True)]
        indices_B = devices.to_device(indices, self._device)
        sampled = sample(logits_BV, batch, indices_B, self._mode)
        told = _told(sampled)
        num_given: list[int] = []
        is_used: list[bool] = []
        for request, draft in zip(requests, drafts, strict=True):
            num_before, is_going = request.num_generated, True
            for expected in (*draft, None):
                row = len(is_used)
                is_used.append(is_going)
                if is_going:
                    now = slice(row, row + 1)
                    given = told.tokens[now], told.logprobs[now], told.is_valid[now]
                    append_each([request], *given, policy_version)
                    is_going = told.tokens[row] == expected and not request.status.is_final
            num_given.append(request.num_generated - num_before)
        if sampled.kept_RV is not None:
            self._note_truncation(rows, told, sampled.kept_RV, is_used)
        return num_given

    def _note_truncation(
        self,
        requests: Sequence[Request],
        told: "_Told",
        kept_RV: torch.Tensor,
        is_used: Sequence[bool] | None = None,
    ) -> None:
        """Count what truncation left, and remember its ids where a trainer will want them.

        `is_used` tells of which of the requests; None: of all.
        """
        rows = [row for row, request in enumerate(requests) if request.params.is_truncated]
        used = [place for place, row in enumerate(rows) if is_used is None or is_used[row]]
        masses = [told.log_masses[place] for place in used if isfinite(told.log_masses[place])]
        self._counters.truncated_tokens += len(masses)
        self._counters.log_kept_mass += sum(masses)
        self._counters.kept_tokens += sum(told.nums_kept[place] for place in used)
        if not self._keeps_ids:
            return
        if len(used) < len(rows):
            kept_RV = kept_RV.index_select(0, devices.to_device(used, self._device))
        ids, start = kept_RV.nonzero()[:, 1].int().cpu().numpy(), 0
        for place in used:
            end = start + told.nums_kept[place]
            requests[rows[place]].kept_token_ids.append(array("i", ids[start:end].tobytes()))
            start = end

    def _prepared(
        self, requests: Sequence[Request], vocab_size: int, is_recurring: bool
    ) -> tuple[SamplingBatch, LogitsProcessing | None]:
        """The rows' parameters, kept until the rows change."""
        if is_recurring and self._kept is not None and self._kept[0] == requests:
            return self._kept[1:]
        batch, processing = create_sampling_batch(requests, self._device), None
        if any(request.is_adjusted for request in requests):
            previous = self._kept[2] if is_recurring and self._kept is not None else None
            processing = LogitsProcessing(requests, vocab_size, self._device, previous)
        if is_recurring:
            self._kept = (list(requests), batch, processing)
        return batch, processing


def create_token_sampler(
    config: RolloutConfig, device: torch.device, counters: EngineCounters
) -> TokenSampler:
    """What gives tokens as the settings say."""
    mode = LogprobsMode(config.logprobs_mode)
    keeps_ids = config.sampling_mask == SamplingMaskMode.REPLAY
    if keeps_ids:
        mode = LogprobsMode.PROCESSED
    if device.type == "cpu":
        # Compiled now, not in a rollout's first step.
        cpp_sampler.prepare()
    return TokenSampler(device, mode, counters, keeps_ids=keeps_ids)


def want_plain_tokens(requests: Sequence[Request]) -> bool:
    """Whether nobody wants more than a token of the whole vocabulary and its log-probability."""
    return not any(
        r.is_adjusted or r.params.is_truncated or r.params.top_logprobs for r in requests
    )


def append_each(
    requests: Sequence[Request],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    is_valid: Sequence[bool],
    policy_version: int,
) -> int:
    """Append each sequence's token, or end it where its logits made no distribution.

    Returns:
        How many got a token.
    """
    for request, token, logprob, valid in zip(requests, tokens, logprobs, is_valid, strict=True):
        if valid:
            request.append(token, logprob, policy_version)
        else:
            _fail_without_distribution(request)
    return sum(is_valid)


class _Told(NamedTuple):
    """What is in a `Sampled`, on the host."""

    tokens: list[int]
    logprobs: list[float]
    is_valid: list[bool]
    is_possible: list[bool]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    log_masses: list[float]
    nums_kept: list[int]


def _told(sampled: Sampled) -> _Told:
    """All of it by one transfer; empty where there is nothing."""
    kept_RV = sampled.kept_RV
    parts = {
        "tokens": sampled.token_ids_B,
        "logprobs": sampled.logprobs_B,
        "is_valid": sampled.is_valid_B,
        "is_possible": sampled.is_possible_B,
        "top_ids": sampled.top_KN and sampled.top_KN[0],
        "top_logprobs": sampled.top_KN and sampled.top_KN[1],
        "log_masses": sampled.log_mass_R,
        "nums_kept": None if kept_RV is None else kept_RV.sum(-1),
    }
    there = {name: part for name, part in parts.items() if part is not None}
    lists = dict(zip(there, devices.to_host(*there.values()), strict=True))
    return _Told(**{name: lists.get(name, []) for name in parts})


def _append_one_by_one(requests: Sequence[Request], told: _Told, policy_version: int) -> int:
    """Append where a sequence may have failed already, or wants its most likely tokens."""
    is_possible = told.is_possible or told.is_valid
    top: dict[Request, list[tuple[int, float]]] = {}
    wanting = [request for request in requests if request.params.top_logprobs]
    for request, ids, values in zip(wanting, told.top_ids, told.top_logprobs, strict=True):
        wanted = request.params.top_logprobs
        # What can not be sampled at all is no alternative.
        pairs = zip(ids[:wanted], values[:wanted], strict=True)
        top[request] = [(token, value) for token, value in pairs if value > -torch.inf]
    num_appended = 0
    for row, request in enumerate(requests):
        if request.status.is_final:
            continue
        if not told.is_valid[row]:
            _fail_without_distribution(request)
        elif not is_possible[row]:
            said = f"after {request.num_tokens} tokens none may follow: bad_words, logit_bias, "
            said += "min_new_tokens, a logits processor and the grammar forbid all; loosen them."
            request.end(RequestStatus.FAILED, FinishReason.ERROR, said)
        else:
            token, logprob = told.tokens[row], told.logprobs[row]
            request.append(token, logprob, policy_version, top.get(request))
            num_appended += 1
    return num_appended


def _fail_without_distribution(request: Request) -> None:
    request.end(
        RequestStatus.FAILED,
        FinishReason.ERROR,
        f"the model's logits after {request.num_tokens} tokens are NaN or infinite; look at the "
        "weights (a diverged step?) or raise rollout_dtype.",
    )
