"""Change logits before the temperature, in the order of transformers' `generate`.

`logit_bias` and the penalties change all rows at once. Other parameters run transformers' own
processor, a row at a time. Rows that ask for nothing keep their logits bit for bit.

B: rows, V: vocabulary, K: entries, P: rows with penalties, G: rows with a grammar, T: tokens of the
longest row, N: tokens that are never sampled. Called by the thread that steps the engine.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request

if TYPE_CHECKING:
    from cb_rollout.config.grammar import GrammarMatcher

# A `Change` changes logits, float32 `[B, V]`, in place; a `Processing` returns changed logits.
Change = Callable[[torch.Tensor], None]
Processing = Callable[[torch.Tensor], torch.Tensor]

# Takes a row's token ids (int64, `[1, T]`) and logits (float32, `[1, V]`); returns new logits.
Processor = Callable[[Any, torch.Tensor], torch.Tensor]


def create_processing(
    requests: Sequence[Request],
    vocab_size: int,
    device: torch.device,
    never_sampled: Sequence[int] = (),
) -> Processing:
    """Return a function that changes a step's logits as `requests`, the step's rows, ask for."""
    rows = _Rows(requests, vocab_size, device)
    created = (
        _create_never_sampled(rows, never_sampled),
        _create_bias(rows),
        _create_of_rows(rows, _first_processors),
        _create_penalties(rows),
        _create_of_rows(rows, _later_processors),
        _create_grammars(rows),
    )
    changes = [change for change in created if change is not None]

    # Custom processors may hold parameters.
    @torch.no_grad()
    def processed(logits_BV: torch.Tensor) -> torch.Tensor:
        changed_BV = logits_BV.clone()
        for change in changes:
            change(changed_BV)
        return changed_BV

    return processed


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch's rows, from which changes are made."""

    requests: Sequence[Request]
    vocab_size: int
    device: torch.device

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        return devices.to_device(values, self.device)

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return devices.to_device(values, self.device, torch.float32)

    # Processors that are annotated to take lists or a single token take tensors too.
    def known(self, tokens: Iterable[int]) -> Any:
        return self.integers([token for token in tokens if token < self.vocab_size])

    def entries(self, given: Iterable[tuple[int, int, float]]) -> list[torch.Tensor]:
        """Return row, token and value of each entry (K), without tokens outside the vocabulary."""
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, token, value in given:
            if token < self.vocab_size:
                rows.append(row)
                tokens.append(token)
                values.append(value)
        return [self.integers(rows), self.integers(tokens), self.numbers(values)]


def _create_never_sampled(rows: _Rows, never_sampled: Sequence[int]) -> Change | None:
    """Exclude tokens from rows whose `logit_bias` does not name them; biases are added later."""
    if not never_sampled:
        return None
    never_sampled_N = rows.integers(list(never_sampled))
    allowed: list[tuple[int, int, float]] = []
    for row, request in enumerate(rows.requests):
        for token in never_sampled:
            if token in (request.params.logit_bias or {}):
                allowed.append((row, token, 0.0))
    rows_K, tokens_K, _ = rows.entries(allowed)

    def forbid(logits_BV: torch.Tensor) -> None:
        allowed_K = logits_BV[rows_K, tokens_K]
        logits_BV.index_fill_(1, never_sampled_N, -math.inf)
        logits_BV[rows_K, tokens_K] = allowed_K

    return forbid


def _create_bias(rows: _Rows) -> Change | None:
    biases: list[tuple[int, int, float]] = []
    for row, request in enumerate(rows.requests):
        for token, value in (request.params.logit_bias or {}).items():
            biases.append((row, token, value))
    rows_K, tokens_K, values_K = rows.entries(biases)
    if not len(rows_K):
        return None

    def add(logits_BV: torch.Tensor) -> None:
        logits_BV.index_put_((rows_K, tokens_K), values_K, accumulate=True)

    return add


def _create_penalties(rows: _Rows) -> Change | None:
    """Penalize used tokens.

    Repetition is transformers' `RepetitionPenaltyLogitsProcessor`: over prompt and completion.
    Presence and frequency are OpenAI's, as in vLLM: over the completion.
    """
    requests: list[Request] = []
    penalized: list[int] = []
    prompt_lengths: list[int] = []
    repetition: list[float] = []
    presence: list[float] = []
    frequency: list[float] = []
    for row, request in enumerate(rows.requests):
        params = request.params
        if params.is_penalized:
            requests.append(request)
            penalized.append(row)
            prompt_lengths.append(len(request.prompt_ids))
            repetition.append(params.repetition_penalty)
            presence.append(params.presence_penalty)
            frequency.append(params.frequency_penalty)
    if not requests:
        return None
    rows_P = rows.integers(penalized)
    num_prompt_P1 = rows.integers(prompt_lengths)[:, None]
    repetition_P1 = rows.numbers(repetition)[:, None]
    presence_P1 = rows.numbers(presence)[:, None]
    frequency_P1 = rows.numbers(frequency)[:, None]

    def penalize(logits_BV: torch.Tensor) -> None:
        # Padding, and tokens without a logit, go to an extra column, which is dropped in the end.
        none = rows.vocab_size
        T = max(request.num_tokens for request in requests)
        padded: list[int] = []
        for request in requests:
            padded += request.token_ids
            padded += [none] * (T - request.num_tokens)
        used_PT = rows.integers(padded).view(-1, T).clamp(max=none)
        is_prompt_PT = torch.arange(T, device=rows.device) < num_prompt_P1
        sampled_PT = used_PT.masked_fill(is_prompt_PT, none)
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
    processors: dict[int, list[Processor]] = {}
    for row, request in enumerate(rows.requests):
        of_row = list(processors_of(rows, request))
        if of_row:
            processors[row] = of_row
    if not processors:
        return None

    def process(logits_BV: torch.Tensor) -> None:
        for row, of_row in processors.items():
            ids_1T = rows.integers(rows.requests[row].token_ids)[None]
            scores_1V = logits_BV[row : row + 1].clone()
            for processor in of_row:
                scores_1V = processor(ids_1T, scores_1V)
            logits_BV[row] = scores_1V[0]

    return process


def _first_processors(rows: _Rows, request: Request) -> Iterator[Processor]:
    biases: Any = {}
    for token_ids, bias in (request.params.sequence_bias or {}).items():
        if max(token_ids) < rows.vocab_size:
            biases[token_ids] = bias
    if biases:
        yield SequenceBiasLogitsProcessor(biases)


def _later_processors(rows: _Rows, request: Request) -> Iterator[Processor]:
    params = request.params
    num_prompt = len(request.prompt_ids)
    if params.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
    words = [list(word) for word in params.bad_words if max(word) < rows.vocab_size]
    if words:
        yield NoBadWordsLogitsProcessor(words)
    if request.min_generated > 0:
        shortest = num_prompt + request.min_generated
        yield MinLengthLogitsProcessor(shortest, rows.known(request.stop_tokens))
    if params.begin_suppress_tokens:
        suppressed = params.begin_suppress_tokens
        yield SuppressTokensAtBeginLogitsProcessor(suppressed, num_prompt, str(rows.device))
    if params.forced_bos_token_id:
        yield ForcedBOSTokenLogitsProcessor(rows.known(params.forced_bos_token_id))
    if params.forced_eos_token_id:
        longest = num_prompt + request.max_new_tokens
        yield ForcedEOSTokenLogitsProcessor(longest, rows.known(params.forced_eos_token_id))
    for processor in params.logits_processors:
        yield partial(_processed_by, processor, request)


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
    has_shape = scores.shape == (1, logits_BV.shape[1])
    if not (is_usable and has_shape and scores.device == logits_BV.device):
        raise ValueError(
            f"it returned a tensor {list(scores.shape)} of {scores.dtype} ({scores.layout}) on "
            f"{scores.device}, not {wanted}"
        )


def _create_grammars(rows: _Rows) -> Change | None:
    matchers: dict[int, GrammarMatcher] = {}
    for row, request in enumerate(rows.requests):
        if request.matcher is not None:
            matchers[row] = request.matcher
    if not matchers:
        return None
    rows_G = rows.integers(list(matchers))

    def constrain(logits_BV: torch.Tensor) -> None:
        allowed_GV = torch.zeros(len(matchers), rows.vocab_size, dtype=torch.bool)
        for allowed_V, (row, matcher) in zip(allowed_GV, matchers.items(), strict=True):
            with rows.requests[row].failing_with("the grammar"):
                matcher.fill_allowed_tokens(allowed_V)
        is_forbidden_GV = ~devices.moved(allowed_GV, rows.device)
        kept_GV = logits_BV[rows_G].masked_fill_(is_forbidden_GV, -math.inf)
        logits_BV.index_copy_(0, rows_G, kept_GV)

    return constrain
