"""Run a model over packed batches, under whatever wraps it.

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
from cb_rollout.engine.numerics.agreement import LEAST_SIZE, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.packing.batch import PackedBatch, PackedRow, PackingLayout, fork_examples


class Scores(NamedTuple):
    """Scores of tokens."""

    logprobs_K: torch.Tensor
    """float32, in nats."""
    entropies_K: torch.Tensor | None = None
    """float32, in nats; None: not computed."""
    aux_loss: torch.Tensor | None = None
    """The load-balancing loss of a mixture of experts; None: not asked for."""


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
    """Score the R completion tokens of each batch, by `head`, with a plain or wrapped model.

    If gradients are enabled, the first `num_trained` batches have them. With `recompute` the
    backward pass computes each batch again, so that activations of a single batch exist at a time.
    `routers` take the batches' routes, and `counts` counts choices that differ from them.

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
                arguments = (inner, own_forward, batch, head, routers, counts)
                if recompute and is_trained:
                    scores.append(checkpoint(_score, *arguments, use_reentrant=False))
                else:
                    scores.append(_score(*arguments))
        # DDP looks for the tensors that it will see gradients of.
        return [tensor for fields in scores for tensor in fields if tensor is not None]

    holders = [inner, *_holders_of_forward(model, inner)]
    with replacing((holder, "forward", forward) for holder in holders):
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
    return [_wrapped(own, returned) for own in scores]


def _not_packed(model: torch.nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"tokens cannot be packed under {type(model).__name__}, which {reason}; call its own "
        "forward (under TRL loss_forward='trainer'), or train an adapter that lives inside the "
        "model's layers, as LoRA."
    )


def _holders_of_forward(model: torch.nn.Module, inner: Any) -> list[torch.nn.Module]:
    """Return the wrappers that call the inner model's forward by a reference of their own.

    PEFT 0.21's `AdaptionPromptModel` keeps the bound method.
    """
    wrappers = (module for module in model.modules() if module is not inner)
    return [w for w in wrappers if getattr(vars(w).get("forward"), "__self__", None) is inner]


def _wrapped(scores: Scores, returned: Iterator[torch.Tensor]) -> Scores:
    """Return scores as the wrapper returns them: their backward pass runs the wrapper's hooks.

    FSDP (torch 2.13) hooks the tensors themselves, and rounds its copies to the compute dtype.
    """
    fields: dict[str, Any] = scores._asdict()
    for name, own in fields.items():
        if own is not None:
            copy = next(returned)
            fields[name] = copy if copy.dtype == own.dtype else own
    return Scores(**fields)


def _score(
    inner: Any,
    own_forward: Callable[..., Any],
    batch: PackedBatch,
    head: Head,
    routers: Routers | None,
    counts: Disagreement | None,
) -> Scores:
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
    logprobs_K, entropies_K, aux_loss = scores
    entropies_R = None if entropies_K is None else entropies_K.index_select(0, batch.scores_R)
    return Scores(logprobs_K.index_select(0, batch.scores_R), entropies_R, aux_loss)


def _forked_forward(
    own: Callable[..., Any], inner: Any, batch: PackedBatch, *_: Any, **named: Any
) -> Any:
    """Run a backbone over a prompt, and from its states over completions; join hidden states."""
    assert batch.shared_ids is not None
    computed = ("input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache")
    settings = {name: value for name, value in named.items() if name not in computed}
    (B, S), P = batch.input_ids.shape, batch.shared_ids.shape[1]
    device, cache = batch.input_ids.device, DynamicCache(config=inner.config.get_text_config())
    settings |= {"past_key_values": cache, "use_cache": True}
    positions_1P = torch.arange(P, device=device)[None]
    output = own(input_ids=batch.shared_ids, position_ids=positions_1P, **settings)
    hidden = [output.last_hidden_state]
    if S:
        hf_compat.repeat_states(cache, B, device)
        output = own(input_ids=batch.input_ids, position_ids=batch.position_ids, **settings)
        hidden.append(output.last_hidden_state)
    output.last_hidden_state = torch.cat([h.flatten(0, 1) for h in hidden])[None]
    # The states are of no use to the caller.
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
    """Have the head see the hidden states that predict completion tokens alone, (1, K, H)."""

    def select(_module: Any, _arguments: Any, output: Any) -> Any:
        # The head may be called again, on a part of these.
        handle.remove()
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.flatten(0, 1).index_select(0, predicting_K)[None]
        return output

    handle = backbone.register_forward_hook(select)
    return handle


def _without_mask(backbone: torch.nn.Module, input_ids: torch.Tensor) -> RemovableHandle:
    """Have layers build no mask of all tokens."""
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
    """Return how gradients through forked states differ from those of whole rows; None: not at all.

    States that a layer writes without a graph give the same log-probabilities, and lose the
    gradient of the prompt. States that it writes over those of the prompt raise in the backward
    pass. Each of the `fork_examples` is compared.

    Args:
        inner: the transformers model.
        rows: some rows of the batch, each with a completion.
        score: computes the log-probabilities of rows in a layout, with a graph, in any order.
        dtype: precision of the forwards.

    Raises:
        Exception: whatever a backward pass raises.
    """
    for example in fork_examples(rows):
        if (difference := _gradient_difference(inner, partial(score, example), dtype)) is not None:
            return difference
    return None


def _gradient_difference(
    inner: Any, score: Callable[[PackingLayout], Sequence[torch.Tensor]], dtype: torch.dtype
) -> str | None:
    """Compare gradients of the embeddings, summed over the places of a token."""

    def gradient(layout: PackingLayout) -> torch.Tensor:
        places: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(_module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad:
                output.requires_grad_()
            places.append((arguments[0], output))

        handle = inner.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                total = torch.cat(list(score(layout))).sum()
        finally:
            handle.remove()
        ids, embedded = zip(*places, strict=True)
        of_places = torch.autograd.grad(total, embedded, materialize_grads=True)
        tokens, index = torch.cat([i.flatten() for i in ids]).unique(return_inverse=True)
        values = torch.cat([g.flatten(0, -2) for g in of_places]).double()
        sums = values.new_zeros(len(tokens), values.shape[-1]).index_add_(0, index, values)
        # Padding is a token of no row, and has no gradient.
        return sums[sums.abs().amax(1) > 0]

    scale = LEAST_SIZE / gradient(PackingLayout.PADDED).square().mean().sqrt()
    (reference, *_) = references(
        lambda: list(scale * gradient(PackingLayout.PADDED)),
        dtype,
        is_coarse=dtype.itemsize < torch.float32.itemsize,
    )

    def through_forks() -> list[torch.Tensor]:
        found = list(scale * gradient(PackingLayout.FORKED_STATES))
        if len(found) != len(reference.values):
            raise ConfigurationError(
                f"{len(found)} tokens have a gradient through forked states, and "
                f"{len(reference.values)} in whole rows"
            )
        return found

    agreement = reference.compare(through_forks, higher_precision)
    if agreement:
        return None
    multiple = agreement.largest_multiple
    return f"gradients through forked states are {multiple:.2g} times their rounding off"
