"""Change logits before the temperature, in the order of transformers' `generate`.

Bias, penalties, forbidden and forced tokens, custom processors, then the grammar. A sampling
parameter is added here: one `_create_` function, and its name in `LogitsProcessing`. Each function
looks for the rows that ask for its change, and returns the change, applied in place at every step,
or None if no row asks. Rows that ask for nothing keep their logits bit for bit. Called by the
thread that steps the engine.

B: rows, V: vocabulary, K: entries, P: rows with penalties, G: rows with a grammar, R: rows of the
history, C: its columns, T: tokens of the longest row, N: tokens that are never sampled.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cb_rollout.config.sampling import MAX_LOGIT_CHANGE
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
        never_sampled: Sequence[int] = (),
    ) -> None:
        """Collect the changes that `requests` ask for.

        Args:
            requests: the sequence of each row.
            vocab_size: V.
            device: the logits'.
            previous: of the rows before these; its history is reused.
            never_sampled: token ids below V that no row samples unless its `logit_bias` names them.
        """
        reading = [
            row
            for row, params in enumerate(r.params for r in requests)
            if params.is_penalized
            or any((params.bad_words, params.sequence_bias, params.no_repeat_ngram_size))
            or params.logits_processors
        ]
        self._history: _History | None = None
        if reading:
            known = None if previous is None else previous._history
            self._history = _History([requests[row] for row in reading], device, known)
        history_rows = {row: index for index, row in enumerate(reading)}
        rows = _Rows(requests, vocab_size, device, self._history, history_rows)
        created = (
            _create_never_sampled(rows, never_sampled),
            _create_bias(rows),
            _create_sequence_bias(rows),
            _create_penalties(rows),
            _create_no_repeats(rows),
            _create_bad_words(rows),
            _create_early_bans(rows),
            _create_forced_start(rows),
            _create_forced_end(rows),
            _create_decay(rows),
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


def _create_never_sampled(rows: _Rows, never_sampled: Sequence[int]) -> Change | None:
    """Forbid tokens that are never sampled, except in rows whose `logit_bias` names them."""
    if not never_sampled:
        return None
    never_sampled_N = rows.integers(list(never_sampled))
    rows_K, tokens_K, _ = rows.entries(
        (row, token, 0.0)
        for row, request in enumerate(rows.requests)
        for token in never_sampled
        if token in (request.params.logit_bias or {})
    )

    def forbid(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        allowed_K = logits_BV[rows_K, tokens_K]
        logits_BV.index_fill_(1, never_sampled_N, -math.inf)
        logits_BV[rows_K, tokens_K] = allowed_K

    return forbid


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

    Repetition is transformers' `RepetitionPenaltyLogitsProcessor`: over prompt and completion;
    before it comes its `EncoderRepetitionPenaltyLogitsProcessor`, over the prompt.
    Presence and frequency are OpenAI's, as in vLLM: over the completion.
    """
    penalized = [row for row, r in enumerate(rows.requests) if r.params.is_penalized]
    if not penalized or (history := rows.history) is None:
        return None
    params = [rows.requests[row].params for row in penalized]
    rows_P = rows.integers(penalized)
    history_P = rows.integers([rows.history_rows[row] for row in penalized])
    factors = [(1 / p.encoder_repetition_penalty, p.repetition_penalty) for p in params]
    terms = [(p.presence_penalty, p.frequency_penalty) for p in params]
    encoder_P1, repetition_P1 = devices.to_device(factors, rows.device, torch.float32).T[..., None]
    presence_P1, frequency_P1 = devices.to_device(terms, rows.device, torch.float32).T[..., None]

    def penalize(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        ids_PT = history.ids[history_P].clamp(max=rows.vocab_size)
        index_T = torch.arange(ids_PT.shape[1], device=rows.device)
        is_past_PT = index_T >= history.num_tokens[history_P, None]
        is_prompt_PT = index_T < history.num_prompt[history_P, None]
        # Other tokens go to one more column, dropped in the end.
        used_PT = ids_PT.masked_fill(is_past_PT, rows.vocab_size)
        sampled_PT = used_PT.masked_fill(is_prompt_PT, rows.vocab_size)
        prompt_PT = ids_PT.masked_fill(~is_prompt_PT, rows.vocab_size)
        scores_PV = torch.nn.functional.pad(logits_BV[rows_P], (0, 1))
        for tokens_PT, penalty_P1 in ((prompt_PT, encoder_P1), (used_PT, repetition_P1)):
            old_PT = scores_PV.gather(1, tokens_PT)
            new_PT = torch.where(old_PT < 0, old_PT * penalty_P1, old_PT / penalty_P1)
            scores_PV.scatter_(1, tokens_PT, new_PT)
        scores_PV.scatter_(1, sampled_PT, scores_PV.gather(1, sampled_PT) - presence_P1)
        scores_PV.scatter_add_(1, sampled_PT, -frequency_P1.expand(sampled_PT.shape))
        logits_BV[rows_P] = scores_PV[:, :-1]

    return penalize


def _create_sequence_bias(rows: _Rows) -> Change | None:
    """Add `sequence_bias`, as transformers' `SequenceBiasLogitsProcessor`."""
    return _create_of_sequences(
        rows,
        [
            (row, sequence, bias)
            for row, request in enumerate(rows.requests)
            for sequence, bias in (request.params.sequence_bias or {}).items()
        ],
    )


def _create_bad_words(rows: _Rows) -> Change | None:
    """Forbid the last token of each of `bad_words` after the tokens before it.

    As transformers' `NoBadWordsLogitsProcessor`, whose words may begin in the prompt.
    """
    words = [(row, word) for row, r in enumerate(rows.requests) for word in r.params.bad_words]
    return _create_of_sequences(rows, [(row, word, -math.inf) for row, word in words])


def _create_of_sequences(
    rows: _Rows, entries: list[tuple[int, tuple[int, ...], float]]
) -> Change | None:
    """Add each entry's value to the last token of its sequence, after the tokens before it."""
    if not entries or (history := rows.history) is None:
        return None
    num_before = [len(sequence) - 1 for _, sequence, _ in entries]
    heads_KT = rows.integers(
        [
            [0] * (max(num_before) - len(sequence) + 1) + list(sequence[:-1])
            for _, sequence, _ in entries
        ]
    )
    rows_K = rows.integers([row for row, _, _ in entries])
    history_K = rows.integers([rows.history_rows[row] for row, _, _ in entries])
    ends_K = rows.integers([sequence[-1] for _, sequence, _ in entries])
    num_before_K = rows.integers(num_before)
    values_K = devices.to_device([value for *_, value in entries], rows.device, torch.float32)
    index_T = torch.arange(-max(num_before), 0, device=rows.device)

    def add(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        num_tokens_K = history.num_tokens[history_K]
        newest_KT = (num_tokens_K[:, None] + index_T).clamp(min=0)
        is_equal_KT = history.ids[history_K[:, None], newest_KT] == heads_KT
        is_free_KT = -index_T > num_before_K[:, None]
        has_come_K = (is_equal_KT | is_free_KT).all(-1) & (num_before_K <= num_tokens_K)
        added_K = values_K.masked_fill(~has_come_K, 0.0)
        logits_BV.index_put_((rows_K, ends_K), added_K, accumulate=True)

    return add


def _create_no_repeats(rows: _Rows) -> Change | None:
    """Forbid what would repeat an n-gram, as transformers' `NoRepeatNGramLogitsProcessor`."""
    sizes = [request.params.no_repeat_ngram_size for request in rows.requests]
    if not any(sizes) or (history := rows.history) is None:
        return None
    by_size = {
        size: rows.integers([row for row, other in enumerate(sizes) if other == size])
        for size in {*sizes} - {0}
    }
    history_B = rows.integers([rows.history_rows.get(row, 0) for row in range(len(sizes))])

    def forbid(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        for size, rows_K in by_size.items():
            ids_KT = history.ids[history_B[rows_K]]
            if ids_KT.shape[1] < size:
                continue
            num_tokens_K1 = history.num_tokens[history_B[rows_K], None]
            ngrams_KTN = ids_KT.unfold(1, size, 1)
            index_N = torch.arange(1 - size, 0, device=rows.device)
            newest_KN = ids_KT.gather(1, (num_tokens_K1 + index_N).clamp(min=0))
            is_same_KT = (ngrams_KTN[..., :-1] == newest_KN[:, None]).all(-1)
            index_T = torch.arange(size, ids_KT.shape[1] + 1, device=rows.device)
            last_KT = ngrams_KTN[..., -1]
            is_on_KT = is_same_KT & (index_T <= num_tokens_K1) & (last_KT < rows.vocab_size)
            rows_KT = rows_K[:, None].expand_as(last_KT)
            last_KT = last_KT.clamp(max=rows.vocab_size - 1)
            _forbid(logits_BV, rows_KT.flatten(), last_KT.flatten(), is_on_KT.flatten())

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


def _create_forced_start(rows: _Rows) -> Change | None:
    """Allow only `forced_bos_token_id` after a prompt of one token, as transformers' processor."""
    forced = {
        row: (0, request.params.forced_bos_token_id)
        for row, request in enumerate(rows.requests)
        if request.params.forced_bos_token_id and len(request.prompt_ids) == 1
    }
    return _create_forced(rows, forced)


def _create_forced_end(rows: _Rows) -> Change | None:
    """Allow only `forced_eos_token_id` as the last token, as transformers' processor does."""
    forced = {
        row: (request.max_new_tokens - 1, request.params.forced_eos_token_id)
        for row, request in enumerate(rows.requests)
        if request.params.forced_eos_token_id
    }
    return _create_forced(rows, forced)


def _create_forced(rows: _Rows, forced: dict[int, tuple[int, tuple[int, ...]]]) -> Change | None:
    """Allow only some tokens, in each of these rows, at one index."""
    if not forced:
        return None
    rows_K = rows.integers(list(forced))
    at_K = rows.integers([at for at, _ in forced.values()])
    only_KV = torch.full((len(forced), rows.vocab_size), -math.inf, device=rows.device)
    for index, (_, tokens) in enumerate(forced.values()):
        only_KV[index, [token for token in tokens if token < rows.vocab_size]] = 0.0

    def force(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        is_now_K1 = (indices_B[rows_K] == at_K)[:, None]
        logits_BV[rows_K] = torch.where(is_now_K1, only_KV, logits_BV[rows_K])

    return force


def _create_decay(rows: _Rows) -> Change | None:
    """Raise the stop tokens' logits, as transformers' `ExponentialDecayLengthPenalty`."""
    rows_K, tokens_K, starts_K = rows.entries(
        (row, token, request.params.exponential_decay_length_penalty[0])
        for row, request in enumerate(rows.requests)
        if request.params.exponential_decay_length_penalty
        for token in request.stop_tokens
    )
    if not len(rows_K):
        return None
    decays = [request.params.exponential_decay_length_penalty for request in rows.requests]
    factors = [1.0 if decay is None else decay[1] for decay in decays]
    factors_K = devices.to_device(factors, rows.device, torch.float32)[rows_K]

    def add(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        num_after_K = (indices_B[rows_K] - starts_K).clamp(min=0)
        logits_K = logits_BV[rows_K, tokens_K]
        growth_K = (factors_K**num_after_K).clamp(max=MAX_LOGIT_CHANGE) - 1
        added_K = logits_K.abs() * growth_K
        # A stop token that is forbidden stays so: -inf + inf would be NaN.
        added_K = added_K.masked_fill(logits_K.isinf(), 0.0)
        logits_BV.index_put_((rows_K, tokens_K), added_K, accumulate=True)

    return add


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
