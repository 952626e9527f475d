"""Change logits before the temperature, in the order of transformers' `generate`.

Bias, penalties, forbidden and forced tokens, custom processors, then the grammar. A sampling
parameter is added here: one `_create_` function, and its name in `LogitsProcessing`. Each function
looks for the rows that ask for its change, and returns the change, applied in place at every step,
or None if no row asks. Rows that ask for nothing keep their logits bit for bit. Called by the
thread that steps the engine.

B: rows, V: vocabulary, K: entries, P: rows with penalties, G: rows with a grammar, R: rows of the
history, C: its columns, T: tokens of the longest row.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request

# The history grows every few hundred steps, by no more than 2 KiB a row.
NUM_SPARE_COLUMNS = 256

# Takes the logits (float32, `[B, V]`) and the number of tokens each row has sampled (int64, B).
Change = Callable[[torch.Tensor, torch.Tensor], None]


class LogitsProcessing:
    """The changes of a batch's logits, kept until its rows change."""

    def __init__(
        self,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
        previous: "LogitsProcessing | None" = None,
    ) -> None:
        """Collect the changes that `requests` ask for, reusing the history of `previous`."""
        reading = [
            row
            for row, params in enumerate(r.params for r in requests)
            if params.is_penalized or params.bad_words or params.logits_processors
        ]
        self._history: _History | None = None
        if reading:
            known = None if previous is None else previous._history
            self._history = _History([requests[row] for row in reading], device, known)
        history_rows = {row: index for index, row in enumerate(reading)}
        rows = _Rows(requests, vocab_size, device, self._history, history_rows)
        created = (
            _create_bias(rows),
            _create_penalties(rows),
            _create_bad_words(rows),
            _create_early_bans(rows),
            _create_forced_end(rows),
            _create_custom(rows),
            _create_grammars(rows),
        )
        self._changes = [change for change in created if change is not None]

    # Custom processors may hold parameters.
    @torch.no_grad()
    def __call__(self, logits_BV: torch.Tensor, indices_B: torch.Tensor) -> torch.Tensor:
        """Return the changed logits; a sequence whose processor or grammar raises has failed.

        Args:
            logits_BV: float32; not changed.
            indices_B: int64, the number of tokens that each row has sampled.
        """
        logits_BV = logits_BV.clone()
        if self._history is not None:
            self._history.update()
        for change in self._changes:
            change(logits_BV, indices_B)
        return logits_BV


class _History:
    """The token ids of some sequences on the logits' device, right-padded.

    A copy of the sequences' own ids, so preemption loses nothing. A step copies the new tokens;
    only a sequence that joins is copied whole.
    """

    def __init__(
        self, requests: Sequence[Request], device: torch.device, previous: "_History | None" = None
    ) -> None:
        """Copy the sequences that `previous` holds; `update()` copies the rest."""
        self._requests = list(requests)
        self._device = device
        self._num_known = [0] * len(requests)
        num_prompt = [len(request.prompt_ids) for request in requests]
        self.num_prompt = devices.to_device(num_prompt, device)
        """Tokens of each prompt (int64, R)."""
        self.num_tokens = self.num_prompt
        """Tokens of each row, at the last update (int64, R)."""
        self._ids_RC = self._zeros(max(request.num_tokens for request in requests))
        self.ids = self._ids_RC
        """Token ids at the last update (int64, `[R, T]`), valid up to `num_tokens`."""
        if previous is not None:
            self._take_over(previous)

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        shape = (len(self._requests), num_tokens + NUM_SPARE_COLUMNS)
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _take_over(self, previous: "_History") -> None:
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
        """Copy the tokens sampled since the last update."""
        longest = max(request.num_tokens for request in self._requests)
        if longest > self._ids_RC.shape[1]:
            old_RC, self._ids_RC = self._ids_RC, self._zeros(longest)
            self._ids_RC[:, : old_RC.shape[1]] = old_RC
        rows, columns, tokens = [], [], []
        for row, (request, known) in enumerate(zip(self._requests, self._num_known, strict=True)):
            new = request.token_ids[known:]
            rows += [row] * len(new)
            columns += range(known, known + len(new))
            tokens += new
            self._num_known[row] = known + len(new)
        triple = devices.to_device([rows, columns, tokens], self._device)
        self._ids_RC[triple[0], triple[1]] = triple[2]
        self.num_tokens = devices.to_device(self._num_known, self._device)
        self.ids = self._ids_RC[:, :longest]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch's rows, from which changes are made."""

    requests: Sequence[Request]
    vocab_size: int
    device: torch.device
    history: _History | None
    """The token ids of the rows that read them; None: no row does."""
    history_rows: dict[int, int]
    """The index of each of those rows in the history."""

    def integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Return values as int64 on the logits' device."""
        return devices.to_device(values, self.device)

    def entries(self, given: Iterable[tuple[int, int, float]]) -> list[torch.Tensor]:
        """Return row, token and value of each entry (K), without tokens outside the vocabulary."""
        known = [entry for entry in given if entry[1] < self.vocab_size]
        columns = [list(column) for column in zip(*known, strict=True)] or [[], [], []]
        values_K = devices.to_device(columns[2], self.device, torch.float32)
        return [self.integers(columns[0]), self.integers(columns[1]), values_K]


def _create_bias(rows: _Rows) -> Change | None:
    """Add `logit_bias`."""
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


def _create_penalties(rows: _Rows) -> Change | None:
    """Penalize used tokens.

    Repetition is transformers' `RepetitionPenaltyLogitsProcessor`: over prompt and completion.
    Presence and frequency are OpenAI's, as in vLLM: over the completion.
    """
    penalized = [row for row, r in enumerate(rows.requests) if r.params.is_penalized]
    if not penalized or (history := rows.history) is None:
        return None
    params = [rows.requests[row].params for row in penalized]
    rows_P = rows.integers(penalized)
    history_P = rows.integers([rows.history_rows[row] for row in penalized])
    repetition_P1, presence_P1, frequency_P1 = devices.to_device(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params],
        rows.device,
        torch.float32,
    ).T[..., None]

    def penalize(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        ids_PT = history.ids[history_P].clamp(max=rows.vocab_size)
        index_T = torch.arange(ids_PT.shape[1], device=rows.device)
        is_past_PT = index_T >= history.num_tokens[history_P, None]
        is_prompt_PT = index_T < history.num_prompt[history_P, None]
        # Other tokens go to one more column, dropped in the end.
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


def _create_bad_words(rows: _Rows) -> Change | None:
    """Forbid the last token of each of `bad_words` after the tokens before it.

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
    history_K = rows.integers([rows.history_rows[row] for row, _ in words])
    ends_K, num_before_K = rows.integers([word[-1] for _, word in words]), rows.integers(num_before)
    index_T = torch.arange(-max(num_before), 0, device=rows.device)

    def forbid(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        num_tokens_K = history.num_tokens[history_K]
        newest_KT = (num_tokens_K[:, None] + index_T).clamp(min=0)
        is_equal_KT = history.ids[history_K[:, None], newest_KT] == heads_KT
        is_free_KT = -index_T > num_before_K[:, None]
        has_come_K = (is_equal_KT | is_free_KT).all(-1) & (num_before_K <= num_tokens_K)
        _forbid(logits_BV, rows_K, ends_K, has_come_K)

    return forbid


def _create_early_bans(rows: _Rows) -> Change | None:
    """Forbid stop tokens until the minimum length, and `begin_suppress_tokens` at first."""

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


def _create_forced_end(rows: _Rows) -> Change | None:
    """Allow only `forced_eos_token_id` as the last token, as transformers' processor does."""
    forced = [row for row, r in enumerate(rows.requests) if r.params.forced_eos_token_id]
    if not forced:
        return None
    rows_K = rows.integers(forced)
    last_K = rows.integers([rows.requests[row].max_new_tokens - 1 for row in forced])
    only_KV = torch.full((len(forced), rows.vocab_size), -math.inf, device=rows.device)
    for index, row in enumerate(forced):
        tokens = rows.requests[row].params.forced_eos_token_id
        only_KV[index, [token for token in tokens if token < rows.vocab_size]] = 0.0

    def force(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        is_last_K1 = (indices_B[rows_K] == last_K)[:, None]
        logits_BV[rows_K] = torch.where(is_last_K1, only_KV, logits_BV[rows_K])

    return force


def _forbid(
    logits_BV: torch.Tensor, rows_K: torch.Tensor, tokens_K: torch.Tensor, is_on_K: torch.Tensor
) -> None:
    """Set logits to -inf where `is_on_K`; a token may occur more than once."""
    added_K = torch.zeros_like(is_on_K, dtype=logits_BV.dtype).masked_fill(is_on_K, -math.inf)
    logits_BV.index_put_((rows_K, tokens_K), added_K, accumulate=True)


def _create_custom(rows: _Rows) -> Change | None:
    """Run `logits_processors`, one row at a time."""
    custom = [row for row, r in enumerate(rows.requests) if r.params.logits_processors]
    if not custom or (history := rows.history) is None:
        return None

    def process(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        for row in custom:
            request, index = rows.requests[row], rows.history_rows[row]
            input_ids = history.ids[index : index + 1, : request.num_tokens].clone()
            scores = logits_BV[row : row + 1].clone()
            for processor in request.params.logits_processors:
                name = getattr(processor, "__name__", type(processor).__name__)
                with request.failing_with(f"logits processor {name}"):
                    scores = processor(input_ids, scores)
                    _require_scores(scores, logits_BV)
                if request.status.is_final:
                    break
            else:
                logits_BV[row] = scores[0]

    return process


def _require_scores(scores: Any, logits_BV: torch.Tensor) -> None:
    """Raise unless a processor returned scores that can replace a row of the logits."""
    wanted = f"{[1, logits_BV.shape[1]]} of floating point on {logits_BV.device}"
    if not isinstance(scores, torch.Tensor):
        kind = f"{type(scores).__module__}.{type(scores).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"it returned a {kind}, not a torch.Tensor {wanted}")
    is_usable = scores.is_floating_point() and scores.layout is torch.strided
    shape, device = (1, logits_BV.shape[1]), logits_BV.device
    if not (is_usable and scores.shape == shape and scores.device == device):
        raise ValueError(
            f"it returned a tensor {list(scores.shape)} of {scores.dtype} ({scores.layout}) on "
            f"{scores.device}, not {wanted}"
        )


def _create_grammars(rows: _Rows) -> Change | None:
    """Forbid all tokens but those that each row's grammar allows."""
    matchers = {row: r.matcher for row, r in enumerate(rows.requests) if r.matcher is not None}
    if not matchers:
        return None

    rows_G = rows.integers(list(matchers))

    def constrain(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        allowed_GV = torch.zeros(len(matchers), rows.vocab_size, dtype=torch.bool)
        for allowed_V, (row, matcher) in zip(allowed_GV, matchers.items(), strict=True):
            with rows.requests[row].failing_with("the grammar"):
                matcher.fill_allowed_tokens(allowed_V)
        is_forbidden_GV = ~devices.moved(allowed_GV, rows.device)
        kept_GV = logits_BV[rows_G].masked_fill_(is_forbidden_GV, -math.inf)
        logits_BV.index_copy_(0, rows_G, kept_GV)

    return constrain
