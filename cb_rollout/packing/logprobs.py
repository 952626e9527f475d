"""Compute log-probabilities of a rollout's outputs with gradients, for your own loop.

K: completion tokens of a batch, H: hidden size, V: vocabulary.
"""

import math
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import has_autocast
from cb_rollout.compat.fsdp import is_sharded
from cb_rollout.compat.module_state import (
    adapter_names,
    forward_identity,
    with_active_adapter,
    with_moved_adapters,
)
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.torch import compute_dtype
from cb_rollout.config.checks import plain_token_ids
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.model.adapters import require_adapter, require_unmerged
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.routers import Routers, find_routers, joined_routes
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import is_measurable, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text
from cb_rollout.packing.batch import PackedBatch, PackingLayout, pack
from cb_rollout.packing.forward import Scores, differing_gradients, score_batches
from cb_rollout.packing.prefix_tree import representative
from cb_rollout.packing.rows import PackedRow, with_images, with_rope_sides
from cb_rollout.types import GenerationOutput

T = TypeVar("T")

# Maximum number of tokens whose logits are in memory at a time.
CHUNK_TOKENS = 1024


class RowKind(NamedTuple):
    """Properties of rows that decide which layouts they may take."""

    has_images: bool
    may_fork: bool
    """True: completions may continue from the recurrent states after their prompt."""
    adapter: str | None = None
    """The adapter under which they are scored; None: the active adapters."""


class AgreedLayouts(NamedTuple):
    """Layouts that agreed with a model's plain forward."""

    model: object
    """Equal as long as the model and its wrappers compute the same function."""
    layouts: dict[RowKind, PackingLayout]


_LAYOUTS: WeakKeyDictionary[torch.nn.Module, AgreedLayouts] = WeakKeyDictionary()
_ROUTERS: WeakKeyDictionary[torch.nn.Module, Routers] = WeakKeyDictionary()

# Held while a forward replaces methods of the model, and while the backward pass recomputes heads.
REPLACING = threading.RLock()


def packed_logprobs(
    model: torch.nn.Module,
    outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
    *,
    temperature: float | None = None,
) -> list[torch.Tensor]:
    """Return the log-probability of every generated token under the model's current weights.

    Nothing is padded, and a prefix that several outputs share is computed once, whether it is a
    prompt or generated tokens, so pass all turns of a conversation together. Gradients flow to the
    parameters unless they are disabled; the model's mode does not change. The first call for a
    model compares its packed forward with its plain forward. A model with recurrent layers computes
    each prompt once, and starts the completions from the states at its end. A model that supports
    neither runs on padded rows of similar length.

    Threads that call this wait for each other. Nothing else may run the model meanwhile, not even a
    rollout in another thread. Outputs that were sampled with `router_replay=True` use the same
    experts again. With `sampling_mask="replay"`, each token is normalized over the token ids that
    truncation kept. An output that names an adapter is scored by that adapter, even if another one
    is active.

    Args:
        model: a transformers causal language model, plain or wrapped by PEFT, DDP or accelerate,
            on one device.
        outputs: a rollout's outputs, as a list or as the dict that it returned, with `prompt_ids`,
            `generated_tokens`, and the `images` of their prompts.
        temperature: divides the logits, above 0. None: each output's own `temperature`, at which it
            was sampled.

    Returns:
        One 1-d float32 tensor per output, on the model's device, with the log-probability (natural
        logarithm) of each generated token.

    Raises:
        InvalidRequestError: an output has no prompt, or a token id outside the model's vocabulary.
        ConfigurationError: a temperature is not a finite number above 0; the model has no
            language-model head, is an encoder-decoder, or is not entirely on one device; it lacks
            the adapter that an output names, or an adapter is merged in place.
    """
    if isinstance(outputs, Mapping):
        outputs = outputs.values()
    outputs = list(outputs)
    inner = hf_compat.unwrap(model)
    hf_compat.refuse_what_cannot_generate(inner)
    if is_sharded(inner):
        raise ConfigurationError(
            "packed_logprobs needs a model whose parameters are not sharded; under FSDP or ZeRO-3, "
            "attach a TRL trainer with loss_forward='packed', or call the model's own forward."
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
    numbers_by_adapter: dict[str | None, list[int]] = defaultdict(list)
    for number, output in enumerate(outputs):
        adapter = getattr(output, "adapter", None)
        numbers_by_adapter[adapter].append(number)
    for adapter, numbers in numbers_by_adapter.items():
        of_adapter = [rows[number] for number in numbers]
        if any(row.completion_ids for row in of_adapter):
            for index, scores in score_rows(model, of_adapter, adapter).items():
                logprobs[numbers[index]] = scores
    return logprobs


def score_rows(
    model: torch.nn.Module, rows: Sequence[PackedRow], adapter: str | None = None
) -> dict[int, torch.Tensor]:
    """Return differentiable log-probabilities of each row with a completion, by row index.

    See `packed_logprobs`; the rows are not checked.

    Args:
        model: a plain or wrapped model.
        rows: the rows to score, at least one with a completion.
        adapter: the only adapter that computes and gets gradients; None: the active adapters.

    Raises:
        ConfigurationError: there is no such adapter, or an adapter is merged in place.
    """
    inner = hf_compat.unwrap(model)
    adapting: AbstractContextManager[Any] = nullcontext()
    if adapter is not None:
        require_adapter(adapter, adapter_names(inner))
        require_unmerged(adapter, inner)
        adapting = hf_compat.repeated_in_checkpoints(
            inner, partial(with_active_adapter, inner, adapter)
        )
    with REPLACING, adapting:
        score = partial(_scored, model, rows, adapter=adapter)
        return score_in_agreed_layout(model, rows, score, adapter=adapter)


def rows_of_outputs(
    inner: Any, outputs: Sequence[GenerationOutput], temperature: float | None = None
) -> list[PackedRow]:
    """Return the rows of outputs with their images, checked; see `packed_logprobs`."""
    vocab_size = hf_compat.vocab_size(inner)
    rows: list[PackedRow] = []
    for output in outputs:
        temperature_of_row = _temperature(output, temperature)
        rows.append(_row(output, vocab_size, temperature_of_row))
    rows = with_rope_sides(inner, rows)
    placeholders = multimodal.placeholder_token_ids(inner)
    images: list[Any] = []
    has_images = False
    for row, output in zip(rows, outputs, strict=True):
        images_of_row = getattr(output, "images", None)
        images.append(images_of_row)
        if images_of_row is not None:
            has_images = True
        elif not placeholders.isdisjoint(row.prompt_ids):
            raise ConfigurationError(
                f"{output.request_id} holds image tokens but no images; pass the outputs of a "
                "rollout unchanged, which hold their images."
            )
    if has_images:
        return with_images(inner, rows, images)
    return rows


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

    On a GPU, an id outside the vocabulary is an error from which the process cannot recover.
    """
    try:
        prompt_ids = plain_token_ids(output.prompt_ids)
        completion_ids = plain_token_ids(output.generated_tokens)
    except TypeError as error:
        raise InvalidRequestError(
            f"{output.request_id} does not hold token ids ({error}); pass the outputs of a rollout."
        ) from error
    row = PackedRow(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        routes=getattr(output, "routed_experts", None),
        sampling_mask=getattr(output, "kept_token_ids", None),
        temperature=temperature,
    )
    if not row.prompt_ids:
        raise InvalidRequestError(
            f"{output.request_id} has an empty prompt; give each prompt at least one token."
        )
    for token in (min(row.token_ids), max(row.token_ids)):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{output.request_id} holds token id {token}, outside the model's vocabulary of "
                f"{vocab_size}; was it generated by another model?"
            )
    return row


def score_in_agreed_layout(
    model: torch.nn.Module,
    rows: Sequence[PackedRow],
    score: Callable[[PackingLayout], T],
    *,
    may_fork: bool = True,
    adapter: str | None = None,
) -> T:
    """Return what `score` returns for the layout that agreed with the model's plain forward.

    The comparison uses the first rows of each `RowKind`. Nothing else may run the model meanwhile.

    Args:
        model: a model, plain or wrapped.
        rows: the rows to score, of which some are compared.
        score: scores the rows in a layout.
        may_fork: completions may continue from the recurrent states after their prompt.
        adapter: the adapter that was activated by name; each adapter is compared separately.

    Raises:
        ConfigurationError: no layout agrees.
    """
    inner = hf_compat.unwrap(model)
    # A model that was cast, was wrapped again, or got another layer is compared again.
    wrapper = weakref.ref(hf_compat.trained_forward(model))
    compared_model = (forward_identity(inner), wrapper)
    kind = RowKind(has_images=rows[0].images is not None, may_fork=may_fork, adapter=adapter)
    agreed = _LAYOUTS.get(inner)
    if agreed is None or agreed.model != compared_model:
        agreed = AgreedLayouts(model=compared_model, layouts={})
        _LAYOUTS[inner] = agreed
    reason = ""
    if kind not in agreed.layouts:
        agreed.layouts[kind], reason = _agreeing_layout(model, rows, may_fork=may_fork)
    layout = agreed.layouts[kind]
    try:
        scored = score(layout)
    except ConfigurationError as error:
        if layout is PackingLayout.PADDED:
            raise
        # A row longer than the compared ones may exceed a window unknown to the attention function.
        reason = str(error)
        scored = score(PackingLayout.PADDED)
    if reason and next(inner.parameters()).device.type == "cuda":
        warn_of_padding("packed_logprobs", reason, "padded")
    return scored


def warn_of_padding(caller: str, reason: str, layout: str) -> None:
    """Warn once that prompts are not shared, and which layout is used instead."""
    text = (
        f"{caller}: prompts cannot be shared ({reason}); rows are {layout} instead, which is "
        "slower."
    )
    warnings.warn(text, stacklevel=3)


def loss_path(model: torch.nn.Module, rows: Sequence[PackedRow]) -> ExecutionPath:
    """Return how the packed forward of rows of this kind runs."""
    try:
        with REPLACING:
            rows = with_rope_sides(hf_compat.unwrap(model), rows)
            layout, reason = _agreeing_layout(model, rows)
    except Exception as error:  # noqa: BLE001  a model may raise anything
        return ExecutionPath("packed loss", "not possible", error_text(error))
    runs = str(layout)
    if reason:
        runs = f"{layout}, not {PackingLayout.SHARED_PREFIXES}"
    return ExecutionPath("packed loss", runs, reason)


def _scored(
    model: torch.nn.Module,
    rows: Sequence[PackedRow],
    layout: PackingLayout,
    adapter: str | None = None,
) -> dict[int, torch.Tensor]:
    """Return the log-probabilities of each row with a completion, by its index."""
    inner = hf_compat.unwrap(model)
    names = multimodal.image_argument_names(inner)
    device = next(model.parameters()).device
    batches = pack(rows, range(len(rows)), layout, device, None, names)
    routers = None
    if any(row.routes is not None for row in rows):
        routers = routers_of(inner)
    scores = score_batches(
        model,
        batches,
        partial(_score_by_own_head, inner, rows, adapter),
        num_trained=len(batches),
        recompute=False,
        routers=routers,
    )
    logprobs: dict[int, torch.Tensor] = {}
    for batch, of_batch in zip(batches, scores, strict=True):
        of_rows = of_batch.logprobs_K.split(batch.lengths)
        logprobs.update(zip(batch.rows, of_rows, strict=True))
    return logprobs


def _score_by_own_head(
    inner: Any,
    rows: Sequence[PackedRow],
    adapter: str | None,
    own_forward: Callable[..., Any],
    batch: PackedBatch,
    arguments: dict[str, Any],
) -> Scores:
    """Score a batch with the model's own head, one chunk of tokens at a time.

    Args:
        inner: the transformers model.
        rows: all rows.
        adapter: the adapter that was activated by name; None: no adapter was named.
        own_forward: the model's forward.
        batch: some of the rows.
        arguments: the forward's arguments for the batch.
    """
    with hf_compat.taking_hidden_states(inner) as taken:
        own_forward(**arguments, **without_router_logits(inner), use_cache=False)
    output = taken[0]
    temperatures: list[float] = []
    kept: list[Any] = []
    for number, t in batch.scored:
        row = rows[number]
        temperatures.append(row.temperature)
        kept_ids = None
        if row.sampling_mask is not None:
            kept_ids = row.sampling_mask[t]
        kept.append(kept_ids)
    temperatures_K = to_device(temperatures, batch.labels_K.device, torch.float32)
    score_chunk: Callable[..., torch.Tensor] = partial(_chunk, inner, own_forward, type(output))
    if adapter is not None:
        # The backward pass computes the chunk again, and another adapter may be active by then.
        score_chunk = with_active_adapter(inner, adapter)(score_chunk)
    logprobs: list[torch.Tensor] = []
    for start in range(0, len(kept), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        logprobs.append(
            checkpoint(
                score_chunk,
                output.last_hidden_state[:, chunk],
                batch.labels_K[chunk],
                temperatures_K[chunk],
                kept[chunk],
                use_reentrant=False,
            )
        )
    return Scores(torch.cat(logprobs))


def _chunk(
    inner: Any,
    own_forward: Callable[..., Any],
    output_type: type[Any],
    hidden_1KH: torch.Tensor,
    labels_K: torch.Tensor,
    temperatures_K: torch.Tensor,
    kept: Sequence[Any],
) -> torch.Tensor:
    """Return the log-probabilities of labels, (K,), computed by the model's own head.

    Args:
        inner: the transformers model.
        own_forward: its forward.
        output_type: class of its backbone's outputs.
        hidden_1KH: hidden states that predict the labels.
        labels_K: tokens to score.
        temperatures_K: divide the logits.
        kept: ids that each label was sampled from; None: the whole vocabulary.
    """
    logits_KV = head_logits(inner, own_forward, output_type, hidden_1KH, labels_K)
    logits_KV = logits_KV / temperatures_K[:, None]
    logprobs_K = chosen_logprobs(logits_KV, labels_K)
    masked: list[int] = []
    kept_ids: list[Any] = []
    for k, ids in enumerate(kept):
        if ids is not None:
            masked.append(k)
            kept_ids.append(ids)
    if not masked:
        return logprobs_K
    masked_M = to_device(masked, labels_K.device)
    logprobs_M, _ = masked_logprobs(logits_KV[masked_M], labels_K[masked_M], kept_ids, 1.0)
    return logprobs_K.index_copy(0, masked_M, logprobs_M)


def head_logits(
    inner: Any,
    own_forward: Callable[..., Any],
    output_type: type[Any],
    hidden_1KH: torch.Tensor,
    labels_K: torch.Tensor,
) -> torch.Tensor:
    """Return float32 logits, (K, V), computed from hidden states by the model's own head.

    Args:
        inner: the transformers model.
        own_forward: its forward.
        output_type: class of its backbone's outputs.
        hidden_1KH: hidden states.
        labels_K: one token id per hidden state, for a forward that reads its input's shape.
    """
    with REPLACING, hf_compat.giving_hidden_states(inner, output_type, hidden_1KH):
        settings = without_router_logits(inner)
        output = own_forward(input_ids=labels_K[None], use_cache=False, **settings)
        return output.logits[0].float()


def _agreeing_layout(
    model: torch.nn.Module, rows: Sequence[PackedRow], *, may_fork: bool = True
) -> tuple[PackingLayout, str]:
    """Return the first layout that agrees with the plain forward, and why an earlier one did not.

    Both forwards go through the model's wrappers, which may compute something themselves. They are
    compared at temperature 1 over the whole vocabulary, because a lower temperature magnifies
    rounding.
    """
    outermost = hf_compat.trained_forward(model)
    inner = hf_compat.unwrap(model)
    _, chosen = representative(rows)
    compared: list[PackedRow] = []
    for row in chosen:
        plain_row = row._replace(temperature=1.0, sampling_mask=None, labels=None)
        compared.append(plain_row)
    reason = ""
    with torch.no_grad(), eval_mode(outermost), with_moved_adapters(inner):
        comparison = _Comparison(outermost, inner, compared)
        first = first_layout(packing_obstacle(inner))
        if first is PackingLayout.FORKED_STATES and not may_fork:
            first = PackingLayout.PADDED
        for layout in dict.fromkeys((first, PackingLayout.PADDED)):
            difference = comparison.difference(layout)
            if difference is None:
                return layout, reason
            reason = difference
    raise ConfigurationError(
        f"{type(outermost).__name__} computes different log-probabilities for packed sequences "
        f"than for single ones ({reason}); {_remedy(inner)}call its own forward on each output."
    )


class _Comparison:
    """Compares layouts with the plain forward of the same rows, one row at a time."""

    def __init__(self, outermost: torch.nn.Module, inner: Any, rows: Sequence[PackedRow]) -> None:
        """Compute the plain forward.

        Args:
            outermost: the module that the trainer calls.
            inner: the transformers model in it.
            rows: the rows to compare, each with a completion.
        """
        self._outermost = outermost
        self._inner = inner
        self._rows = rows
        self._dtype = _forward_dtype(inner)
        runner = ModelRunner(inner, None)
        num_tokens = sum(row.num_tokens for row in rows)
        self._expected = references(
            lambda: _plain_rows(runner, rows, outermost),
            self._dtype,
            is_coarse=self._dtype.itemsize < torch.float32.itemsize,
            is_measured=is_measurable(inner, num_tokens),
        )

    def difference(self, layout: PackingLayout) -> str | None:
        """Return how a layout differs from the plain forward, or why it fails; None: it agrees."""
        try:
            return self._difference(layout)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            return str(error)

    def _difference(self, layout: PackingLayout) -> str | None:
        def packed() -> list[torch.Tensor]:
            by_number = _scored(self._outermost, self._rows, layout)
            # Each row has a completion.
            return [by_number[number] for number in range(len(self._rows))]

        for reference in self._expected:
            agreement = reference.compare(packed, higher_precision)
            if not agreement:
                return str(agreement)
        if layout is PackingLayout.FORKED_STATES:
            return differing_gradients(self._inner, self._rows, self._scores_of, self._dtype)
        return None

    def _scores_of(self, rows: Sequence[PackedRow], layout: PackingLayout) -> list[torch.Tensor]:
        return list(_scored(self._outermost, rows, layout).values())


def first_layout(obstacle: str) -> PackingLayout:
    """Return the layout to try before `PADDED`; `obstacle`: why packed rows would mix, or ""."""
    if obstacle:
        return PackingLayout.FORKED_STATES
    return PackingLayout.SHARED_PREFIXES


def packing_obstacle(inner: Any) -> str:
    """Return why rows cannot be concatenated into one row of the model's input; "": they can."""
    try:
        return ModelRunner(inner, None).probe().packing_obstacle
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        return f"its cache cannot be probed: {error_text(error)}"


def routers_of(inner: Any) -> Routers:
    """Return the routers of an unwrapped model; the result is cached."""
    if inner not in _ROUTERS:

        def logits(ids: torch.Tensor) -> torch.Tensor:
            return inner(input_ids=ids, use_cache=False).logits

        with torch.no_grad(), eval_mode(inner):
            _ROUTERS[inner] = find_routers(inner, logits)
    return _ROUTERS[inner]


def _remedy(inner: Any) -> str:
    """Return the bitsandbytes setting that makes a row independent of its batch."""
    quantization = getattr(inner.config, "quantization_config", None)
    is_8bit = getattr(quantization, "load_in_8bit", False)
    threshold = getattr(quantization, "llm_int8_threshold", 0)
    if not is_8bit or threshold <= 0:
        return ""
    return (
        f"with llm_int8_threshold={threshold} its 8-bit layers make a row depend on its batch: "
        "load it with llm_int8_threshold=0.0, or "
    )


def _forward_dtype(inner: Any) -> torch.dtype:
    """Return the dtype whose rounding a forward may show: 16 bits under autocast."""
    device_type = next(inner.parameters()).device.type
    mixed_precision = "no"
    if torch.is_autocast_enabled(device_type) or has_autocast(inner):
        mixed_precision = "bf16"
    return compute_dtype(inner, mixed_precision)


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
            "call its own forward with the inputs that it needs, or train an adapter that needs no "
            "other input, such as LoRA."
        ) from error


def _plain(runner: ModelRunner, row: PackedRow, outermost: torch.nn.Module) -> torch.Tensor:
    """Return the log-probabilities of a row's completion by a plain forward."""
    inner = runner.model
    replaying = nullcontext()
    routes_NLK = joined_routes([(row.routes, 0, row.num_tokens)], runner.device)
    if routes_NLK is not None:
        replaying = routers_of(inner).replaying(inner, routes_NLK)
    images = None
    if row.images is not None:
        images = row.images.images
    with replaying:
        logits_NV = runner.plain_logits(row.token_ids, outermost, images=images)
    logits_TV = logits_NV[len(row.prompt_ids) - 1 : -1]
    return chosen_logprobs(logits_TV, to_device(row.completion_ids, runner.device))
