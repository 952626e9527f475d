"""Distributions of a step's tokens: log-probabilities, drift and importance sampling ratios.

Owns the names of the histograms and their bins. Pure arithmetic, in float64.

N: tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LOGPROBS = "rollout/logprobs"
DRIFT = "rollout/logprob_drift"
RATIO = "rollout/importance_sampling_ratio"

NUM_BINS = 64

Ranges = dict[str, tuple[float, float]]
"""Smallest and largest value by the histogram's name."""

Counts = dict[str, np.ndarray]
"""Tokens in each of `NUM_BINS` bins, int64, by the histogram's name."""

Histograms = dict[str, tuple[np.ndarray, np.ndarray]]
"""Counts and edges of the bins, as `numpy.histogram` returns them, by the histogram's name."""


class Comparison(NamedTuple):
    """Comparison of sampled log-probabilities with the trainer's, over some tokens."""

    num_tokens: int
    sum_difference: float
    """Sum of absolute differences, in nats."""
    max_difference: float
    sum_ratio: float
    min_ratio: float
    max_ratio: float


class TokenDistributions:
    """Log-probabilities of tokens, from sampling and from the trainer's forward."""

    def __init__(self) -> None:
        self._sampled: list[np.ndarray] = []
        self._drift: list[np.ndarray] = []

    def add_sampled(self, logprobs_N: Sequence[float] | np.ndarray) -> None:
        self._sampled.append(np.asarray(logprobs_N, dtype=np.float64))

    def add_compared(
        self, sampled_N: Sequence[float] | np.ndarray, trained_N: Sequence[float] | np.ndarray
    ) -> None:
        """Add the drift of tokens: sampled minus the trainer's."""
        sampled_N = np.asarray(sampled_N, dtype=np.float64)
        trained_N = np.asarray(trained_N, dtype=np.float64)
        self._drift.append(sampled_N - trained_N)

    def values(self) -> dict[str, np.ndarray]:
        """Return the finite values by the histogram's name; names without a value are absent."""
        sampled_N = _joined(self._sampled)
        drift_N = _joined(self._drift)
        with np.errstate(over="ignore"):
            ratio_N = np.exp(-drift_N)
        is_compared_N = np.isfinite(drift_N) & np.isfinite(ratio_N)
        named = {
            LOGPROBS: sampled_N[np.isfinite(sampled_N)],
            DRIFT: drift_N[is_compared_N],
            RATIO: ratio_N[is_compared_N],
        }
        return {name: values for name, values in named.items() if len(values)}

    def comparison(self) -> Comparison | None:
        """Return the sums over the compared tokens; None: none was compared."""
        values = self.values()
        if RATIO not in values:
            return None
        difference_N = np.abs(values[DRIFT])
        ratio_N = values[RATIO]
        return Comparison(
            num_tokens=len(ratio_N),
            sum_difference=float(difference_N.sum()),
            max_difference=float(difference_N.max()),
            sum_ratio=float(ratio_N.sum()),
            min_ratio=float(ratio_N.min()),
            max_ratio=float(ratio_N.max()),
        )

    def ranges(self) -> Ranges:
        """Return the smallest and the largest value of each histogram."""
        ranges: Ranges = {}
        for name, values in self.values().items():
            ranges[name] = (float(values.min()), float(values.max()))
        return ranges

    def counts(self, ranges: Ranges) -> Counts:
        """Count the values in the bins of ranges, which may be wider than the values."""
        values = self.values()
        counts: Counts = {}
        for name, extent in ranges.items():
            values_N = values.get(name, np.zeros(0))
            counts[name], _ = np.histogram(values_N, NUM_BINS, extent)
        return counts

    def histograms(self) -> Histograms:
        """Return what `numpy.histogram` makes of the values with `NUM_BINS` bins."""
        ranges = self.ranges()
        return joined_histograms(ranges, [self.counts(ranges)])


def joined_ranges(of_processes: Sequence[Mapping[str, tuple[float, float]]]) -> Ranges:
    """Return the ranges that hold the values of all processes."""
    joined: Ranges = {}
    for ranges in of_processes:
        for name, (low, high) in ranges.items():
            lowest, highest = joined.get(name, (low, high))
            joined[name] = (min(lowest, low), max(highest, high))
    return joined


def joined_histograms(ranges: Ranges, of_processes: Sequence[Counts]) -> Histograms:
    """Return the histograms of the values of all processes, counted in the same bins."""
    histograms: Histograms = {}
    for name, extent in ranges.items():
        counts: Any = sum(counts[name] for counts in of_processes)
        histograms[name] = (counts, np.histogram_bin_edges(np.zeros(0), NUM_BINS, extent))
    return histograms


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
