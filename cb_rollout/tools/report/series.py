"""Numbers by step, from a run's records: scalars, spreads, groups, recorded sequences.

Own the arithmetic between records and figures; draw nothing. Of a step that was recorded several
times (by a resumed run, say), the last metrics count. Every function is pure.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cb_rollout.metrics.run_records import Mode, SequenceRecord, StepMetrics
from cb_rollout.tools.report.svg import Point, Span

# A wider window would smooth away the changes of a long run.
MAX_WINDOW = 51


@dataclass(slots=True)
class RecordedStep:
    """Summary of the recorded sequences of a step."""

    num_sequences: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of the training sequences."""

    def add(self, sequence: SequenceRecord) -> None:
        self.num_sequences += 1
        self.num_tokens += len(sequence.tokens)
        if sequence.mode == "train" and sequence.reward is not None:
            self.rewards.append(sequence.reward)


def recorded_steps(sequences: Iterable[SequenceRecord]) -> dict[int, RecordedStep]:
    """Return the summary of each step, by ascending step; holds no sequence."""
    steps: dict[int, RecordedStep] = {}
    for sequence in sequences:
        steps.setdefault(sequence.step, RecordedStep()).add(sequence)
    return dict(sorted(steps.items()))


def series(metrics: Sequence[StepMetrics], key: str, mode: Mode = "train") -> list[Point]:
    """Return `(step, value)` of each step with the scalar `key`, by ascending step."""
    values = {
        record.step: record.scalars[key]
        for record in metrics
        if record.mode == mode and key in record.scalars
    }
    return sorted(values.items())


def reward_spread(metrics: Sequence[StepMetrics]) -> list[Span]:
    """Return the mean reward less and plus its standard deviation, by ascending step."""
    deviations = dict(series(metrics, "reward_std"))
    reward = series(metrics, "reward")
    return [(s, x - deviations[s], x + deviations[s]) for s, x in reward if s in deviations]


def length_spread(metrics: Sequence[StepMetrics]) -> list[Span]:
    """Return the 10th and the 90th percentile of completion lengths, by ascending step."""
    lengths = {x.step: x.completion_lengths for x in metrics if x.mode == "train"}
    spans = []
    for step, values in sorted(lengths.items()):
        if values:
            # Python 3.11 has no quantiles of a single value.
            several = values if len(values) > 1 else values * 2
            low, *_, high = statistics.quantiles(several, n=10, method="inclusive")
            spans.append((step, low, high))
    return spans


def group_share(metrics: Sequence[StepMetrics], *, solved: bool) -> list[Point]:
    """Return the share of groups whose rewards differ, or of solved ones, by ascending step.

    Of a solved group each completion has the run's highest reward. Groups with a missing reward are
    not counted.
    """
    groups = {
        x.step: [group for group in x.group_rewards if all(map(math.isfinite, group))]
        for x in metrics
        if x.mode == "train" and x.group_rewards
    }
    highest = max(chain.from_iterable(chain.from_iterable(groups.values())), default=0.0)

    def counts(group: Sequence[float]) -> bool:
        return min(group) == highest if solved else min(group) != max(group)

    return [
        (s, sum(map(counts, found)) / len(found)) for s, found in sorted(groups.items()) if found
    ]


def smoothing_window(num_points: int) -> int:
    """Return the window of `smoothed`: odd, about a twelfth of the points, 1 below 24."""
    return min(MAX_WINDOW, num_points // 12 | 1)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Replace each value by the mean of the window around it, narrower at the ends."""
    half, values = smoothing_window(len(points)) // 2, [value for _, value in points]
    windows = (values[max(0, n - half) : n + half + 1] for n in range(len(points)))
    return [
        (step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)
    ]
