"""Compute log-probabilities of a rollout's outputs with gradients, for a loop of one's own.

K: completion tokens of a batch, H: hidden size, V: vocabulary.
"""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Real
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import has_autocast
from cb_rollout.compat.fsdp import is_sharded
from cb_rollout.compat.module_state import forward_identity, with_moved_adapters
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.torch import compute_dtype
from cb_rollout.engine.cuda_graphs.selection import ExecutionPath
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.routers import Routers, find_routers, joined_routes
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import is_measurable, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text
from cb_rollout.packing.batch import (
    PackedBatch,
    PackedRow,
    PackingLayout,
    pack,
    representative,
    with_images,
    with_rope_sides,
)
from cb_rollout.packing.forward import Scores, differing_gradients, score_batches
from cb_rollout.types import GenerationOutput

# Tokens whose logits exist at a time.
CHUNK_TOKENS = 1024

# Layouts that agreed with the plain forward, of rows without images and with some, and routers, by
# model.
_LAYOUTS: WeakKeyDictionary[torch.nn.Module, dict[Any, PackingLayout]] = WeakKeyDictionary()
_ROUTERS: WeakKeyDictionary[torch.nn.Module, Routers] = WeakKeyDictionary()

# A packed forward replaces methods of the model; the backward pass computes heads again.
_REPLACING = threading.RLock()


def packed_logprobs(
    model: torch.nn.Module,
    outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
    *,
    temperature: float | None = None,
) -> list[torch.Tensor]:
    """Return the log-probability of every generated token under the model's weights as they are.

    Nothing is padded, and tokens that several outputs begin with are computed once, be they of
    prompts or generated: pass all turns of a conversation together. Gradients flow to
    the parameters unless they are disabled; the model's mode is left as it is. On its first call a
    model's packed forward is compared with its plain forward. A model with recurrent layers
    computes each prompt once, and its completions from the states that it left; one that
    can do neither runs on rows of similar length, padded.

    Threads that call this wait for each other. Nothing else may run the model meanwhile, not even
    a rollout in another thread. Outputs that were sampled with `router_replay=True` take the same
    experts again, and those with `sampling_mask="replay"` are scored over the ids that truncation
    kept.

    Args:
        model: a transformers causal language model, plain or wrapped by PEFT, DDP or accelerate,
            on one device.
        outputs: a rollout's outputs, or the dict of them that it returned, with `prompt_ids` and
            `generated_tokens`, and the `images` of their prompts.
        temperature: divides the logits, above 0. None: the one that each output was sampled with,
            its `temperature`.

    Returns:
        For each output a 1-d tensor, float32, of as many natural logarithms as it has generated
        tokens, on the model's device.

    Raises:
        InvalidRequestError: an output has no prompt, or a token id that the model does not know.
        ConfigurationError: a temperature is not a finite number above 0; the model has no
            language-model head, is an encoder-decoder, or is not whole on one device.
    """
    outputs = list(outputs.values() if isinstance(outputs, Mapping) else outputs)
    inner = hf_compat.unwrap(model)
    hf_compat.refuse_what_cannot_generate(inner)
    if is_sharded(inner):
        raise ConfigurationError(
            "packed_logprobs takes a model whose parameters are whole; under FSDP or ZeRO-3 attach "
            "a TRL trainer with loss_forward='packed', or call the model's own forward."
        )
    if hf_compat.invocation_token_ids(model):
        raise ConfigurationError(
            f"packed_logprobs: {hf_compat.ACTIVATED_LORA}; call the model's own forward on each "
            "output."
        )
    hf_compat.refuse_sharded(inner)
    rows = rows_of_outputs(inner, outputs, temperature)
    device = next(inner.parameters()).device
    logprobs = [torch.zeros(0, device=device) for _ in rows]
    if not any(row.completion_ids for row in rows):
        return logprobs
    with _REPLACING:
        scored = _scored_in_its_layout(model, inner, rows)
    return [scored.get(number, no_token) for number, no_token in enumerate(logprobs)]


def rows_of_outputs(
    inner: Any, outputs: Sequence[GenerationOutput], temperature: float | None = None
) -> list[PackedRow]:
    """Return the rows of outputs with their images, checked; see `packed_logprobs`."""
    vocab_size = hf_compat.vocab_size(inner)
    rows = [_row(output, vocab_size, _temperature(output, temperature)) for output in outputs]
    rows = with_rope_sides(inner, rows)
    placeholders = multimodal.placeholder_token_ids(inner)
    images = [getattr(output, "images", None) for output in outputs]
    for row, output, own in zip(rows, outputs, images, strict=True):
        if own is None and not placeholders.isdisjoint(row.prompt_ids):
            raise ConfigurationError(
                f"{output.request_id} holds tokens that stand for images, and no images; pass the "
                "outputs of a rollout as they are, which hold their images."
            )
    return with_images(inner, rows, images) if any(own is not None for own in images) else rows


def _temperature(output: GenerationOutput, temperature: float | None) -> float:
    if temperature is None:
        temperature = getattr(output, "temperature", 1.0)
    if not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
        raise ConfigurationError(
            f"temperature={temperature!r} is not a finite number above 0; greedy outputs have "
            "temperature=1."
        )
    return float(temperature)


def _row(output: GenerationOutput, vocab_size: int, temperature: float) -> PackedRow:
    """Return an output's tokens, checked.

    On a GPU an id outside the vocabulary is an error that no later call recovers from.
    """
    row = PackedRow(
        list(map(index, output.prompt_ids)),
        list(map(index, output.generated_tokens)),
        getattr(output, "routed_experts", None),
        sampling_mask=getattr(output, "kept_token_ids", None),
        temperature=temperature,
    )
    if not row.prompt_ids:
        raise InvalidRequestError(
            f"{output.request_id} has no prompt token to predict from; give each prompt one."
        )
    ids = [*row.prompt_ids, *row.completion_ids]
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{output.request_id} holds token id {token}, outside the model's vocabulary of "
                f"{vocab_size}; was it generated by another model?"
            )
    return row


def _scored_in_its_layout(
    model: torch.nn.Module, inner: Any, rows: Sequence[PackedRow]
) -> dict[int, torch.Tensor]:
    """Return the log-probabilities of all rows, in the layout that agreed for this model."""
    # A model that was cast, wrapped anew, or that got another layer, is compared again.
    wrapper = weakref.ref(hf_compat.trained_forward(model))
    key = rows[0].images is not None, (forward_identity(inner), wrapper)
    layouts, reason = _LAYOUTS.get(inner, {}), ""
    if (layout := layouts.get(key)) is None:
        layout, reason = _agreeing_layout(model, rows)
    _LAYOUTS[inner] = {k: value for k, value in layouts.items() if k[1] == key[1]} | {key: layout}
    try:
        scored = _scored(model, rows, layout)
    except ConfigurationError as error:
        if layout is PackingLayout.PADDED:
            raise
        # Longer rows than those that were compared may meet a window that attention is not told of.
        reason = str(error)
        scored = _scored(model, rows, PackingLayout.PADDED)
    if reason and next(inner.parameters()).device.type == "cuda":
        warn_of_padding("packed_logprobs", reason, "padded")
    return scored


def warn_of_padding(caller: str, reason: str, layout: str) -> None:
    """Warn that prompts are not shared, and how rows lie instead; an equal warning shows once."""
    text = f"{caller}: prompts cannot be shared ({reason}); rows are {layout} instead."
    warnings.warn(text, stacklevel=3)


def loss_path(model: torch.nn.Module, rows: Sequence[PackedRow]) -> ExecutionPath:
    """Return how the packed forward of such rows runs."""
    try:
        with _REPLACING:
            rows = with_rope_sides(hf_compat.unwrap(model), rows)
            layout, reason = _agreeing_layout(model, rows)
    except Exception as error:  # noqa: BLE001  a model may raise anything
        return ExecutionPath("packed loss", "not possible", error_text(error))
    runs = f"{layout}, not {PackingLayout.SHARED_PREFIXES}" if reason else str(layout)
    return ExecutionPath("packed loss", runs, reason)


def _scored(
    model: torch.nn.Module, rows: Sequence[PackedRow], layout: PackingLayout
) -> dict[int, torch.Tensor]:
    inner = hf_compat.unwrap(model)
    names = multimodal.image_argument_names(inner)
    device = next(model.parameters()).device
    batches = pack(rows, range(len(rows)), layout, device, None, names)

    def head(
        own_forward: Callable[..., Any], batch: PackedBatch, arguments: dict[str, Any]
    ) -> Scores:
        with hf_compat.taking_hidden_states(inner) as taken:
            own_forward(**arguments, **without_router_logits(inner), use_cache=False)
        score = partial(_chunk, inner, own_forward, type(taken[0]))
        hidden_1KH = taken[0].last_hidden_state
        temperatures = [rows[number].temperature for number, _ in batch.scored]
        temperatures_K = to_device(temperatures, device, torch.float32)
        masks = ((rows[number].sampling_mask, t) for number, t in batch.scored)
        kept = [mask and mask[t] for mask, t in masks]
        chunks = zip(
            hidden_1KH.split(CHUNK_TOKENS, dim=1),
            batch.labels_K.split(CHUNK_TOKENS),
            temperatures_K.split(CHUNK_TOKENS),
            (kept[n : n + CHUNK_TOKENS] for n in range(0, len(kept), CHUNK_TOKENS)),
            strict=True,
        )
        parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        return Scores(torch.cat(parts))

    routers = None if all(row.routes is None for row in rows) else routers_of(inner)
    scores = score_batches(
        model, batches, head, num_trained=len(batches), recompute=False, routers=routers
    )
    return {
        number: values
        for batch, own in zip(batches, scores, strict=True)
        for number, values in zip(batch.rows, own.logprobs_K.split(batch.lengths), strict=True)
    }


def _chunk(
    inner: Any,
    own_forward: Callable[..., Any],
    output_type: type[Any],
    hidden_1KH: torch.Tensor,
    labels_K: torch.Tensor,
    temperatures_K: torch.Tensor,
    kept: Sequence[Any],
) -> torch.Tensor:
    """Return the log-probabilities of labels by the model's own head on these hidden states.

    `kept`: the ids that each label was sampled from; None: the whole vocabulary.
    """
    with _REPLACING, hf_compat.giving_hidden_states(inner, output_type, hidden_1KH):
        settings = {"use_cache": False, **without_router_logits(inner)}
        logits_KV = own_forward(input_ids=labels_K[None], **settings).logits[0]
    logits_KV = logits_KV.float() / temperatures_K[:, None]
    logprobs_K = chosen_logprobs(logits_KV, labels_K)
    masks = {k: ids for k, ids in enumerate(kept) if ids is not None}
    if not masks:
        return logprobs_K
    masked_M = to_device([*masks], labels_K.device)
    own_M, _ = masked_logprobs(logits_KV[masked_M], labels_K[masked_M], [*masks.values()], 1.0)
    return logprobs_K.index_copy(0, masked_M, own_M)


def _agreeing_layout(
    model: torch.nn.Module, rows: Sequence[PackedRow]
) -> tuple[PackingLayout, str]:
    """Return the first layout that agrees with the plain forward, and why the one before does not.

    Both forwards go through the model's wrappers, which may compute something themselves. At
    temperature 1, over the vocabulary: a lower temperature multiplies the rounding.
    """
    outermost = hf_compat.trained_forward(model)
    inner = hf_compat.unwrap(model)
    plain = {"temperature": 1.0, "sampling_mask": None}
    rows = [row._replace(**plain) for row in representative(rows)[1]]
    num_tokens = sum(row.num_tokens for row in rows)
    runner, dtype = ModelRunner(inner, None), _forward_dtype(inner)
    reason = ""

    def scores_of(rows: Sequence[PackedRow], layout: PackingLayout) -> list[torch.Tensor]:
        return list(_scored(outermost, rows, layout).values())

    with torch.no_grad(), eval_mode(outermost), with_moved_adapters(inner):
        expected = references(
            lambda: _plain_rows(runner, rows, outermost),
            dtype,
            is_coarse=dtype.itemsize < torch.float32.itemsize,
            is_measured=is_measurable(inner, num_tokens),
        )
        for layout in (first_layout(packing_obstacle(inner)), PackingLayout.PADDED):

            def packed(layout: PackingLayout = layout) -> list[torch.Tensor]:
                scored = _scored(outermost, rows, layout)
                return [scored[number] for number in range(len(rows))]

            try:
                agreements = (ref.compare(packed, higher_precision) for ref in expected)
                failed = next((agreement for agreement in agreements if not agreement), None)
                if failed is None and layout is PackingLayout.FORKED_STATES:
                    failed = differing_gradients(inner, rows, scores_of, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - any error is the reason
                failed = error
            if failed is None:
                return layout, reason
            reason = str(failed)
    raise ConfigurationError(
        f"{type(outermost).__name__} computes other log-probabilities packed than alone ({reason}"
        f"); {_remedy(inner)}call its own forward on each output."
    )


def first_layout(obstacle: str) -> PackingLayout:
    """Return the layout to try before `PADDED`; `obstacle`: why rows would mix, "" if not."""
    return PackingLayout.FORKED_STATES if obstacle else PackingLayout.SHARED_PREFIXES


def packing_obstacle(inner: Any) -> str:
    """Return why rows may not stand end to end in one row of the model's input; "": they may."""
    try:
        return ModelRunner(inner, None).probe().packing_obstacle
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        return f"its cache cannot be probed: {error_text(error)}"


def routers_of(inner: Any) -> Routers:
    """Return the routers of an unwrapped model, found once."""
    if inner not in _ROUTERS:
        with torch.no_grad(), eval_mode(inner):
            _ROUTERS[inner] = find_routers(
                inner, lambda ids: inner(input_ids=ids, use_cache=False).logits
            )
    return _ROUTERS[inner]


def _remedy(inner: Any) -> str:
    """Return the setting of bitsandbytes under which a row does not depend on its batch."""
    quantization = getattr(inner.config, "quantization_config", None)
    threshold = getattr(quantization, "llm_int8_threshold", 0)
    if not (getattr(quantization, "load_in_8bit", False) and threshold > 0):
        return ""
    return (
        f"with llm_int8_threshold={threshold} its 8-bit layers make a row depend on its batch: "
        "load it with llm_int8_threshold=0.0, or "
    )


def _forward_dtype(inner: Any) -> torch.dtype:
    """Return the dtype to whose rounding a forward is held: 16 bits under autocast."""
    device_type = next(inner.parameters()).device.type
    is_autocast = torch.is_autocast_enabled(device_type) or has_autocast(inner)
    return compute_dtype(inner, "bf16" if is_autocast else "no")


def _plain_rows(
    runner: ModelRunner, rows: Sequence[PackedRow], outermost: torch.nn.Module
) -> list[torch.Tensor]:
    try:
        return [_plain(runner, row, outermost) for row in rows]
    except (torch.OutOfMemoryError, TypeError, NameError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(runner.model).__name__} cannot run on token ids alone ({error_text(error)}); "
            "call its own forward with what it needs, or train an adapter that needs no other "
            "input, as LoRA."
        ) from error


def _plain(runner: ModelRunner, row: PackedRow, outermost: torch.nn.Module) -> torch.Tensor:
    inner, replaying = runner.model, nullcontext()
    routes_NLK = joined_routes([(row.routes, 0, row.num_tokens)], runner.device)
    if routes_NLK is not None:
        replaying = routers_of(inner).replaying(inner, routes_NLK)
    images = None if row.images is None else row.images.images
    with replaying:
        token_ids = [*row.prompt_ids, *row.completion_ids]
        logits_NV = runner.plain_logits(token_ids, outermost, images=images)
    logits_TV = logits_NV[len(row.prompt_ids) - 1 : -1]
    return chosen_logprobs(logits_TV, to_device(row.completion_ids, runner.device))
