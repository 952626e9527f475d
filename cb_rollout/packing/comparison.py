"""Compare the packed forward of some rows with a padded forward: scores and gradients.

Called by the thread that trains.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cb_rollout.compat.torch import compute_dtype
from cb_rollout.engine.numerics.agreement import (
    agrees,
    computed_in,
    gradient_noise,
    is_measurable,
    rounding_noise,
)
from cb_rollout.engine.numerics.higher_precision import higher_precision

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, (B, T), and the load-balancing loss of a mixture of experts."""

# Elements of the gradients that are compared: four copies of them exist at a time.
MAX_COMPARED_ELEMENTS = 1 << 25


class Computed(NamedTuple):
    """Scores of some rows, and the gradient of their sum."""

    logprobs: list[torch.Tensor]
    """Of each row, of its completion's tokens."""
    entropies: list[torch.Tensor]
    """The same; empty where they were not asked for."""
    gradient: torch.Tensor | None
    """Of the smallest trained parameters, flat; None: gradients are disabled."""


def loss_difference(
    model: torch.nn.Module,
    own_forward: Callable[[], Result],
    packed_forward: Callable[[], Result],
    lengths: Sequence[int],
    num_tokens: int,
    dtype: torch.dtype,
    *,
    can_raise_precision: bool,
) -> str | None:
    """Return how two forwards of the same rows differ by more than rounding; None: they agree.

    In 16 bits they are compared in float32 first: there a state that leaks from a row into its
    neighbour stands a thousand times above the noise.

    `own_forward` is the trainer's; `packed_forward` is called last, in `dtype`. `lengths` are the
    completion tokens of each row, `num_tokens` those of all rows and prompts.
    `can_raise_precision`: no other process holds parts of the weights.
    """
    is_coarse = dtype.itemsize < torch.float32.itemsize
    # Autograd gives a weight of 16 bits no gradient of 32.
    is_wide = compute_dtype(model).itemsize >= torch.float32.itemsize
    has_gradient = is_wide and torch.is_grad_enabled()

    def own_in(higher: torch.dtype, has_gradient: bool) -> Computed | None:
        if not can_raise_precision:
            return None
        with torch.set_grad_enabled(has_gradient):
            return computed_in(higher, lambda: _computed(model, own_forward, lengths))

    def measured() -> Computed | None:
        return own_in(torch.float64, False) if is_measurable(model, num_tokens) else None

    precise = own_in(torch.float32, has_gradient) if is_coarse else None
    if precise is not None:
        has_gradient = precise.gradient is not None
        with higher_precision(torch.float32), torch.set_grad_enabled(has_gradient):
            packed = _computed(model, packed_forward, lengths)
        difference = _difference(packed, precise, measured(), torch.float32)
        if difference is not None:
            return f"in float32 {difference}"
        del packed
    own = _computed(model, own_forward, lengths)
    packed = _computed(model, packed_forward, lengths)
    return _difference(packed, own, precise if is_coarse else measured(), dtype)


def _computed(
    model: torch.nn.Module, forward: Callable[[], Result], lengths: Sequence[int]
) -> Computed:
    def unpadded(values_BT: torch.Tensor) -> list[torch.Tensor]:
        return [row[:length] for row, length in zip(values_BT, lengths, strict=True)]

    logprobs_BT, entropies_BT, _ = forward()
    logprobs = unpadded(logprobs_BT)
    entropies = [] if entropies_BT is None else unpadded(entropies_BT.detach())
    gradient = None
    if logprobs_BT.requires_grad:
        scores = torch.cat(logprobs)
        # Any weights would do that differ between tokens.
        weighted = torch.linspace(1, 2, len(scores), device=scores.device) * scores
        parameters = _smallest_parameters(model)
        gradients = torch.autograd.grad(weighted.sum(), parameters, materialize_grads=True)
        gradient = torch.cat([gradient.flatten() for gradient in gradients])
    return Computed([row.detach() for row in logprobs], entropies, gradient)


def _difference(
    packed: Computed, own: Computed, precise: Computed | None, dtype: torch.dtype
) -> str | None:
    """Return how two forwards in `dtype` differ; `precise`: the trainer's in a higher precision."""
    for name, word in (("logprobs", "log-probabilities"), ("entropies", "entropies")):
        found, expected = getattr(packed, name), getattr(own, name)
        if found and expected:
            noise = rounding_noise(expected, precise and getattr(precise, name), dtype)
            if not (agreement := agrees(found, expected, noise)):
                return f"{word} are off the trainer's forward by {agreement}"
    if packed.gradient is None or own.gradient is None:
        return None
    # Of any size: an agreement takes very low numbers for excluded tokens.
    scale = own.gradient.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    found, expected = packed.gradient / scale, own.gradient / scale
    measured = precise.gradient / scale if precise and precise.gradient is not None else None
    agreement = agrees([found], [expected], gradient_noise(expected, measured, dtype))
    if not agreement:
        share = agreement.root_mean_square / float(expected.square().mean().sqrt())
        return f"gradients differ by {share:.2g} of their size from the trainer's"
    return None


def _smallest_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    parameters = sorted((p for p in model.parameters() if p.requires_grad), key=torch.numel)
    ends = itertools.accumulate(map(torch.numel, parameters))
    num_chosen = sum(end <= MAX_COMPARED_ELEMENTS for end in ends)
    return parameters[: max(1, num_chosen)]
