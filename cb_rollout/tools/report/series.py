"""Numbers over steps, taken out of the records: arithmetic only.

A step that was recorded more than once (a resumed run, a log at its end) counts once, as it was
recorded last.
"""

from collections.abc import Sequence

from cb_rollout.metrics.run_records import Mode, StepMetrics
from cb_rollout.tools.report.svg import Point

MAX_WINDOW = 51
# Beyond this a long run's curve would hide what happened within it.


def series(metrics: Sequence[StepMetrics], key: str, mode: Mode = "train") -> list[Point]:
    """`(step, value)` for each step that has the scalar `key`, by ascending step."""
    values = {
        record.step: record.scalars[key]
        for record in metrics
        if record.mode == mode and key in record.scalars
    }
    return sorted(values.items())


def smoothing_window(num_points: int) -> int:
    """Over how many points `smoothed` averages: odd, about a twelfth of them, 1 below 12."""
    return min(MAX_WINDOW, num_points // 12 | 1) if num_points >= 12 else 1


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Each value replaced by the mean of the window around it, narrower at the ends."""
    half = smoothing_window(len(points)) // 2
    result = []
    for number, (step, _) in enumerate(points):
        window = points[max(0, number - half) : number + half + 1]
        result.append((step, sum(value for _, value in window) / len(window)))
    return result


def completion_lengths(metrics: Sequence[StepMetrics]) -> dict[int, list[int]]:
    """The sampled tokens of each training completion, by ascending step."""
    lengths = {
        record.step: record.completion_lengths
        for record in metrics
        if record.mode == "train" and record.completion_lengths
    }
    return dict(sorted(lengths.items()))


def early_and_late(lengths: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """The lengths of the first and the last third of the steps; no last third of one step."""
    steps = list(lengths)
    third = max(1, len(steps) // 3)
    late = steps[-third:] if len(steps) > 1 else []
    return (
        [length for step in steps[:third] for length in lengths[step]],
        [length for step in late for length in lengths[step]],
    )


def shares_by_bin(lengths: Sequence[int], *, width: int, num_bins: int) -> list[float]:
    """Which share of `lengths` falls into each bin of `width` whole numbers, from 0 on."""
    counts = [0] * num_bins
    for length in lengths:
        counts[length // width] += 1
    return [count / len(lengths) for count in counts]
