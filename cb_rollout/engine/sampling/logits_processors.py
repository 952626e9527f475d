"""Change logits before the temperature, in the order of transformers' `generate`.

Bias, penalties, forbidden and forced tokens, custom processors, then the grammar. `logit_bias` and
the penalties change all rows at once. Other parameters run transformers' own processor, a row at a
time. Rows that ask for nothing keep their logits bit for bit. Called by the thread that steps the
engine.

B: rows, V: vocabulary, K: entries, P: rows with penalties, G: rows with a grammar, R: rows of the
history, C: its columns, T: tokens of the longest row, N: tokens that are never sampled.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from cb_rollout.config.sampling import MAX_LOGIT_CHANGE
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request

# The history grows every few hundred steps, by no more than 2 KiB a row.
NUM_SPARE_COLUMNS = 256

# Takes the logits (float32, `[B, V]`) and the number of tokens each row has sampled (int64, B).
Change = Callable[[torch.Tensor, torch.Tensor], None]

# Takes a row's token ids (int64, `[1, T]`) and logits (float32, `[1, V]`); returns new logits.
Processor = Callable[[Any, torch.Tensor], torch.Tensor]


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
        """Collect the changes that the rows of `requests` ask for; reuse the `previous` history."""
        penalized = [row for row, request in enumerate(requests) if request.params.is_penalized]
        self._history: _History | None = None
        if penalized:
            known = None if previous is None else previous._history
            self._history = _History([requests[row] for row in penalized], device, known)
        rows = _Rows(requests, vocab_size, device)
        created = (
            _create_never_sampled(rows, never_sampled),
            _create_bias(rows),
            _create_of_rows(rows, _first_processors),
            None if self._history is None else _create_penalties(rows, penalized, self._history),
            _create_of_rows(rows, _later_processors),
            _create_grammars(rows),
        )
        self._changes = [change for change in created if change is not None]

    # Custom processors may hold parameters.
    @torch.no_grad()
    def __call__(self, logits_BV: torch.Tensor, indices_B: torch.Tensor) -> torch.Tensor:
        """Return changed float32 logits after `indices_B` (int64) sampled tokens of each row."""
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

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        return devices.to_device(values, self.device)

    # Processors that are annotated to take lists or a single token take tensors too.
    def known(self, tokens: Iterable[int]) -> Any:
        return self.integers([token for token in tokens if token < self.vocab_size])

    def entries(self, given: Iterable[tuple[int, int, float]]) -> list[torch.Tensor]:
        """Return row, token and value of each entry (K), without tokens outside the vocabulary."""
        entries = [entry for entry in given if entry[1] < self.vocab_size]
        rows, tokens, values = map(list, zip(*entries, strict=True)) if entries else ([], [], [])
        values_K = devices.to_device(values, self.device, torch.float32)
        return [self.integers(rows), self.integers(tokens), values_K]


def _create_never_sampled(rows: _Rows, never_sampled: Sequence[int]) -> Change | None:
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


def _create_penalties(rows: _Rows, penalized: list[int], history: _History) -> Change:
    """Penalize used tokens, in the rows of `penalized`, whose tokens `history` holds.

    Repetition is transformers' `RepetitionPenaltyLogitsProcessor`: over prompt and completion.
    Presence and frequency are OpenAI's, as in vLLM: over the completion.
    """
    params = [rows.requests[row].params for row in penalized]
    rows_P = rows.integers(penalized)
    given = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    columns_3P1 = devices.to_device(given, rows.device, torch.float32).T[..., None]
    repetition_P1, presence_P1, frequency_P1 = columns_3P1

    def penalize(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        ids_PT = history.ids.clamp(max=rows.vocab_size)
        index_T = torch.arange(ids_PT.shape[1], device=rows.device)
        is_past_PT = index_T >= history.num_tokens[:, None]
        is_prompt_PT = index_T < history.num_prompt[:, None]
        # Other tokens go to one more column, dropped in the end.
        used_PT = ids_PT.masked_fill(is_past_PT, rows.vocab_size)
        sampled_PT = used_PT.masked_fill(is_prompt_PT, rows.vocab_size)
        scores_PV = torch.nn.functional.pad(logits_BV[rows_P], (0, 1))
        old_PT = scores_PV.gather(1, used_PT)
        new_PT = torch.where(old_PT < 0, old_PT * repetition_P1, old_PT / repetition_P1)
        scores_PV.scatter_(1, used_PT, new_PT)
        scores_PV.scatter_(1, sampled_PT, scores_PV.gather(1, sampled_PT) - presence_P1)
        scores_PV.scatter_add_(1, sampled_PT, -frequency_P1.expand(sampled_PT.shape))
        logits_BV[rows_P] = scores_PV[:, :-1]

    return penalize


def _create_of_rows(
    rows: _Rows, processors_of: Callable[[_Rows, Request], Iterable[Processor]]
) -> Change | None:
    processors = {row: [*processors_of(rows, r)] for row, r in enumerate(rows.requests)}
    processors = {row: several for row, several in processors.items() if several}
    if not processors:
        return None

    def process(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        for row, several in processors.items():
            ids_1T = rows.integers(rows.requests[row].token_ids)[None]
            scores_1V = logits_BV[row : row + 1].clone()
            for processor in several:
                scores_1V = processor(ids_1T, scores_1V)
            logits_BV[row] = scores_1V[0]

    return process


def _first_processors(rows: _Rows, request: Request) -> Iterator[Processor]:
    params = request.params
    given = (params.sequence_bias or {}).items()
    biases: Any = {s: bias for s, bias in given if max(s) < rows.vocab_size}
    if biases:
        yield SequenceBiasLogitsProcessor(biases)
    if params.encoder_repetition_penalty != 1:
        prompt_1T = rows.known(request.prompt_ids)[None]
        yield EncoderRepetitionPenaltyLogitsProcessor(params.encoder_repetition_penalty, prompt_1T)


def _later_processors(rows: _Rows, request: Request) -> Iterator[Processor]:
    params, num_prompt = request.params, len(request.prompt_ids)
    if params.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
    if words := [list(word) for word in params.bad_words if max(word) < rows.vocab_size]:
        yield NoBadWordsLogitsProcessor(words)
    if (least := request.min_generated) > 0:
        yield MinLengthLogitsProcessor(num_prompt + least, rows.known(request.stop_tokens))
    if tokens := params.begin_suppress_tokens:
        yield SuppressTokensAtBeginLogitsProcessor(tokens, num_prompt, str(rows.device))
    if params.forced_bos_token_id:
        yield ForcedBOSTokenLogitsProcessor(rows.known(params.forced_bos_token_id))
    if params.forced_eos_token_id:
        longest = num_prompt + request.max_new_tokens
        yield ForcedEOSTokenLogitsProcessor(longest, rows.known(params.forced_eos_token_id))
    if params.exponential_decay_length_penalty:
        start, factor = params.exponential_decay_length_penalty
        yield partial(_decayed, rows.known(request.stop_tokens), num_prompt + start, factor)
    for processor in params.logits_processors:
        yield partial(_processed_by, processor, request)


def _decayed(
    stop_K: torch.Tensor, start: int, factor: float, ids_1T: torch.Tensor, scores_1V: torch.Tensor
) -> torch.Tensor:
    """Raise the stop tokens' logits, as transformers' `ExponentialDecayLengthPenalty`.

    That one overflows, and in transformers 5.17 gives NaN for a stop token that is forbidden.
    """
    num_after = ids_1T.shape[1] - start
    if num_after <= 0:
        return scores_1V
    growth = MAX_LOGIT_CHANGE
    if num_after * math.log(factor) < math.log(growth):
        growth = factor**num_after
    logits_1K = scores_1V[:, stop_K]
    # A stop token that is forbidden stays so: -inf + inf would be NaN.
    added_1K = (logits_1K.abs() * (growth - 1)).masked_fill(logits_1K.isinf(), 0.0)
    return scores_1V.index_add(1, stop_K, added_1K)


def _processed_by(
    processor: Any, request: Request, ids_1T: torch.Tensor, scores_1V: torch.Tensor
) -> torch.Tensor:
    """Run one of `logits_processors`; the first that raises ends the sequence."""
    if request.status.is_final:
        return scores_1V
    name = getattr(processor, "__name__", type(processor).__name__)
    with request.failing_with(f"logits processor {name}"):
        scores = processor(ids_1T, scores_1V)
        _require_scores(scores, scores_1V)
        return scores
    return scores_1V


def _require_scores(scores: Any, logits_BV: torch.Tensor) -> None:
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
