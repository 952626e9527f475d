"""Decide whether two computations of the same values agree to the model's own rounding.

Owns the one table of tolerances. A distance is compared with the noise of the same model in the
same precision, never with a fixed number of nats. Structure (masks, positions, neighbours, states)
is compared in float32 or float64, where a fault is a thousand times larger than the noise.

Values are a sequence of tensors, one per position or row: log-probabilities `[P, V]`, or lists of
`[T]`. P: positions or rows.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cb_rollout.engine.numerics.higher_precision import higher_precision

# Multiples of the noise that are accepted: at the median position, and at every position.
TYPICAL_MULTIPLE = 4.0
LARGEST_MULTIPLE = 25.0

# Root-mean-square of one rounding, as a share of the unit in the last place.
ROUNDING = 1 / math.sqrt(12)

# Noise that is assumed for a value if it was not measured, in roundings of the value. float32 also
# rounds its sums; 16 bits are summed in float32. SmolLM2-135M measures 20, and 2 to 6 in 16 bits.
FLOAT32_ROUNDINGS = 60
HALF_ROUNDINGS = 8

# The smallest size that is assumed for a value that was rounded, in nats: a log-probability is a
# logit less a normaliser, and both are larger than their difference.
LEAST_SIZE = 10.0

# Nats below which a token is excluded: its probability is 0 in every dtype.
EXCLUDED = -1e4

# Sequences of a rollout whose rounding is measured; the others' is assumed to be the same.
NUM_MEASURED = 2

# The largest float64 forward that takes a CPU only seconds, in tokens times parameters.
MAX_DOUBLE_PRODUCTS = 2e10

# The same on a GPU with few units for float64: all but these compute capabilities. An L4 computes
# 2.4e11 products in a second.
MAX_SLOW_GPU_PRODUCTS = 5e11
FAST_DOUBLE_CAPABILITIES = {(8, 0), (9, 0), (10, 0)}

T = TypeVar("T")

Values = torch.Tensor | Sequence[torch.Tensor]

Precisely = Callable[[torch.dtype], AbstractContextManager[Any]]
"""Returns a context in which forwards compute in a dtype."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distances between two computations of the same values, with their noise.

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
        verdict = "beyond"
        if self:
            verdict = f"within {TYPICAL_MULTIPLE:g} times"
        return (
            f"{self.root_mean_square:.2g} nats (at most {self.largest:.2g}), {verdict} the model's "
            f"own rounding of {self.noise:.2g}"
        )


def agrees(found: Values, expected: Values, noise: torch.Tensor) -> Agreement:
    """Compare two computations of the same values, with the noise `[P]` of `rounding_noise`.

    Infinities of the same sign agree, and NaN agrees with nothing.
    """
    distances = _distances(found, expected, unknown=math.inf)
    if not distances:
        return Agreement(0.0, 0.0, 0.0, 0.0, 0.0)
    flat = torch.cat(distances)
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

    A position that is exact by chance gets the noise of the median position. Noise above sqrt(eps)
    of a value's size is not rounding: it is clipped there, so that it cannot hide a fault.

    Args:
        expected: the values, computed in `dtype`.
        other: the same values in a higher precision; None: not measured.
        dtype: precision of the computation.
    """
    eps = torch.finfo(dtype).eps
    finite: list[torch.Tensor] = []
    for values in expected:
        doubles = values.detach().double()
        finite.append(doubles.masked_fill(_is_excluded(values), 0.0))
    sizes_P = _root_mean_squares(finite).clamp(min=LEAST_SIZE)
    rounding_P = ROUNDING * eps * sizes_P
    if other is None:
        num_roundings = HALF_ROUNDINGS
        if eps < 1e-6:
            num_roundings = FLOAT32_ROUNDINGS
        return rounding_P * num_roundings
    noise_P = _root_mean_squares(_distances(expected, other, unknown=0.0))
    noise_P = noise_P.clamp(min=noise_P.median().item())
    largest_P = math.sqrt(eps) * sizes_P
    return noise_P.minimum(largest_P).maximum(rounding_P)


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
        """Compare with the result of `found` in the same precision."""
        precision = nullcontext()
        if self.is_higher:
            precision = precisely(self.dtype)
        with precision:
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
    """Return the values that another computation has to agree with, the most reliable first.

    Args:
        compute: computes the values in the precision of its context.
        dtype: the model's own precision.
        precisely: returns a context in which `compute` runs in a given precision.
        is_coarse: fewer bits are kept than float32 has.
        is_measured: measure float32's noise by a forward in float64.
        can_raise_precision: False where other processes would have to do so too.
    """

    def compute_in(higher: torch.dtype) -> Values | None:
        if not can_raise_precision:
            return None
        return computed_in(higher, compute, precisely)

    own = compute()
    if not is_coarse:
        double = None
        if is_measured:
            double = compute_in(torch.float64)
        own_noise = rounding_noise(own, double, dtype)
        return [Reference(own, own_noise, dtype, is_higher=False)]

    single = compute_in(torch.float32)
    own_noise = rounding_noise(own, single, dtype)
    own_reference = Reference(own, own_noise, dtype, is_higher=False)
    if single is None:
        return [own_reference]
    double = None
    if is_measured:
        double = compute_in(torch.float64)
    single_noise = rounding_noise(single, double, torch.float32)
    single_reference = Reference(single, single_noise, torch.float32, is_higher=True)
    return [single_reference, own_reference]


def computed_in(
    dtype: torch.dtype, compute: Callable[[], T], precisely: Precisely = higher_precision
) -> T | None:
    """Return the result of `compute` in a higher precision; None if the model cannot run in it."""
    try:
        with precisely(dtype):
            return compute()
    except (TypeError, NameError):
        raise
    except Exception:  # noqa: BLE001 - a model, or a kernel's compiler, may refuse one precision
        return None


def is_measurable(model: torch.nn.Module, num_tokens: int) -> bool:
    """Return whether a float64 forward of this many tokens takes only seconds."""
    parameters = list(model.parameters())
    num_products = num_tokens * sum(map(torch.numel, parameters))
    device = parameters[0].device
    if device.type == "cpu":
        return num_products <= MAX_DOUBLE_PRODUCTS
    is_fast = device.type != "cuda" or has_fast_double(device)
    return is_fast or num_products <= MAX_SLOW_GPU_PRODUCTS


def has_fast_double(device: torch.device) -> bool:
    """Return whether a CUDA device computes float64 at half the speed of float32."""
    # ROCm numbers its devices differently, and its data-centre cards are fast.
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) in FAST_DOUBLE_CAPABILITIES


def _distances(found: Values, expected: Values, unknown: float) -> list[torch.Tensor]:
    """Return absolute differences at each position, flat, float64; `unknown`: for NaN, infinity."""
    distances = []
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            a = a.detach()
            b = b.detach()
            are_equal = (a == b) | (_is_excluded(a) & _is_excluded(b))
            distance = torch.where(are_equal, 0.0, (a.double() - b.double()).abs())
            distances.append(distance.nan_to_num(nan=unknown, posinf=unknown).flatten())
    return distances


def _is_excluded(values: torch.Tensor) -> torch.Tensor:
    """Return where a model excludes a token, by infinity or by its dtype's lowest number."""
    return values.detach() < EXCLUDED


def _root_mean_squares(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the root-mean-square of each tensor that has any element, `[P]`, float64."""
    roots = [x.double().square().mean().sqrt() for x in values if x.numel()]
    if not roots:
        return torch.ones(1, dtype=torch.float64)
    return torch.stack(roots)
