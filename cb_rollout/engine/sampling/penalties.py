"""The token ids of some sequences on the logits' device, kept from step to step.

Owns that copy. It follows from the sequences' own token ids, so nothing is lost by preemption. A
step costs the new tokens; only a sequence that joins is copied whole.

R: rows, C: places, T: tokens of the longest row.

Changes to logits that are tensor arithmetic: bias, penalties, and what is forbidden or forced.

Owns their formulas. Each function looks what the rows ask for and returns the change, made in
place at every step until the rows change, or None where no row asks.

B: rows, V: vocabulary, K: entries, P: rows with penalties, T: tokens of the longest row.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request

NUM_SPARE_PLACES = 256
# So that the copy is enlarged every few hundred steps, at no more than 2 KiB a row.


class History:
    """Token ids by row, right-padded."""

    def __init__(
        self, requests: Sequence[Request], device: torch.device, previous: "History | None" = None
    ) -> None:
        """Take over what `previous` holds of these sequences; `update()` copies the rest."""
        self._requests = list(requests)
        self._device = device
        self._num_known = [0] * len(requests)
        num_prompt = [len(request.prompt_ids) for request in requests]
        self.num_prompt = devices.to_device(num_prompt, device)
        """Tokens of each prompt (int64, R)."""
        self.num_tokens = self.num_prompt
        """Tokens of each row, at the last update (int64, R)."""
        self._ids_RC = self._places(max(request.num_tokens for request in requests))
        self.ids = self._ids_RC
        """Token ids at the last update (int64, `[R, T]`); past `num_tokens` they mean nothing."""
        if previous is not None:
            self._take_over(previous)

    def _places(self, num_tokens: int) -> torch.Tensor:
        shape = (len(self._requests), num_tokens + NUM_SPARE_PLACES)
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _take_over(self, previous: "History") -> None:
        old_rows = {id(request): row for row, request in enumerate(previous._requests)}
        kept = [row for row, request in enumerate(self._requests) if id(request) in old_rows]
        sources = [old_rows[id(self._requests[row])] for row in kept]
        for row, source in zip(kept, sources, strict=True):
            self._num_known[row] = previous._num_known[source]
        width = max((self._num_known[row] for row in kept), default=0)
        target_index = devices.to_device(kept, self._device)
        source_index = devices.to_device(sources, self._device)
        self._ids_RC[target_index, :width] = previous._ids_RC[source_index, :width]

    def update(self) -> None:
        """Copy what was sampled since the last update."""
        longest = max(request.num_tokens for request in self._requests)
        if longest > self._ids_RC.shape[1]:
            old_RC, self._ids_RC = self._ids_RC, self._places(longest)
            self._ids_RC[:, : old_RC.shape[1]] = old_RC
        rows, places, tokens = [], [], []
        for row, (request, known) in enumerate(zip(self._requests, self._num_known, strict=True)):
            new = request.token_ids[known:]
            rows += [row] * len(new)
            places += range(known, known + len(new))
            tokens += new
            self._num_known[row] = known + len(new)
        triple = devices.to_device([rows, places, tokens], self._device)
        self._ids_RC[triple[0], triple[1]] = triple[2]
        self.num_tokens = devices.to_device(self._num_known, self._device)
        self.ids = self._ids_RC[:, :longest]


Change = Callable[[torch.Tensor, torch.Tensor], None]
# Takes the logits (float32, `[B, V]`) and how many tokens each row has sampled (int64, B).


@dataclass(frozen=True, slots=True)
class Rows:
    """The batch's rows, and what their changes are made from."""

    requests: Sequence[Request]
    vocab_size: int
    device: torch.device
    history: History | None
    """The token ids of the rows that need them; None: no row does."""
    places: dict[int, int]
    """Where each of those rows is in the history."""

    def integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Values as int64, on the logits' device."""
        return devices.to_device(values, self.device)

    def entries(self, given: Iterable[tuple[int, int, float]]) -> list[torch.Tensor]:
        """Row, token and value of each entry (K), without tokens that have no logit."""
        known = [entry for entry in given if entry[1] < self.vocab_size]
        columns = [list(column) for column in zip(*known, strict=True)] or [[], [], []]
        values_K = devices.to_device(columns[2], self.device, torch.float32)
        return [self.integers(columns[0]), self.integers(columns[1]), values_K]


def create_bias(rows: Rows) -> Change | None:
    """`logit_bias` added."""
    rows_K, tokens_K, values_K = rows.entries(
        (row, token, value)
        for row, request in enumerate(rows.requests)
        for token, value in (request.params.logit_bias or {}).items()
    )
    if not len(rows_K):
        return None

    def add(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        logits_BV.index_put_((rows_K, tokens_K), values_K, accumulate=True)

    return add


def create_penalties(rows: Rows) -> Change | None:
    """Penalties on used tokens.

    Repetition is transformers' `RepetitionPenaltyLogitsProcessor`: over prompt and completion.
    Presence and frequency are OpenAI's, as in vLLM: over the completion.
    """
    penalized = [row for row, r in enumerate(rows.requests) if r.params.is_penalized]
    if not penalized or (history := rows.history) is None:
        return None
    params = [rows.requests[row].params for row in penalized]
    rows_P = rows.integers(penalized)
    places_P = rows.integers([rows.places[row] for row in penalized])
    repetition_P1, presence_P1, frequency_P1 = devices.to_device(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params],
        rows.device,
        torch.float32,
    ).T[..., None]

    def penalize(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        ids_PT = history.ids[places_P].clamp(max=rows.vocab_size)
        index_T = torch.arange(ids_PT.shape[1], device=rows.device)
        is_past_PT = index_T >= history.num_tokens[places_P, None]
        is_prompt_PT = index_T < history.num_prompt[places_P, None]
        # What is not meant falls on one more column, dropped in the end.
        used_PT = ids_PT.masked_fill(is_past_PT, rows.vocab_size)
        sampled_PT = used_PT.masked_fill(is_prompt_PT, rows.vocab_size)
        scores_PV = torch.nn.functional.pad(logits_BV[rows_P], (0, 1))
        of_used_PT = scores_PV.gather(1, used_PT)
        of_used_PT = torch.where(
            of_used_PT < 0, of_used_PT * repetition_P1, of_used_PT / repetition_P1
        )
        scores_PV.scatter_(1, used_PT, of_used_PT)
        scores_PV.scatter_(1, sampled_PT, scores_PV.gather(1, sampled_PT) - presence_P1)
        scores_PV.scatter_add_(1, sampled_PT, -frequency_P1.expand(sampled_PT.shape))
        logits_BV[rows_P] = scores_PV[:, :-1]

    return penalize


def create_bad_words(rows: Rows) -> Change | None:
    """The last token of each of `bad_words` forbidden where the ones before it have come.

    As transformers' `NoBadWordsLogitsProcessor`, whose words may begin in the prompt.
    """
    words = [(row, word) for row, r in enumerate(rows.requests) for word in r.params.bad_words]
    if not words or (history := rows.history) is None:
        return None
    num_before = [len(word) - 1 for _, word in words]
    heads_KT = rows.integers(
        [[0] * (max(num_before) - len(word) + 1) + list(word[:-1]) for _, word in words]
    )
    rows_K = rows.integers([row for row, _ in words])
    places_K = rows.integers([rows.places[row] for row, _ in words])
    ends_K, num_before_K = rows.integers([word[-1] for _, word in words]), rows.integers(num_before)
    index_T = torch.arange(-max(num_before), 0, device=rows.device)

    def forbid(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        num_tokens_K = history.num_tokens[places_K]
        newest_KT = (num_tokens_K[:, None] + index_T).clamp(min=0)
        is_equal_KT = history.ids[places_K[:, None], newest_KT] == heads_KT
        is_free_KT = -index_T > num_before_K[:, None]
        has_come_K = (is_equal_KT | is_free_KT).all(-1) & (num_before_K <= num_tokens_K)
        _forbid(logits_BV, rows_K, ends_K, has_come_K)

    return forbid


def create_early_bans(rows: Rows) -> Change | None:
    """Stop tokens forbidden until the least length, and `begin_suppress_tokens` at first."""

    def banned(request: Request) -> dict[int, int]:
        until = dict.fromkeys(request.stop_tokens, request.min_generated)
        return until | {t: max(1, until.get(t, 0)) for t in request.params.begin_suppress_tokens}

    rows_K, tokens_K, until_K = rows.entries(
        (row, token, until)
        for row, request in enumerate(rows.requests)
        for token, until in banned(request).items()
        if until > 0
    )
    if not len(rows_K):
        return None

    def forbid(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        _forbid(logits_BV, rows_K, tokens_K, indices_B[rows_K] < until_K)

    return forbid


def create_forced_end(rows: Rows) -> Change | None:
    """`forced_eos_token_id` alone possible as the last token, as in transformers' processor."""
    forced = [row for row, r in enumerate(rows.requests) if r.params.forced_eos_token_id]
    if not forced:
        return None
    rows_K = rows.integers(forced)
    last_K = rows.integers([rows.requests[row].max_new_tokens - 1 for row in forced])
    only_KV = torch.full((len(forced), rows.vocab_size), -math.inf, device=rows.device)
    for place, row in enumerate(forced):
        tokens = rows.requests[row].params.forced_eos_token_id
        only_KV[place, [token for token in tokens if token < rows.vocab_size]] = 0.0

    def force(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        is_last_K1 = (indices_B[rows_K] == last_K)[:, None]
        logits_BV[rows_K] = torch.where(is_last_K1, only_KV, logits_BV[rows_K])

    return force


def _forbid(
    logits_BV: torch.Tensor, rows_K: torch.Tensor, tokens_K: torch.Tensor, is_on_K: torch.Tensor
) -> None:
    """Minus infinity where it is on; one token may be named more than once."""
    added_K = torch.zeros_like(is_on_K, dtype=logits_BV.dtype).masked_fill(is_on_K, -math.inf)
    logits_BV.index_put_((rows_K, tokens_K), added_K, accumulate=True)
