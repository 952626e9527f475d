"""Figures with a spread over steps: reward, lengths, surprise, policy versions, kinds of groups.

A figure whose records are missing is an empty string.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from cb_rollout.metrics.run_records import StepMetrics
from cb_rollout.tools.report.charts import MAX_DOTS, MAX_JAGGED_POINTS, figure, step_axis, tips_at
from cb_rollout.tools.report.series import completion_lengths, series, smoothed, smoothing_window
from cb_rollout.tools.report.summaries import (
    GroupKind,
    Quantiles,
    RecordedStep,
    group_shares,
    quantiles,
)
from cb_rollout.tools.report.svg import (
    Band,
    Curve,
    Point,
    compact,
    curve_chart,
    linear_axis,
    percent,
)

Span = tuple[float, float, float]

GROUP_STYLES = {GroupKind.SOLVED: "a", GroupKind.MIXED: "raw", GroupKind.UNSOLVED: "b"}


def learning_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw training reward by step with its standard deviation, its mean, and evaluation reward."""
    reward = series(metrics, "reward")
    evaluation = series(metrics, "eval_reward", mode="eval")
    if not reward and not evaluation:
        return ""
    points = [*reward, *evaluation]
    spans = reward_spans(metrics)
    deviations = dict(series(metrics, "reward_std"))
    is_smoothed = smoothing_window(len(reward)) > 1
    curves, keys = [Curve(reward, "a")], [("a", "training")]
    if is_smoothed:
        curves = [Curve(reward, "raw"), Curve(smoothed(reward), "a")]
        keys = [("raw", "training step"), ("a", f"mean over {smoothing_window(len(reward))} steps")]
    if evaluation:
        curves.append(Curve(evaluation, "b", has_dots=len(evaluation) <= MAX_DOTS))
        keys.append(("b", "evaluation"))
    tips = [
        (
            step,
            f"step {step:,}: reward {compact(value)}"
            + (f" +- {compact(deviations[step])}" if step in deviations else ""),
        )
        for step, value in reward
    ]
    chart = curve_chart(
        curves,
        x=step_axis(points),
        y=linear_axis([*(value for _, value in points), *_bounds(spans)]),
        title=f"Reward over {len(points)} steps",
        tips=tips or tips_at(evaluation, lambda value: f"reward {compact(value)}"),
        bands=[Band(spans, "a")],
    )
    note = "mean of each step; band: one standard deviation" if spans else "mean of each step"
    return figure("Reward", note, chart, keys, style="wide")


def length_spread_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the median length of each step's completions, and their 10th to 90th percentile."""
    spread = length_spread(metrics)
    return _spread_figure(
        spread, "Length of completions", "median of each step and 10th to 90th percentile, tokens"
    )


def surprise_figure(metrics: Sequence[StepMetrics], steps: Mapping[int, RecordedStep]) -> str:
    """Draw the entropy in the loss, and the surprise of the recorded sequences with its spread."""
    spread = {step: quantiles(found.surprises) for step, found in steps.items() if found.surprises}
    return _spread_figure(
        spread,
        "Surprise and entropy",
        "nats a token; surprise: minus the recorded sequences' mean log-probability",
        other=("entropy in the loss", series(metrics, "entropy")),
    )


def versions_figure(steps: Mapping[int, RecordedStep]) -> str:
    """Draw the oldest and the newest policy version of each step's recorded tokens."""
    found = [(step, *recorded.versions) for step, recorded in steps.items() if recorded.versions]
    spans = [(step, float(oldest), float(newest)) for step, oldest, newest in found]
    if not spans:
        return ""
    newest = [(step, high) for step, _, high in spans]
    chart = curve_chart(
        [Curve(newest, "a")],
        x=step_axis(newest),
        y=linear_axis(_bounds(spans), num_ticks=4),
        title=f"Policy versions over {len(spans)} steps",
        tips=[
            (step, f"step {step:,}: versions {low:,.0f} to {high:,.0f}")
            for step, low, high in spans
        ],
        bands=[Band(spans, "a")],
    )
    return figure("Policy versions", "oldest to newest of the recorded tokens", chart)


def staleness_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the mean and the largest staleness of a step's tokens."""
    names = "rollout/staleness_mean", "rollout/staleness_max"
    mean, largest = (series(metrics, name) for name in names)
    if not mean:
        return ""
    chart = curve_chart(
        [Curve(largest, "raw"), Curve(mean, "a")],
        x=step_axis(mean),
        y=linear_axis([value for _, value in (*mean, *largest)], low=0, num_ticks=4),
        title=f"Staleness over {len(mean)} steps",
        tips=tips_at(mean, lambda value: f"mean {compact(value)} versions"),
    )
    keys = [("a", "mean"), ("raw", "largest")]
    return figure("Staleness", "policy versions from sampling to training", chart, keys)


def groups_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the shares of solved, mixed and unsolved groups, on top of each other."""
    shares = group_shares(metrics)
    if not shares:
        return ""
    bands, floor = [], dict.fromkeys(shares, 0.0)
    for kind, style in GROUP_STYLES.items():
        top = {step: floor[step] + found[kind] for step, found in shares.items()}
        bands.append(Band([(step, floor[step], top[step]) for step in shares], f"{style} solid"))
        floor = top
    tips = [
        (step, f"step {step:,}: " + ", ".join(f"{percent(found[k])} {k}" for k in GROUP_STYLES))
        for step, found in shares.items()
    ]
    chart = curve_chart(
        [],
        x=step_axis([(step, 0.0) for step in shares]),
        y=linear_axis([], low=0, high=1, num_ticks=4, label=percent),
        title=f"Solved and unsolved groups over {len(shares)} steps",
        tips=tips,
        bands=bands,
    )
    note = "solved: the run's highest reward throughout; mixed: rewards differ"
    return figure("Groups", note, chart, [(style, kind) for kind, style in GROUP_STYLES.items()])


def reward_spans(metrics: Sequence[StepMetrics]) -> list[Span]:
    """Return reward less and plus its standard deviation, smoothed as the curve is."""
    deviations = dict(series(metrics, "reward_std"))
    reward = [(step, value) for step, value in series(metrics, "reward") if step in deviations]
    low = smoothed([(step, value - deviations[step]) for step, value in reward])
    high = smoothed([(step, value + deviations[step]) for step, value in reward])
    return [(step, below, above) for (step, below), (_, above) in zip(low, high, strict=True)]


def length_spread(metrics: Sequence[StepMetrics]) -> dict[int, Quantiles]:
    """Return the quantiles of the completion lengths, by ascending step."""
    return {step: quantiles(found) for step, found in completion_lengths(metrics).items()}


def _spread_figure(
    spread: Mapping[int, Quantiles],
    title: str,
    note: str,
    other: tuple[str, Sequence[Point]] = ("", ()),
) -> str:
    name, second = other
    if not spread and not second:
        return ""
    spans = quantile_spans(spread)
    middle = [(step, found.middle) for step, found in spread.items()]
    points = [*middle, *second]
    curves = [Curve(middle, "a")]
    if len(middle) > MAX_JAGGED_POINTS:
        curves = [Curve(middle, "raw"), Curve(smoothed(middle), "a")]
    keys = [("a", "median, 10th to 90th percentile")] if spread else []
    tips = [
        (step, f"step {step:,}: {compact(q.middle)} ({compact(q.low)} to {compact(q.high)})")
        for step, q in spread.items()
    ]
    if second:
        curves.append(Curve(smoothed(second) if len(second) > MAX_JAGGED_POINTS else second, "b"))
        keys.append(("b", name))
    chart = curve_chart(
        curves,
        x=step_axis(points),
        y=linear_axis([*(value for _, value in points), *_bounds(spans)], low=0, num_ticks=4),
        title=f"{title} over {len(points)} steps",
        tips=tips or tips_at(second, lambda value: f"{name} {compact(value)}"),
        bands=[Band(spans, "a")],
    )
    return figure(title, note, chart, keys if second else ())


def quantile_spans(spread: Mapping[int, Quantiles]) -> list[Span]:
    """Return the 10th and 90th percentile of each step."""
    return [(step, found.low, found.high) for step, found in spread.items()]


def _bounds(spans: Sequence[Span]) -> list[float]:
    return list(chain.from_iterable((low, high) for _, low, high in spans))
