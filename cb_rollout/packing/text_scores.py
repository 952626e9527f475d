"""Score given texts, token by token, with an engine's generating weights.

No key is written to the engine's cache, and no gradient is kept. Called by the thread that paused
the engine.

K: scored tokens of a batch, V: vocabulary.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.engine.core import Engine
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.errors import ConfigurationError
from cb_rollout.packing.batch import PackedBatch, PackingLayout, pack
from cb_rollout.packing.forward import Scores, score_batches
from cb_rollout.packing.logprobs import (
    CHUNK_TOKENS,
    REPLACING,
    head_logits,
    score_in_agreed_layout,
)
from cb_rollout.packing.rows import PackedRow, with_images, with_rope_sides

_LOGGER = logging.getLogger(__name__)

TopTokens = list[tuple[int, float]]
"""The likeliest tokens at a position, `(token id, natural logarithm)`, the likeliest first."""


class TextScores(NamedTuple):
    """Scores of a text's tokens, except the first."""

    logprobs: list[float]
    """Natural logarithms."""
    top_logprobs: list[TopTokens]
    """Empty if none were requested."""


class _TopOfBatch(NamedTuple):
    """The likeliest tokens at the position of each scored token of a batch."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


class Text(NamedTuple):
    """A text to score, of at least one token."""

    token_ids: list[int]
    images: PromptImages | None
    temperature: float
    """Temperature that divides the logits, above 0."""
    adapter: str | None = None
    """The only adapter that scores it; None: the active adapters."""


def _rows(inner: Any, texts: Sequence[Text]) -> list[PackedRow]:
    """Return each text as a row: its first token is the prompt, the others are the completion."""
    rows: list[PackedRow] = []
    for text in texts:
        row = PackedRow(
            prompt_ids=text.token_ids[:1],
            completion_ids=text.token_ids[1:],
            temperature=text.temperature,
        )
        rows.append(row)
    rows = with_rope_sides(inner, rows)
    images = [text.images for text in texts]
    if any(images_of_text is not None for images_of_text in images):
        return with_images(inner, rows, images)
    return rows


def score_texts(
    engine: Engine, texts: Sequence[Text], *, top_k: int, max_tokens: int
) -> list[TextScores]:
    """Score the tokens of each text after its first, under the engine's weights.

    The texts of each adapter are scored together in packed batches, where shared prefixes are
    computed once. If the model is split over processes, uses bitwise numerics, or gives different
    log-probabilities in packed and padded batches, each text gets a separate plain forward.

    Args:
        engine: an engine that is paused.
        texts: the texts to score.
        top_k: number of the likeliest tokens to report at each position; 0: none.
        max_tokens: maximum tokens of a batch; a longer text is a separate batch.
    """
    indices_by_adapter: dict[str | None, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        indices_by_adapter[text.adapter].append(index)
    scores: dict[int, TextScores] = {}
    for adapter, indices in indices_by_adapter.items():
        of_adapter = [texts[index] for index in indices]
        with engine.runner.under_adapter(adapter):
            scored = _score_together(engine, of_adapter, top_k, max_tokens)
        scores.update(zip(indices, scored, strict=True))
    return [scores[index] for index in range(len(texts))]


def _score_together(
    engine: Engine, texts: Sequence[Text], top_k: int, max_tokens: int
) -> list[TextScores]:
    """Score texts under one adapter, which is active already; see `score_texts`."""
    runner = engine.runner
    with torch.no_grad(), runner.computing(), eval_mode(engine.model):
        if runner.is_split or runner.is_bitwise:
            return _plain(engine, texts, top_k)
        if all(len(text.token_ids) == 1 for text in texts):
            return [TextScores([], []) for _ in texts]
        rows = _rows(engine.model, texts)
        model = engine.model
        if _is_shared(engine):
            # Its trainer calls it through its wrappers too, and so does the plain forward below.
            model = engine.training_model.module
        score = partial(_packed, model, rows, top_k, max_tokens)
        try:
            with REPLACING, runner.autocast():
                return score_in_agreed_layout(
                    model, rows, score, may_fork=False, adapter=texts[0].adapter
                )
        except ConfigurationError as error:
            _LOGGER.info("score() runs a plain forward for each text: %s", error)
            return _plain(engine, texts, top_k)


def _is_shared(engine: Engine) -> bool:
    """Return whether the engine runs the training module itself."""
    return hf_compat.unwrap(engine.training_model.module) is engine.model


def _plain(engine: Engine, texts: Sequence[Text], top_k: int) -> list[TextScores]:
    """Score each text in a separate plain forward."""
    model = None
    if _is_shared(engine):
        model = hf_compat.trained_forward(engine.training_model.module)
    scores: list[TextScores] = []
    for text in texts:
        logits_NV = engine.runner.plain_logits(text.token_ids, model, images=text.images)
        # Nothing follows the last token.
        logits_TV = logits_NV[:-1]
        scores.append(_scores_of_logits(logits_TV, text, top_k))
    return scores


def _scores_of_logits(logits_TV: torch.Tensor, text: Text, top_k: int) -> TextScores:
    """Score a text's tokens by the logits before them."""
    labels_T = devices.to_device(text.token_ids[1:], logits_TV.device)
    logprobs: list[float] = []
    top = _TopOfBatch([], [])
    for start in range(0, len(labels_T), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        logits_KV = logits_TV[chunk] / text.temperature
        logprobs += chosen_logprobs(logits_KV, labels_T[chunk]).tolist()
        _add_top(top, logits_KV, top_k)
    return TextScores(logprobs, _pairs(top))


def _packed(
    model: torch.nn.Module,
    rows: Sequence[PackedRow],
    top_k: int,
    max_tokens: int,
    layout: PackingLayout,
) -> list[TextScores]:
    """Score rows in packed batches of a layout.

    Args:
        model: a plain or wrapped model.
        rows: the rows to score.
        top_k: number of the likeliest tokens to report at each position.
        max_tokens: maximum tokens of a batch.
        layout: how rows share a forward.
    """
    inner = hf_compat.unwrap(model)
    device = next(inner.parameters()).device
    image_names = multimodal.image_argument_names(inner)
    batches = pack(rows, range(len(rows)), layout, device, max_tokens, image_names)
    tops: list[_TopOfBatch] = []
    head = partial(_score_with_top, inner, rows, top_k, tops)
    scores = score_batches(model, batches, head, num_trained=0, recompute=False)

    scored = [TextScores([], []) for _ in rows]
    for batch, of_batch, top in zip(batches, scores, tops, strict=True):
        pairs = _pairs(top)
        if pairs and batch.scores_R is not None:
            # Tokens that several rows share were scored once.
            pairs = [pairs[index] for index in batch.scores_R.tolist()]
        logprobs = of_batch.logprobs_K.tolist()
        start = 0
        for number, length in zip(batch.rows, batch.lengths, strict=True):
            stop = start + length
            scored[number] = TextScores(logprobs[start:stop], pairs[start:stop])
            start = stop
    return scored


def _score_with_top(
    inner: Any,
    rows: Sequence[PackedRow],
    top_k: int,
    tops: list[_TopOfBatch],
    own_forward: Callable[..., Any],
    batch: PackedBatch,
    arguments: dict[str, Any],
) -> Scores:
    """Score a batch by the model's own head, and add its likeliest tokens to `tops`.

    Args:
        inner: the transformers model.
        rows: all rows.
        top_k: number of the likeliest tokens to report at each position.
        tops: gets the batch's likeliest tokens.
        own_forward: the model's forward.
        batch: some of the rows.
        arguments: the forward's arguments for the batch.
    """
    with hf_compat.taking_hidden_states(inner) as taken:
        own_forward(**arguments, **without_router_logits(inner), use_cache=False)
    output = taken[0]
    temperatures = [rows[number].temperature for number, _ in batch.scored]
    temperatures_K = devices.to_device(temperatures, batch.labels_K.device, torch.float32)
    top = _TopOfBatch([], [])
    logprobs: list[torch.Tensor] = []
    for start in range(0, len(temperatures), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        hidden_1KH = output.last_hidden_state[:, chunk]
        labels_K = batch.labels_K[chunk]
        logits_KV = head_logits(inner, own_forward, type(output), hidden_1KH, labels_K)
        logits_KV = logits_KV / temperatures_K[chunk, None]
        logprobs.append(chosen_logprobs(logits_KV, labels_K))
        _add_top(top, logits_KV, top_k)
    tops.append(top)
    return Scores(torch.cat(logprobs))


def _add_top(top: _TopOfBatch, logits_KV: torch.Tensor, top_k: int) -> None:
    """Add the `top_k` likeliest tokens of each row of logits."""
    if not top_k:
        return
    logprobs_KN, token_ids_KN = logits_KV.log_softmax(-1).topk(top_k, -1)
    top.token_ids.extend(token_ids_KN.tolist())
    top.logprobs.extend(logprobs_KN.tolist())


def _pairs(top: _TopOfBatch) -> list[TopTokens]:
    """Return the likeliest tokens at each position as pairs."""
    places: list[TopTokens] = []
    for token_ids, logprobs in zip(top.token_ids, top.logprobs, strict=True):
        places.append(list(zip(token_ids, logprobs, strict=True)))
    return places
