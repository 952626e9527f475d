"""Decide whether two computations of the same values agree to the model's own rounding.

Owns the one table of tolerances. A distance is held against the noise of the same model in the same
precision, never against a number of nats. Structure (masks, positions, neighbours, states) is
compared in float32 at least, where it stands a thousand times above the noise.

Values are a sequence of tensors, one for each position or row: log-probabilities `[P, V]`, or lists
of `[T]`. P: positions or rows.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cb_rollout.engine.numerics.higher_precision import higher_precision

# Multiples of the noise that are accepted: at the median position, and at every position.
TYPICAL_MULTIPLE, LARGEST_MULTIPLE = 4.0, 25.0

# Root-mean-square of one rounding, as a share of the unit in the last place.
ROUNDING = 1 / math.sqrt(12)

# Roundings of a value's size that stand for noise that was not measured: in float32, where sums
# are rounded too, and in 16 bits, where they are not. SmolLM2-135M measures 20, and 2 to 6.
FLOAT32_ROUNDINGS, HALF_ROUNDINGS = 60, 8

# Least size of what is rounded, in nats: a log-probability is a logit less a normaliser.
LEAST_SIZE = 10.0

# Nats below which a token is excluded: its probability is 0 in every dtype.
EXCLUDED = -1e4

# Sequences whose rounding stands for that of a rollout.
NUM_MEASURED = 2

# Products of tokens and parameters that a CPU computes in float64, in seconds.
MAX_DOUBLE_PRODUCTS = 2e10

T = TypeVar("T")

Values = torch.Tensor | Sequence[torch.Tensor]

Precisely = Callable[[torch.dtype], AbstractContextManager[Any]]
"""Returns a context in which forwards compute in a dtype."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distances between two computations of the same values, beside their noise.

    They are in the unit of the values: nats for log-probabilities.
    """

    largest: float
    root_mean_square: float
    noise: float
    """Root-mean-square distance that rounding explains, at the median position."""
    typical_multiple: float
    """Distance over noise at the median position."""
    largest_multiple: float
    """Distance over noise at the worst position."""

    def __bool__(self) -> bool:
        # Rounding explains the distance.
        is_typical = self.typical_multiple <= TYPICAL_MULTIPLE
        return is_typical and self.largest_multiple <= LARGEST_MULTIPLE

    def __str__(self) -> str:
        verdict = "within" if self else "beyond"
        return (
            f"{self.root_mean_square:.2g} nats (at most {self.largest:.2g}), {verdict} the model's "
            f"own rounding of {self.noise:.2g}"
        )


def agrees(found: Values, expected: Values, noise: torch.Tensor) -> Agreement:
    """Compare two computations of the same values, with a noise, `[P]`, of `rounding_noise`.

    Equal infinities are equal, and NaN agrees with nothing.
    """
    distances = _distances(found, expected, unknown=math.inf)
    flat = torch.cat(distances) if distances else torch.zeros(0)
    if not flat.numel():
        return Agreement(0.0, 0.0, 0.0, 0.0, 0.0)
    distances_P = _root_mean_squares(distances)
    # A position without noise agrees in every bit or not at all.
    multiples_P = torch.where(distances_P == 0, 0.0, distances_P / noise.to(distances_P))
    return Agreement(
        largest=float(flat.max()),
        root_mean_square=float(flat.square().mean().sqrt()),
        noise=float(noise.median()),
        typical_multiple=float(multiples_P.median()),
        largest_multiple=float(multiples_P.max()),
    )


def rounding_noise(expected: Values, other: Values | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the noise of a computation at each position, `[P]`, float64.

    A position that is exact by chance has the noise of the median position. Noise beyond the root
    of a rounding is not rounding: it is cut there, so that it excuses no fault.

    Args:
        expected: the values, computed in `dtype`.
        other: the same values in a higher precision; None: not measured.
        dtype: precision of the computation.
    """
    eps = torch.finfo(dtype).eps
    finite = [x.detach().double().masked_fill(_is_excluded(x), 0.0) for x in expected]
    rounding_P = ROUNDING * eps * _root_mean_squares(finite).clamp(min=LEAST_SIZE)
    if other is None:
        return rounding_P * (FLOAT32_ROUNDINGS if eps < 1e-6 else HALF_ROUNDINGS)
    noise_P = _root_mean_squares(_distances(expected, other, unknown=0.0))
    noise_P = noise_P.clamp(min=noise_P.median().item())
    return noise_P.minimum(rounding_P / ROUNDING / math.sqrt(eps)).maximum(rounding_P)


def overall_noise(expected: Values, other: Values | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the noise of all positions together, `[1]`, float64; see `rounding_noise`."""
    return rounding_noise(expected, other, dtype).square().mean().sqrt()[None]


@dataclass(frozen=True, slots=True)
class Reference:
    """Values that a model computes in one precision, and their noise."""

    values: Values
    noise: torch.Tensor
    dtype: torch.dtype
    is_higher: bool
    """True: a higher precision than the model's own."""

    def compare(self, found: Callable[[], Values], precisely: Precisely) -> Agreement:
        """Compare with what `found` computes in the same precision."""
        with precisely(self.dtype) if self.is_higher else nullcontext():
            return agrees(found(), self.values, self.noise)


def references(
    compute: Callable[[], Values],
    dtype: torch.dtype,
    precisely: Precisely = higher_precision,
    *,
    is_coarse: bool,
    is_measured: bool = True,
    can_raise_precision: bool = True,
) -> list[Reference]:
    """Return what another computation has to agree with, the surest first.

    Args:
        compute: computes the values in the precision of its context.
        dtype: the model's own precision.
        precisely: returns a context in which `compute` has another.
        is_coarse: fewer bits are kept than float32 has.
        is_measured: measure float32's noise by a forward in float64.
        can_raise_precision: False where other processes would have to do so too.
    """

    def compute_in(higher: torch.dtype) -> Values | None:
        return computed_in(higher, compute, precisely) if can_raise_precision else None

    own = compute()
    higher = compute_in(torch.float32) if is_coarse else None
    needs_double = is_measured and (higher is not None or not is_coarse)
    double = compute_in(torch.float64) if needs_double else None
    own_noise = rounding_noise(own, double if higher is None else higher, dtype)
    own_reference = Reference(own, own_noise, dtype, is_higher=False)
    if higher is None:
        return [own_reference]
    noise = rounding_noise(higher, double, torch.float32)
    return [Reference(higher, noise, torch.float32, is_higher=True), own_reference]


def computed_in(
    dtype: torch.dtype, compute: Callable[[], T], precisely: Precisely = higher_precision
) -> T | None:
    """Return what `compute` does in a higher precision; None: the model refuses it."""
    try:
        with precisely(dtype):
            return compute()
    except (TypeError, NameError):
        raise
    except Exception:  # noqa: BLE001 - a model, or a kernel's compiler, may refuse one precision
        return None


def is_measurable(model: torch.nn.Module, num_tokens: int) -> bool:
    """Return whether a forward of so many tokens in float64 takes no more than seconds."""
    parameters = list(model.parameters())
    is_fast = parameters[0].device.type != "cpu"
    return is_fast or num_tokens * sum(map(torch.numel, parameters)) <= MAX_DOUBLE_PRODUCTS


def _distances(found: Values, expected: Values, unknown: float) -> list[torch.Tensor]:
    """Return the absolute differences at each position, flat, float64; `unknown`: for NaN."""
    distances = []
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            a, b = a.detach(), b.detach()
            are_equal = (a == b) | (_is_excluded(a) & _is_excluded(b))
            distance = torch.where(are_equal, 0.0, (a.double() - b.double()).abs())
            distances.append(distance.nan_to_num(nan=unknown, posinf=unknown).flatten())
    return distances


def _is_excluded(values: torch.Tensor) -> torch.Tensor:
    """Return where a model excludes a token: by infinity, or by its dtype's lowest number."""
    return values.detach() < EXCLUDED


def _root_mean_squares(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the root-mean-square of each tensor that has any element, `[P]`, float64."""
    roots = [x.double().square().mean().sqrt() for x in values if x.numel()]
    return torch.stack(roots) if roots else torch.ones(1, dtype=torch.float64)
