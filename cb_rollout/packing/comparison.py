"""Compare the packed forward of some rows with a padded one: scores and gradients.

Called by the thread that trains.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LossComparison:
    """Two forwards of the same rows by one model."""

    model: torch.nn.Module
    own_forward: Callable[[], Result]
    """The trainer's own."""
    packed_forward: Callable[[], Result]
    lengths: Sequence[int]
    """Completion tokens of each row."""
    num_tokens: int
    """Of all rows, prompts included."""
    mixed_precision: str
    """Accelerate's."""
    can_raise_precision: bool
    """False where other processes hold parts of the weights."""

    def difference(self) -> str | None:
        """Return how the two differ by more than rounding; None: they agree.

        In 16 bits they are compared in float32 first: there a state that leaks from a row into its
        neighbour stands a thousand times above the noise.
        """
        dtype = compute_dtype(self.model, self.mixed_precision)
        is_coarse = dtype.itemsize < torch.float32.itemsize
        higher = self._computed_in(torch.float32) if is_coarse else None
        if higher is not None:
            is_graded = higher.gradient is not None
            with higher_precision(torch.float32), torch.set_grad_enabled(is_graded):
                packed = self._computed(self.packed_forward)
            found = _difference(packed, higher, self._measured(), torch.float32)
            if found is not None:
                return f"in float32 {found}"
            del packed
        own = self._computed(self.own_forward)
        packed = self._computed(self.packed_forward)
        return _difference(packed, own, higher if is_coarse else self._measured(), dtype)

    def _measured(self) -> Computed | None:
        """Return the scores in float64, without gradients; None: they would take too long."""
        if not is_measurable(self.model, self.num_tokens):
            return None
        with torch.no_grad():
            return self._computed_in(torch.float64)

    def _computed_in(self, dtype: torch.dtype) -> Computed | None:
        """Compute by the trainer's own forward in a higher precision; None: it fails there."""
        if not self.can_raise_precision:
            return None
        # Autograd gives a weight of 16 bits no gradient of 32.
        is_wide = compute_dtype(self.model).itemsize >= torch.float32.itemsize
        is_graded = is_wide and torch.is_grad_enabled()
        with torch.set_grad_enabled(is_graded):
            return computed_in(dtype, lambda: self._computed(self.own_forward))

    def _computed(self, forward: Callable[[], Result]) -> Computed:
        logprobs_BT, entropies_BT, _ = forward()
        logprobs = [row[:length] for row, length in zip(logprobs_BT, self.lengths, strict=True)]
        entropies = []
        if entropies_BT is not None:
            rows = zip(entropies_BT, self.lengths, strict=True)
            entropies = [row[:length].detach() for row, length in rows]
        gradient = None
        if logprobs_BT.requires_grad:
            scores = torch.cat(logprobs)
            # Any weights would do that differ from token to token.
            weights = torch.linspace(1, 2, len(scores), device=scores.device)
            parts = torch.autograd.grad(
                (weights * scores).sum(), _smallest_parameters(self.model), materialize_grads=True
            )
            gradient = torch.cat([part.flatten() for part in parts])
        return Computed([row.detach() for row in logprobs], entropies, gradient)


def _difference(
    found: Computed, expected: Computed, other: Computed | None, dtype: torch.dtype
) -> str | None:
    """Return how two forwards differ; `other`: the expected one in a higher precision."""
    for name in ("logprobs", "entropies"):
        values = getattr(expected, name)
        if not (values and getattr(found, name)):
            continue
        noise = rounding_noise(values, None if other is None else getattr(other, name), dtype)
        agreement = agrees(getattr(found, name), values, noise)
        if not agreement:
            word = "log-probabilities" if name == "logprobs" else name
            return f"{word} are off the trainer's forward by {agreement}"
    if found.gradient is None or expected.gradient is None:
        return None
    # Of any size: an agreement takes very low numbers for excluded tokens.
    scale = expected.gradient.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    found_gradient, own = found.gradient / scale, expected.gradient / scale
    measured = None if other is None or other.gradient is None else other.gradient / scale
    agreement = agrees([found_gradient], [own], gradient_noise(own, measured, dtype))
    if not agreement:
        share = agreement.root_mean_square / float(own.square().mean().sqrt())
        return f"gradients differ by {share:.2g} of their size from the trainer's"
    return None


def _smallest_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return trained parameters whose gradients are compared: norms and the like of every layer."""
    parameters = sorted((p for p in model.parameters() if p.requires_grad), key=torch.numel)
    ends = itertools.accumulate(map(torch.numel, parameters))
    num_chosen = sum(end <= MAX_COMPARED_ELEMENTS for end in ends)
    return parameters[: max(1, num_chosen)]
