"""Series of numbers by step, from a run's records: arithmetic only.

Of a step that was recorded several times (by a resumed run, say), the last record counts.
"""

from collections.abc import Sequence

from cb_rollout.metrics.run_records import Mode, StepMetrics
from cb_rollout.tools.report.svg import Point

# A wider window would smooth away the changes of a long run.
MAX_WINDOW = 51


def series(metrics: Sequence[StepMetrics], key: str, mode: Mode = "train") -> list[Point]:
    """Return `(step, value)` of each step with the scalar `key`, by ascending step."""
    values = {
        record.step: record.scalars[key]
        for record in metrics
        if record.mode == mode and key in record.scalars
    }
    return sorted(values.items())


def smoothing_window(num_points: int) -> int:
    """Return the window of `smoothed`: odd, about a twelfth of the points, 1 below 12."""
    return min(MAX_WINDOW, num_points // 12 | 1) if num_points >= 12 else 1


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Replace each value by the mean of the window around it, narrower at the ends."""
    half = smoothing_window(len(points)) // 2
    result = []
    for number, (step, _) in enumerate(points):
        window = points[max(0, number - half) : number + half + 1]
        result.append((step, sum(value for _, value in window) / len(window)))
    return result


def completion_lengths(metrics: Sequence[StepMetrics]) -> dict[int, list[int]]:
    """Return the lengths of training completions, in tokens, by ascending step."""
    lengths = {
        record.step: record.completion_lengths
        for record in metrics
        if record.mode == "train" and record.completion_lengths
    }
    return dict(sorted(lengths.items()))


def early_and_late(lengths: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """Return the lengths of the first and last third of the steps; one step has no last third."""
    steps = list(lengths)
    third = max(1, len(steps) // 3)
    late = steps[-third:] if len(steps) > 1 else []
    return (
        [length for step in steps[:third] for length in lengths[step]],
        [length for step in late for length in lengths[step]],
    )


def shares_by_bin(lengths: Sequence[int], *, width: int, num_bins: int) -> list[float]:
    """Return the share of `lengths` in each bin of `width` whole numbers, from 0 on."""
    counts = [0] * num_bins
    for length in lengths:
        counts[length // width] += 1
    return [count / len(lengths) for count in counts]
