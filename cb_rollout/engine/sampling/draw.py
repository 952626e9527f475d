"""Draw tokens from logits, and compute their log-probabilities: tensor arithmetic, without state.

A counter-based generator, keyed by the sequence's seed and the token's index, gives one uniform
number per token, which is mapped through the cumulative distribution. So a sequence's draws depend
on nothing else in the batch, and resuming needs no saved state. B: rows, V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.truncation import (
    CUMULATIVE_UNITS,
    Truncation,
    create_truncation,
    cumulative_units,
    truncate,
)

# SplitMix64's constants (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")
# as signed integers: torch's int64 wraps as the unsigned arithmetic of the paper does.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Tokens that are summed together before one is drawn: cumulative sums over the whole vocabulary
# would take more bytes than the logits.
LARGEST_CHUNK = 256
SMALLEST_CHUNK = 16

# Bytes of the exponentials that a CPU computes at once, which fit its cache.
CPU_BYTES = 2 << 20


def uniforms(seeds_B: torch.Tensor, indices_B: torch.Tensor) -> torch.Tensor:
    """Return the `index`-th (>= 0) draw, float64 in [0, 1), of each int64 seed's SplitMix64."""
    z = seeds_B + (indices_B + 1) * GOLDEN_GAMMA
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    # A logical shift: torch's `>>` copies the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of a batch's rows, as tensors on the logits' device."""

    temperatures_B: torch.Tensor | None
    """1 where greedy, so that log-probabilities are reported at temperature 1; None: 1 for all."""
    seeds_B: torch.Tensor
    greedy_rows: torch.Tensor | None
    """Indices of the rows that take the most likely token; None: there are none."""
    truncated_rows: torch.Tensor | None
    """Indices of the rows with top-k, top-p or min-p; None: there are none."""
    truncation: Truncation | None
    """The parameters of `truncated_rows`."""
    top_rows: torch.Tensor | None
    """Indices of the rows that ask for `top_logprobs`; None: there are none."""
    num_top: int
    """The largest `top_logprobs` of all rows."""

    def scaled(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the logits divided by the rows' temperatures; the same tensor if all are 1."""
        if self.temperatures_B is None:
            return logits_BV
        return logits_BV / self.temperatures_B[:, None]


class Sampled(NamedTuple):
    """The results of sampling a batch."""

    token_ids_B: torch.Tensor
    """int64"""
    logprobs_B: torch.Tensor
    """float32, natural logarithm."""
    is_valid_B: torch.Tensor
    """bool; False for logits with NaN or infinity, which make no distribution: the row's token and
    log-probability are arbitrary."""
    is_possible_B: torch.Tensor | None
    """bool; False if logits processors excluded every token; None: logits were not processed."""
    top_KN: tuple[torch.Tensor, torch.Tensor] | None
    """The `num_top` most likely tokens of each of `top_rows` and their log-probabilities."""
    log_mass_R: torch.Tensor | None
    """float32; the logarithm of each truncated row's kept probability; None: no row is
    truncated."""
    kept_RV: torch.Tensor | None
    """bool; the tokens that truncation kept; None: no row is truncated."""


def create_sampling_batch(requests: Sequence[Request], device: torch.device) -> SamplingBatch:
    """Collect the parameters of `requests`, one row each."""
    seeds: list[int] = []
    temperatures: list[float] = []
    greedy: list[int] = []
    truncated: list[int] = []
    with_top: list[int] = []
    for row, request in enumerate(requests):
        params = request.params
        seeds.append(request.seed)
        temperatures.append(1.0 if params.is_greedy else params.temperature)
        if params.is_greedy:
            greedy.append(row)
        if params.is_truncated:
            truncated.append(row)
        if params.top_logprobs:
            with_top.append(row)
    temperatures_B = None
    if set(temperatures) != {1.0}:
        temperatures_B = devices.to_device(temperatures, device, torch.float32)
    of_truncated = [requests[row].params for row in truncated]
    return SamplingBatch(
        temperatures_B=temperatures_B,
        seeds_B=devices.to_device(seeds, device),
        greedy_rows=_row_indices(greedy, device),
        truncated_rows=_row_indices(truncated, device),
        truncation=create_truncation(of_truncated, device),
        top_rows=_row_indices(with_top, device),
        num_top=max(request.params.top_logprobs for request in requests),
    )


def _row_indices(rows: list[int], device: torch.device) -> torch.Tensor | None:
    """Return indices of rows as a tensor; None without indices."""
    if not rows:
        return None
    return devices.to_device(rows, device)


class Exponentials(NamedTuple):
    """Sums of each row's unnormalized probabilities. C: chunks of the vocabulary."""

    logits_BV: torch.Tensor
    """float32, whose exponentials are summed; `draw` reads them again."""
    peaks_B1: torch.Tensor
    """The largest logit, whose unnormalized probability is 1."""
    sums_BC: torch.Tensor
    """float64, each chunk's sum: in float32 a large vocabulary would lose its tail."""
    normalizers_B: torch.Tensor
    """float32, log-sum-exp; finite exactly when the row's logits make a distribution."""


def exponentials(logits_BV: torch.Tensor) -> Exponentials:
    """Sum the exponentials of each row's logits, scaled so that the largest is 1."""
    B, V = logits_BV.shape
    peaks_B1 = logits_BV.amax(-1, keepdim=True)
    num_rows = max(1, B)
    if logits_BV.device.type == "cpu":
        # Numbers that fit a CPU's cache are not written to memory, where each new page costs time.
        num_rows = max(1, CPU_BYTES // (4 * V))
    sums: list[torch.Tensor] = []
    parts = zip(logits_BV.split(num_rows), peaks_B1.split(num_rows), strict=True)
    for part, peaks in parts:
        weights = (part - peaks).exp_()
        sums.append(_chunks(weights).sum(-1, dtype=torch.float64))
    sums_BC = torch.cat(sums)
    normalizers_B = sums_BC.sum(-1).log().float() + peaks_B1[:, 0]
    return Exponentials(logits_BV, peaks_B1, sums_BC, normalizers_B)


def _chunks(values_BV: torch.Tensor) -> torch.Tensor:
    B, V = values_BV.shape
    return values_BV.reshape(B, -1, _chunk_size(V))


@cache
def _chunk_size(vocab_size: int) -> int:
    """Return the largest chunk size that divides the vocabulary, or the whole vocabulary."""
    for size in range(LARGEST_CHUNK, SMALLEST_CHUNK - 1, -1):
        if vocab_size % size == 0:
            return size
    return vocab_size


def draw(exponentials: Exponentials, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Find the token at each row's uniform number; never a token of probability zero."""
    logits_BV, peaks_B1, sums_BC, _ = exponentials
    logits_BCN = _chunks(logits_BV)
    chunks_B1, points_B1 = _find(sums_BC, (uniforms_B * sums_BC.sum(-1))[:, None])
    chunk_size = logits_BCN.shape[2]
    logits_BN = logits_BCN.gather(1, chunks_B1[:, :, None].expand(-1, -1, chunk_size))[:, 0]
    offsets_B1, _ = _find((logits_BN - peaks_B1).exp_().double(), points_B1)
    return (chunks_B1 * chunk_size + offsets_B1)[:, 0]


def _find(sums_BK: torch.Tensor, points_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which of K adjacent intervals (float64 lengths) holds a point >= 0, and its offset."""
    totals_B1 = sums_BK.sum(-1, keepdim=True)
    ends_BK = cumulative_units(sums_BK, totals_B1)
    # Rounding must not lead past the end, to a token of probability zero.
    units_B1 = (points_B1 / totals_B1 * CUMULATIVE_UNITS).long()
    units_B1 = torch.minimum(units_B1, ends_BK[:, -1:] - 1)
    # A row without a distribution has no such interval.
    indices_B1 = torch.searchsorted(ends_BK, units_B1, right=True).clamp(max=sums_BK.shape[1] - 1)
    before_B1 = (indices_B1 - 1).clamp(min=0)
    starts_B1 = torch.where(indices_B1 > 0, ends_BK.gather(1, before_B1), 0)
    offsets_B1 = points_B1 - starts_B1 / CUMULATIVE_UNITS * totals_B1
    return indices_B1, offsets_B1.clamp(min=0)


def sample(
    logits_BV: torch.Tensor,
    batch: SamplingBatch,
    indices_B: torch.Tensor,
    mode: LogprobsMode,
    processed_BV: torch.Tensor | None = None,
) -> Sampled:
    """Choose each row's next token.

    Args:
        logits_BV: the model's, float32.
        batch: the rows' sampling parameters.
        indices_B: int64, how many tokens each row has sampled.
        mode: the distribution that log-probabilities are taken from.
        processed_BV: float32 logits to sample from instead; None: `logits_BV`.
    """
    policy_BV = batch.scaled(logits_BV)
    if processed_BV is None:
        processed = _truncated(policy_BV, batch)
        greedy_from_BV = logits_BV
    else:
        processed = _truncated(batch.scaled(processed_BV), batch)
        greedy_from_BV = processed_BV
    distribution = exponentials(processed.logits_BV)
    token_ids_B = draw(distribution, uniforms(batch.seeds_B, indices_B))
    if batch.greedy_rows is not None:
        most_likely_R = greedy_from_BV.index_select(0, batch.greedy_rows).argmax(-1)
        token_ids_B = token_ids_B.index_copy(0, batch.greedy_rows, most_likely_R)
    # A row without a distribution may have drawn past the end.
    token_ids_B = token_ids_B.clamp(max=logits_BV.shape[-1] - 1)

    reported_BV = processed.logits_BV
    normalizers_B = distribution.normalizers_B
    has_distribution_B = normalizers_B.isfinite()
    is_valid_B = has_distribution_B
    is_possible_B = None
    if processed.logits_BV is not policy_BV:
        policy_normalizers_B = exponentials(policy_BV).normalizers_B
        is_model_finite_B = policy_normalizers_B.isfinite()
        if processed_BV is None:
            is_valid_B = has_distribution_B & is_model_finite_B
        else:
            is_possible_B = has_distribution_B
            is_valid_B = is_model_finite_B
        if mode != LogprobsMode.PROCESSED:
            reported_BV = policy_BV
            normalizers_B = policy_normalizers_B
    if operators.are_installed():
        logprobs_B = chosen_logprobs(reported_BV, token_ids_B)
    else:
        logprobs_B = reported_BV.gather(1, token_ids_B[:, None])[:, 0] - normalizers_B
    return Sampled(
        token_ids_B=token_ids_B,
        logprobs_B=logprobs_B,
        is_valid_B=is_valid_B,
        is_possible_B=is_possible_B,
        top_KN=_most_likely(reported_BV, normalizers_B, batch),
        log_mass_R=processed.log_mass_R,
        kept_RV=processed.kept_RV,
    )


class _Truncated(NamedTuple):
    """Logits after top-k, top-p and min-p."""

    logits_BV: torch.Tensor
    log_mass_R: torch.Tensor | None = None
    """As in `Sampled`."""
    kept_RV: torch.Tensor | None = None
    """As in `Sampled`."""


def _truncated(logits_BV: torch.Tensor, batch: SamplingBatch) -> _Truncated:
    """Exclude the tokens that the rows truncate; return the same tensor if no row truncates."""
    if batch.truncated_rows is None or batch.truncation is None:
        return _Truncated(logits_BV)
    whole_RV = logits_BV.index_select(0, batch.truncated_rows)
    kept_RV = truncate(whole_RV, batch.truncation)
    return _Truncated(
        logits_BV=logits_BV.index_copy(0, batch.truncated_rows, kept_RV),
        log_mass_R=kept_RV.logsumexp(-1) - whole_RV.logsumexp(-1),
        kept_RV=kept_RV > -torch.inf,
    )


def _most_likely(
    logits_BV: torch.Tensor, normalizers_B: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return `Sampled.top_KN`."""
    if batch.top_rows is None:
        return None
    num_top = min(batch.num_top, logits_BV.shape[-1])
    top = logits_BV.index_select(0, batch.top_rows).topk(num_top)
    return top.indices, top.values - normalizers_B[batch.top_rows, None]


def chosen_logprobs(logits_BV: torch.Tensor, token_ids_B: torch.Tensor) -> torch.Tensor:
    """Return float32 log-softmax at the tokens, `[B]`, like TRL's `selective_log_softmax`."""
    return logits_BV.gather(1, token_ids_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
