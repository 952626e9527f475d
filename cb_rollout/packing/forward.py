"""Run a model over packed batches, inside its wrappers.

The wrapper's forward (DDP, FSDP, DeepSpeed, PEFT) is entered once for all batches, so that
gradients are reduced as after any other forward. Called by the thread that trains.

N: tokens of a batch, K: scored tokens of a batch, R: completion tokens of its rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.patching import replacing
from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.packed import PackedAttention, no_mask
from cb_rollout.engine.model.routers import Disagreement, Routers
from cb_rollout.engine.numerics.agreement import LEAST_SIZE, is_measurable, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.packing.batch import PackedBatch, PackingLayout
from cb_rollout.packing.prefix_tree import fork_examples
from cb_rollout.packing.rows import PackedRow


class Scores(NamedTuple):
    """Scores of tokens."""

    logprobs_K: torch.Tensor
    """float32, in nats."""
    entropies_K: torch.Tensor | None = None
    """float32, in nats; None: not computed."""
    aux_loss: torch.Tensor | None = None
    """The load-balancing loss of a mixture of experts; None: not requested."""


Head = Callable[[Callable[..., Any], PackedBatch, dict[str, Any]], Scores]
"""Calls the model's forward with the arguments of a batch, and scores its K tokens."""


def score_batches(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    head: Head,
    *,
    num_trained: int,
    recompute: bool,
    routers: Routers | None = None,
    counts: Disagreement | None = None,
) -> list[Scores]:
    """Score the R completion tokens of each batch.

    Args:
        model: a plain or wrapped model.
        batches: all of one layout.
        head: scores the tokens of a batch.
        num_trained: number of leading batches that get gradients, if gradients are enabled.
        recompute: recompute each batch in the backward pass, so that only one batch's activations
            are in memory at a time.
        routers: routers that replay the batches' routes; None: the routers choose themselves.
        counts: counts choices of the routers that differ from the routes.

    Raises:
        ConfigurationError: the model cannot run over packed tokens.
    """
    inner = hf_compat.unwrap(model)
    own_forward = inner.forward
    scores: list[Scores] = []

    def forward(*_: Any, **__: Any) -> list[torch.Tensor]:
        if scores:
            raise _not_packed(model, "calls the model's forward more than once")
        for number, batch in enumerate(batches):
            is_trained = number < num_trained and torch.is_grad_enabled()
            with torch.set_grad_enabled(is_trained):
                score = partial(_score, inner, own_forward, batch, head, routers, counts)
                if recompute and is_trained:
                    scores.append(checkpoint(score, use_reentrant=False))
                else:
                    scores.append(score())
        return _tensors(scores)

    replacements: list[tuple[Any, str, Any]] = [(inner, "forward", forward)]
    for wrapper in _holders_of_forward(model, inner):
        replacements.append((wrapper, "forward", forward))
    with replacing(replacements):
        try:
            output = model(input_ids=batches[0].input_ids)
        except (ConfigurationError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if len(scores) < len(batches):
                # The model's own error, which says more.
                raise
            raise _not_packed(model, f"stops at packed scores: {error_text(error)}") from error
    if not scores:
        raise _not_packed(model, "does not call the model's forward")
    returned = iter(output)
    # In the order of `_tensors`: each takes the next tensors that the wrapper returned.
    return [_wrapped(of_batch, returned) for of_batch in scores]


def _not_packed(model: torch.nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"tokens cannot be packed under {type(model).__name__}, which {reason}; call its own "
        "forward (under TRL loss_forward='trainer'), or train an adapter that lives inside the "
        "model's layers, as LoRA."
    )


def _holders_of_forward(model: torch.nn.Module, inner: Any) -> list[torch.nn.Module]:
    """Return the wrappers that keep their own reference to the inner model's forward.

    PEFT 0.21's `AdaptionPromptModel` keeps the bound method.
    """
    holders = []
    for module in model.modules():
        forward = vars(module).get("forward")
        if module is not inner and getattr(forward, "__self__", None) is inner:
            holders.append(module)
    return holders


def _tensors(scores: Sequence[Scores]) -> list[torch.Tensor]:
    """Return the tensors of all scores; in them, DDP looks for those that will get gradients."""
    tensors: list[torch.Tensor] = []
    for of_batch in scores:
        for tensor in of_batch:
            if tensor is not None:
                tensors.append(tensor)
    return tensors


def _wrapped(scores: Scores, returned: Iterator[torch.Tensor]) -> Scores:
    """Return scores as the wrapper returned them, so that the backward pass runs its hooks.

    FSDP (torch 2.13) hooks the tensors themselves. Its copies, which are rounded to the compute
    dtype, are not used.
    """
    wrapped: dict[str, torch.Tensor] = {}
    for name, tensor in scores._asdict().items():
        if tensor is None:
            continue
        copy = next(returned)
        if copy.dtype == tensor.dtype:
            wrapped[name] = copy
    return scores._replace(**wrapped)


def _score(
    inner: Any,
    own_forward: Callable[..., Any],
    batch: PackedBatch,
    head: Head,
    routers: Routers | None,
    counts: Disagreement | None,
) -> Scores:
    """Score one batch; see `score_batches`.

    Args:
        inner: the transformers model.
        own_forward: the model's forward, which `score_batches` replaced.
        batch: see `score_batches`.
        head: see `score_batches`.
        routers: see `score_batches`.
        counts: see `score_batches`.
    """
    backbone = hf_compat.backbone_of(inner)
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    arguments |= batch.others
    with ExitStack() as stack:
        stack.enter_context(hf_compat.replacing_forward(inner, own_forward))
        stack.enter_context(multimodal.keeping_position_offsets(inner))
        stack.enter_context(RowRope(inner).by_row(batch.rope_sides, batch.rope_counts))
        stack.enter_context(_selecting_hidden_states(backbone, batch.predicting_K))
        if routers is not None:
            stack.enter_context(routers.replaying(inner, batch.routes, counts))
        attend = None
        if batch.shared_ids is not None:
            forward = partial(_forked_forward, backbone.forward, inner, batch)
            stack.enter_context(hf_compat.replacing_forward(backbone, forward))
        elif batch.segments is None:
            arguments["attention_mask"] = batch.is_token
        else:
            attend = PackedAttention(batch.segments, batch.input_ids.device)
            replacing = partial(hf_compat.replacing_attention, _within(backbone, attend))
            stack.enter_context(hf_compat.repeated_in_checkpoints(inner, replacing))
            stack.enter_context(_without_mask(backbone, batch.input_ids))
        scores = head(own_forward, batch, arguments)
        if attend is not None and not attend.num_calls:
            raise ConfigurationError("its attention cannot be replaced")
    if batch.scores_R is None:
        return scores
    return _of_all_rows(scores, batch.scores_R)


def _of_all_rows(scores: Scores, scores_R: torch.Tensor) -> Scores:
    """Return the score of each completion token of each row, copying shared scores."""
    scores = scores._replace(logprobs_K=scores.logprobs_K.index_select(0, scores_R))
    if scores.entropies_K is None:
        return scores
    return scores._replace(entropies_K=scores.entropies_K.index_select(0, scores_R))


def _forked_forward(
    own: Callable[..., Any], inner: Any, batch: PackedBatch, *_: Any, **named: Any
) -> Any:
    """Run a backbone over a prompt, then over completions from its states; join hidden states."""
    assert batch.shared_ids is not None
    B, S = batch.input_ids.shape
    P = batch.shared_ids.shape[1]
    device = batch.input_ids.device
    cache = DynamicCache(config=inner.config.get_text_config())
    settings = {**named, "past_key_values": cache, "use_cache": True}
    for name in ("input_ids", "position_ids", "attention_mask"):
        settings.pop(name, None)
    positions_1P = torch.arange(P, device=device)[None]
    output = own(input_ids=batch.shared_ids, position_ids=positions_1P, **settings)
    # One row per token: the prompt's tokens, then each completion's.
    hidden_NH = output.last_hidden_state.flatten(0, 1)
    if S:
        hf_compat.repeat_states(cache, B, device)
        output = own(input_ids=batch.input_ids, position_ids=batch.position_ids, **settings)
        hidden_of_forks = output.last_hidden_state.flatten(0, 1)
        hidden_NH = torch.cat([hidden_NH, hidden_of_forks])
    output.last_hidden_state = hidden_NH[None]
    # The caller has no use for the states.
    output.past_key_values = None
    return output


def _within(backbone: torch.nn.Module, attend: PackedAttention) -> Callable[..., Any]:
    """Return packed attention inside the text backbone; a vision tower keeps its own."""
    modules = frozenset(backbone.modules())

    def attend_or_not(own: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        if module in modules:
            return attend(own, module, *arguments, **named)
        return own(module, *arguments, **named)

    return attend_or_not


def _selecting_hidden_states(
    backbone: torch.nn.Module, predicting_K: torch.Tensor
) -> RemovableHandle:
    """Pass only the hidden states that predict completion tokens, (1, K, H), to the head."""

    def select(_module: Any, _arguments: Any, output: Any) -> Any:
        # The head may be called again, on a part of these hidden states.
        handle.remove()
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.flatten(0, 1).index_select(0, predicting_K)[None]
        return output

    handle = backbone.register_forward_hook(select)
    return handle


def _without_mask(backbone: torch.nn.Module, input_ids: torch.Tensor) -> RemovableHandle:
    """Keep layers from building a mask of all tokens."""
    mask = no_mask(input_ids.device)

    def replace(_module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, named | {"attention_mask": mask}

    return backbone.register_forward_pre_hook(replace, with_kwargs=True)


def differing_gradients(
    inner: Any,
    rows: Sequence[PackedRow],
    score: Callable[[Sequence[PackedRow], PackingLayout], Sequence[torch.Tensor]],
    dtype: torch.dtype,
) -> str | None:
    """Return how gradients through forked states differ from those of whole rows; None: equal.

    If a layer writes states without a graph, log-probabilities are right, but the prompt's gradient
    is lost. If it overwrites the prompt's states, the backward pass raises. Each of the
    `fork_examples` is compared.

    Args:
        inner: the transformers model.
        rows: some rows of the batch, each with a completion.
        score: computes the log-probabilities of rows in a layout, with a graph, in any order.
        dtype: precision of the forwards.

    Raises:
        Exception: an exception of the backward pass.
    """
    num_tokens = sum(row.num_tokens for row in rows)
    is_measured = is_measurable(inner, num_tokens)
    for example in fork_examples(rows):
        difference = _gradient_difference(
            inner, partial(score, example), dtype, is_measured=is_measured
        )
        if difference is not None:
            return difference
    return None


def _gradients_of_tokens(
    embeddings: torch.nn.Module, score: Callable[[], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return each token id's gradient, (ids, H), summed over the embeddings of its occurrences.

    Args:
        embeddings: the model's input embeddings.
        score: computes log-probabilities, whose sum is the loss.
    """
    token_ids: list[torch.Tensor] = []
    embedded: list[torch.Tensor] = []

    def keep(_module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()
        token_ids.append(arguments[0].flatten())
        embedded.append(output)

    handle = embeddings.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            loss = torch.cat(list(score())).sum()
    finally:
        handle.remove()
    gradients = torch.autograd.grad(loss, embedded, materialize_grads=True)
    gradients_NH = [gradient.flatten(0, -2) for gradient in gradients]
    values_NH = torch.cat(gradients_NH).double()
    tokens, index_N = torch.cat(token_ids).unique(return_inverse=True)
    sums = values_NH.new_zeros(len(tokens), values_NH.shape[-1])
    sums.index_add_(0, index_N, values_NH)
    # Padding belongs to no row, and has no gradient.
    has_gradient = sums.abs().amax(1) > 0
    return sums[has_gradient]


def _gradient_difference(
    inner: Any,
    score: Callable[[PackingLayout], Sequence[torch.Tensor]],
    dtype: torch.dtype,
    *,
    is_measured: bool,
) -> str | None:
    """Compare gradients through forked states with those of padded rows.

    `is_measured`: measure their rounding in float64.
    """

    def gradients(layout: PackingLayout) -> torch.Tensor:
        return _gradients_of_tokens(inner.get_input_embeddings(), partial(score, layout))

    # Values smaller than `LEAST_SIZE` are compared by the rounding of that size, so gradients are
    # scaled to it.
    root_mean_square = gradients(PackingLayout.PADDED).square().mean().sqrt()
    scale = LEAST_SIZE / root_mean_square

    def scaled_gradients(layout: PackingLayout) -> list[torch.Tensor]:
        return list(scale * gradients(layout))

    in_each_precision = references(
        lambda: scaled_gradients(PackingLayout.PADDED),
        dtype,
        is_coarse=dtype.itemsize < torch.float32.itemsize,
        is_measured=is_measured,
    )
    reference = in_each_precision[0]

    def through_forks() -> list[torch.Tensor]:
        of_forks = scaled_gradients(PackingLayout.FORKED_STATES)
        if len(of_forks) != len(reference.values):
            raise ConfigurationError(
                f"{len(of_forks)} tokens have a gradient through forked states, and "
                f"{len(reference.values)} in whole rows"
            )
        return of_forks

    agreement = reference.compare(through_forks, higher_precision)
    if agreement:
        return None
    multiple = agreement.largest_multiple
    return f"gradients through forked states are {multiple:.2g} times their rounding off"
