"""Measure how well predicted log-probabilities explain reported ones.

Arithmetic; runs no model. The noise of a token is the rounding of a logit times the token's
sensitivity to it, which vanishes for a certain token. The noise follows Student's t with three
degrees of freedom, whose heavy tails allow for different kernels and flipped routers.

N: tokens of all sequences, T: tokens of one, V: vocabulary.
"""

import math
from typing import NamedTuple

import torch

from cb_rollout.engine.numerics.agreement import LARGEST_MULTIPLE, TYPICAL_MULTIPLE

# Rounding of another engine and of the trainer together, as a multiple of the trainer's.
MARGIN = 2.0

# Sensitivity of a certain token, which is not 0 because its log-probability itself is rounded.
LEAST_SENSITIVITY = 0.05

# Nats that stand for any larger difference, such as that of a token that a hypothesis excludes.
LARGEST_DIFFERENCE = 100.0

# Share of tokens that may lie beyond the noise of a cause, because a rounding fell the other way.
MAX_OUTLIERS = 0.01

# Nats in favour of another cause before rounding is doubted.
LEAST_EVIDENCE = 20.0

# Log-density of Student's t with three degrees of freedom, at 0.
_LOG_PEAK = math.log(2 / (math.pi * math.sqrt(3)))


class Prediction(NamedTuple):
    """Log-probabilities of the sampled tokens under a hypothesis, float64."""

    logprobs_N: torch.Tensor
    sizes_N: torch.Tensor
    """Nats by which `logprobs_N` change, root-mean-square, if each logit changes by one."""


def prediction(logprobs_NV: torch.Tensor, tokens_N: torch.Tensor) -> Prediction:
    """Return the predictions of normalised float32 distributions for sampled int64 tokens."""
    chosen_N = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0].double()
    squares_N = (2 * logprobs_NV).exp().sum(-1).double()
    variances_N = (1 - chosen_N.exp()).square() + squares_N - (2 * chosen_N).exp()
    return Prediction(chosen_N, variances_N.clamp(min=LEAST_SENSITIVITY**2).sqrt())


def decimal_step(values_N: torch.Tensor) -> float:
    """Return the step of numbers that were written with at most five decimals, else 0."""
    # A float32 holds no decimal exactly.
    tolerance = 1e-7 * values_N.abs().max()
    for decimals in range(1, 6):
        errors_N = (values_N - values_N.round(decimals=decimals)).abs()
        if errors_N.max() < tolerance:
            return 10.0**-decimals
    return 0.0


def short_dtype(values_N: torch.Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype that holds every value exactly; None: there is none."""
    values_N = values_N[values_N != 0]
    if len(values_N.unique()) < 8:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values_N.to(dtype).double(), values_N):
            return dtype
    return None


def differences(reported_N: torch.Tensor, predicted_N: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences, `[N]`, at most `LARGEST_DIFFERENCE`."""
    nats_N = (reported_N - predicted_N).abs()
    return nats_N.nan_to_num(nan=LARGEST_DIFFERENCE).clamp(max=LARGEST_DIFFERENCE)


def log_densities(distances_N: torch.Tensor, noise_N: torch.Tensor) -> torch.Tensor:
    """Return log-densities, `[N]`, at distances from predictions that are rounded by `noise_N`."""
    scale_N = MARGIN * noise_N
    return _LOG_PEAK - 2 * ((distances_N / scale_N).square() / 3).log1p() - scale_N.log()


def explains(distances_N: torch.Tensor, noise_N: torch.Tensor) -> bool:
    """Return whether a cause accounts for all but a few of the reported numbers."""
    multiples_N = distances_N / noise_N
    num_outliers = int((multiples_N > LARGEST_MULTIPLE).sum())
    is_typical = float(multiples_N.median()) <= TYPICAL_MULTIPLE
    return is_typical and num_outliers <= max(1, int(MAX_OUTLIERS * len(noise_N)))


def first_of_suffix(gains_T: torch.Tensor) -> int | None:
    """Return the start of the suffix that favours a cause most; None: none favours it enough."""
    largest, index = gains_T.flip(0).cumsum(0).flip(0).max(0)
    return int(index) if largest > LEAST_EVIDENCE else None


def changepoint(before_T: torch.Tensor, after_T: torch.Tensor) -> int:
    """Return how many leading tokens `before_T` explains better; both are log-densities."""
    gains_T = (before_T - after_T).cumsum(0)
    return int(torch.cat([torch.zeros_like(gains_T[:1]), gains_T]).argmax())
