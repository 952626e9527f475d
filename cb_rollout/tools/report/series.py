"""Numbers by step, from a run's records: scalars, lengths, groups, recorded sequences.

Own the arithmetic between records and figures; draw nothing. Of a step that was recorded several
times (by a resumed run, say), the last metrics count. Every function is pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from cb_rollout.metrics.run_records import Mode, SequenceRecord, StepMetrics
from cb_rollout.tools.report.svg import Point

# A wider window would smooth away the changes of a long run.
MAX_WINDOW = 51

QUANTILES = (0.1, 0.5, 0.9)


class Quantiles(NamedTuple):
    """The 10th percentile, the median and the 90th percentile of some values."""

    low: float
    middle: float
    high: float


class GroupKind(StrEnum):
    """Kind of a group: its rewards against the highest reward of the run."""

    SOLVED = "solved"
    """Each completion has the highest reward."""
    MIXED = "mixed"
    """Rewards differ, so that the group has advantages."""
    UNSOLVED = "unsolved"
    """All rewards are equal, and lower."""


@dataclass(slots=True)
class RecordedStep:
    """Summary of the recorded training sequences of a step, and of the tokens of all."""

    num_sequences: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    """Minus the mean log-probability of each training sequence's sampled tokens, in nats."""

    def add(self, sequence: SequenceRecord) -> None:
        self.num_sequences += 1
        self.num_tokens += len(sequence.tokens)
        if sequence.mode != "train":
            return
        if sequence.reward is not None:
            self.rewards.append(sequence.reward)
        # The loss leaves out what a tool wrote; its log-probability is not a sampled one.
        counted = sequence.mask if any(sequence.mask) else [1] * len(sequence.logprobs)
        finite = [
            value
            for value, is_counted in zip(sequence.logprobs, counted, strict=False)
            if is_counted and math.isfinite(value)
        ]
        if finite:
            self.surprises.append(-sum(finite) / len(finite))


def recorded_steps(sequences: Iterable[SequenceRecord]) -> dict[int, RecordedStep]:
    """Return the summary of each step, by ascending step; holds no sequence."""
    steps: dict[int, RecordedStep] = {}
    for sequence in sequences:
        steps.setdefault(sequence.step, RecordedStep()).add(sequence)
    return dict(sorted(steps.items()))


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return three quantiles by linear interpolation, as numpy does."""
    ordered = sorted(values)

    def quantile(share: float) -> float:
        rank = share * (len(ordered) - 1)
        below, above = math.floor(rank), math.ceil(rank)
        return ordered[below] + (rank - below) * (ordered[above] - ordered[below])

    return Quantiles(*map(quantile, QUANTILES))


def group_shares(metrics: Sequence[StepMetrics]) -> dict[int, dict[GroupKind, float]]:
    """Return the share of each kind of group, by ascending step; empty: not recorded.

    Groups with a missing reward are not counted.
    """
    groups = {
        record.step: [group for group in record.group_rewards if all(map(math.isfinite, group))]
        for record in metrics
        if record.mode == "train" and record.group_rewards
    }
    rewards = chain.from_iterable(chain.from_iterable(groups.values()))
    highest = max(rewards, default=0.0)
    return {
        step: {
            kind: sum(group_kind(group, highest) is kind for group in found) / len(found)
            for kind in GroupKind
        }
        for step, found in sorted(groups.items())
        if found
    }


def group_kind(rewards: Sequence[float], highest: float) -> GroupKind:
    """Return the kind of a group, given the highest reward of the run."""
    if min(rewards) != max(rewards):
        return GroupKind.MIXED
    return GroupKind.SOLVED if rewards[0] == highest else GroupKind.UNSOLVED


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
    half, values = smoothing_window(len(points)) // 2, [value for _, value in points]
    windows = (values[max(0, n - half) : n + half + 1] for n in range(len(points)))
    return [
        (step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)
    ]


def completion_lengths(metrics: Sequence[StepMetrics]) -> dict[int, list[int]]:
    """Return the lengths of training completions, in tokens, by ascending step."""
    lengths = {
        record.step: record.completion_lengths
        for record in metrics
        if record.mode == "train" and record.completion_lengths
    }
    return dict(sorted(lengths.items()))
