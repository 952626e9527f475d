"""Compute log-probabilities of a rollout's outputs with gradients, for a loop of one's own.

K: completion tokens of a batch, H: hidden size, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.fsdp import is_sharded
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.packing.batch import PackedBatch, PackedRow, PackingLayout, pack, representative
from cb_rollout.packing.forward import Scores, max_difference, score_batches
from cb_rollout.types import GenerationOutput

# Tokens whose logits exist at a time.
CHUNK_TOKENS = 1024

# Layouts that agreed with the plain forward, by model.
_LAYOUTS: WeakKeyDictionary[torch.nn.Module, PackingLayout] = WeakKeyDictionary()


def packed_logprobs(
    model: torch.nn.Module, outputs: Sequence[GenerationOutput], *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return the log-probability of every generated token under the model's weights as they are.

    Nothing is padded, and a prompt that several outputs share is computed once. Gradients flow to
    the parameters unless they are disabled; the model's mode is left as it is. On its first call a
    model's packed forward is compared with its plain one; a model that cannot run packed (recurrent
    layers, for one) runs on rows of about one length, padded.

    Args:
        model: a transformers causal language model, plain or wrapped by PEFT, DDP or accelerate,
            on one device.
        outputs: a rollout's outputs, with `prompt_ids` and `generated_tokens`.
        temperature: divides the logits, above 0; the one that was sampled with.

    Returns:
        For each output a 1-d tensor, float32, of as many natural logarithms as it has generated
        tokens, on the model's device.

    Raises:
        InvalidRequestError: an output has no prompt.
        ConfigurationError: the temperature is not above 0, or the model has no head of its own.
    """
    if not temperature > 0:
        raise ConfigurationError(
            f"temperature={temperature!r} is not above 0; greedy outputs have temperature=1."
        )
    inner = hf_compat.unwrap(model)
    if is_sharded(inner):
        raise ConfigurationError(
            "packed_logprobs takes a model whose parameters are whole; under FSDP or ZeRO-3 attach "
            "a TRL trainer with loss_forward='packed', or call the model's own forward."
        )
    rows = [PackedRow(output.prompt_ids, output.generated_tokens) for output in outputs]
    for output in outputs:
        if not output.prompt_ids:
            raise InvalidRequestError(
                f"{output.request_id} has no prompt token to predict from; give each prompt one."
            )
    device = next(inner.parameters()).device
    logprobs = [torch.zeros(0, device=device) for _ in rows]
    if not any(row.completion_ids for row in rows):
        return logprobs
    layout = _LAYOUTS.get(inner) or _agreeing_layout(inner, rows, temperature)
    _LAYOUTS[inner] = layout
    for number, values in _scored(model, rows, range(len(rows)), layout, temperature).items():
        logprobs[number] = values
    return logprobs


def _scored(
    model: torch.nn.Module,
    rows: Sequence[PackedRow],
    numbers: Sequence[int],
    layout: PackingLayout,
    temperature: float,
) -> dict[int, torch.Tensor]:
    """Return the log-probabilities of the rows at `numbers` that have completion tokens."""
    batches = pack(rows, numbers, layout, next(model.parameters()).device)
    inner = hf_compat.unwrap(model)

    def head(
        own_forward: Callable[..., Any], batch: PackedBatch, arguments: dict[str, Any]
    ) -> Scores:
        with hf_compat.taking_hidden_states(inner) as taken:
            own_forward(**arguments, use_cache=False)
        score = partial(_chunk, inner, own_forward, type(taken[0]), temperature)
        hidden_1KH = taken[0].last_hidden_state
        chunks = zip(
            hidden_1KH.split(CHUNK_TOKENS, dim=1), batch.labels_K.split(CHUNK_TOKENS), strict=True
        )
        parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        return Scores(torch.cat(parts))

    scores = score_batches(model, batches, head, num_trained=len(batches), recompute=False)
    return {
        number: values
        for batch, found in zip(batches, scores, strict=True)
        for number, values in zip(batch.rows, found.logprobs_K.split(batch.lengths), strict=True)
    }


def _chunk(
    inner: Any,
    own_forward: Callable[..., Any],
    kind: type[Any],
    temperature: float,
    hidden_1KH: torch.Tensor,
    labels_K: torch.Tensor,
) -> torch.Tensor:
    """Return the log-probabilities of labels by the model's own head on these hidden states."""
    with hf_compat.giving_hidden_states(inner, kind, hidden_1KH):
        logits_KV = own_forward(input_ids=labels_K[None], use_cache=False).logits[0]
    return chosen_logprobs(logits_KV.float() / temperature, labels_K)


def _agreeing_layout(inner: Any, rows: Sequence[PackedRow], temperature: float) -> PackingLayout:
    """Return the first layout that agrees with the model's plain forward on some rows."""
    numbers = representative(rows)
    max_nats = max_difference(inner)
    reason = ""
    with torch.no_grad(), eval_mode(inner):
        plain = {number: _plain(inner, rows[number], temperature) for number in numbers}
        for layout in (PackingLayout.SHARED_PROMPTS, PackingLayout.PADDED):
            try:
                found = _scored(inner, rows, numbers, layout, temperature)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - any error is the reason
                reason = str(error)
                continue
            nats = max(float((found[n] - plain[n]).abs().max()) for n in numbers)
            if nats <= max_nats:
                return layout
            reason = f"they differ by {nats:.2g} nats"
    raise ConfigurationError(
        f"{type(inner).__name__} computes other log-probabilities packed than alone ({reason}); "
        "call its own forward on each output."
    )


def _plain(inner: Any, row: PackedRow, temperature: float) -> torch.Tensor:
    device = next(inner.parameters()).device
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=device)
    first = len(row.prompt_ids)
    logits_TV = inner(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
    return chosen_logprobs(logits_TV / temperature, ids[0, first:])
