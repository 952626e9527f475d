"""Figures of a report: metrics, axes, titles, legends and captions.

A figure whose records are missing is an empty string.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain
from typing import Any

from cb_rollout.metrics.run_records import StepMetrics
from cb_rollout.tools.report.series import (
    GroupKind,
    Quantiles,
    RecordedStep,
    completion_lengths,
    group_shares,
    quantiles,
    series,
    smoothed,
    smoothing_window,
)
from cb_rollout.tools.report.svg import (
    Axis,
    Band,
    Curve,
    Point,
    compact,
    curve_chart,
    linear_axis,
    log_axis,
    percent,
    scientific,
)

Span = tuple[float, float, float]

# The verification against a plain forward first; TRL's own difference is recorded on more steps.
DRIFT_KEYS = ("rollout/logprob_drift_max", "sampling/sampling_logp_difference/max")

# Below the resolution of a float32 log-probability; drawn as zero, which a log axis cannot show.
DRIFT_FLOOR = 1e-9

# More dots hide their line.
MAX_DOTS = 30

# A line of more points looks like a band, so its moving mean is drawn over it.
MAX_JAGGED_POINTS = 300

# Title, note, title for screen readers, and what follows a value.
THROUGHPUT = ("Throughput", "sampled tokens per second of rollout", "Tokens per second", "tokens/s")
SHARE = ("Rollout's share of a step", "of its wall-clock time", "Share of rollout", "of the step")
ROUTES = (
    "Routes",
    "router choices that differ from the rollout's, unreplayed",
    "Router choices that differ from the rollout's",
    "of the choices",
)

GROUP_STYLES = {GroupKind.SOLVED: "a", GroupKind.MIXED: "raw", GroupKind.UNSOLVED: "b"}


def figures_html(metrics: Sequence[StepMetrics], steps: Mapping[int, RecordedStep]) -> str:
    """Return every figure of a run, in order; `steps`: summaries of its recorded sequences."""
    surprise = {step: quantiles(x.surprises) for step, x in steps.items() if x.surprises}
    figures = (
        _learning_figure(metrics),
        _groups_figure(metrics),
        _spread_figure(
            _length_spread(metrics),
            "Length of completions",
            "median of each step and 10th to 90th percentile, tokens",
        ),
        _spread_figure(
            surprise,
            "Surprise and entropy",
            "nats a token; surprise: minus the recorded sequences' mean log-probability",
            other=("entropy in the loss", series(metrics, "entropy")),
        ),
        _staleness_figure(metrics),
        _curve_figure(metrics, "rollout/tokens_per_second", THROUGHPUT),
        _curve_figure(metrics, "rollout/step_share", SHARE, high=1, label=percent),
        _drift_figure(metrics),
        _curve_figure(metrics, "rollout/router_disagreement", ROUTES, label=percent),
    )
    return "\n".join(filter(None, figures))


def _learning_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw training reward by step with its standard deviation, its mean, and evaluation reward."""
    reward = series(metrics, "reward")
    evaluation = series(metrics, "eval_reward", mode="eval")
    spans = reward_spans(metrics)
    deviations = dict(series(metrics, "reward_std"))
    curves, keys = [Curve(reward, "a")], [("a", "training")]
    if (window := smoothing_window(len(reward))) > 1:
        curves = [Curve(reward, "raw"), Curve(smoothed(reward), "a")]
        keys = [("raw", "training step"), ("a", f"mean over {window} steps")]
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
    return steps_figure(
        "Reward",
        "mean of each step; band: one standard deviation" if spans else "mean of each step",
        curves,
        spoken=f"Reward over {len(reward) + len(evaluation)} steps",
        tips=tips or tips_at(evaluation, lambda value: f"reward {compact(value)}"),
        bands=[Band(spans, "a")],
        keys=keys,
        style="wide",
    )


def _staleness_figure(metrics: Sequence[StepMetrics]) -> str:
    mean = series(metrics, "rollout/staleness_mean")
    return steps_figure(
        "Staleness",
        "policy versions from sampling to training",
        [Curve(series(metrics, "rollout/staleness_max"), "raw"), Curve(mean, "a")],
        spoken=f"Staleness over {len(mean)} steps",
        tips=tips_at(mean, lambda value: f"mean {compact(value)} versions"),
        keys=[("a", "mean"), ("raw", "largest")],
        low=0,
        num_ticks=4,
    )


def _groups_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the shares of solved, mixed and unsolved groups, on top of each other."""
    shares = group_shares(metrics)
    bands, floor = [], dict.fromkeys(shares, 0.0)
    for kind, style in GROUP_STYLES.items():
        top = {step: floor[step] + by_kind[kind] for step, by_kind in shares.items()}
        bands.append(Band([(step, floor[step], top[step]) for step in shares], f"{style} solid"))
        floor = top
    return steps_figure(
        "Groups",
        "solved: the run's highest reward throughout; mixed: rewards differ",
        [],
        spoken=f"Solved and unsolved groups over {len(shares)} steps",
        tips=[
            (step, f"step {step:,}: " + ", ".join(f"{percent(x[k])} {k}" for k in GROUP_STYLES))
            for step, x in shares.items()
        ],
        bands=bands,
        keys=[(style, kind) for kind, style in GROUP_STYLES.items()],
        low=0,
        high=1,
        num_ticks=4,
        label=percent,
    )


def reward_spans(metrics: Sequence[StepMetrics]) -> list[Span]:
    """Return reward less and plus its standard deviation, smoothed as the curve is."""
    deviations = dict(series(metrics, "reward_std"))
    reward = [(step, value) for step, value in series(metrics, "reward") if step in deviations]
    low = smoothed([(step, value - deviations[step]) for step, value in reward])
    high = smoothed([(step, value + deviations[step]) for step, value in reward])
    return [(step, below, above) for (step, below), (_, above) in zip(low, high, strict=True)]


def length_spans(metrics: Sequence[StepMetrics]) -> list[Span]:
    """Return the 10th and the 90th percentile of the completion lengths, by ascending step."""
    return _spread_spans(_length_spread(metrics))


def _length_spread(metrics: Sequence[StepMetrics]) -> dict[int, Quantiles]:
    return {step: quantiles(lengths) for step, lengths in completion_lengths(metrics).items()}


def _spread_spans(spread: Mapping[int, Quantiles]) -> list[Span]:
    return [(step, x.low, x.high) for step, x in spread.items()]


def _spread_figure(
    spread: Mapping[int, Quantiles],
    title: str,
    note: str,
    other: tuple[str, Sequence[Point]] = ("", ()),
) -> str:
    """Draw the median of each step and its spread, and beside them a named scalar."""
    name, second = other
    middle = [(step, x.middle) for step, x in spread.items()]
    curves = _with_mean(middle)
    keys = [("a", "median, 10th to 90th percentile")] if spread else []
    tips = [
        (step, f"step {step:,}: {compact(q.middle)} ({compact(q.low)} to {compact(q.high)})")
        for step, q in spread.items()
    ]
    if second:
        curves.append(Curve(smoothed(second) if len(second) > MAX_JAGGED_POINTS else second, "b"))
        keys.append(("b", name))
    return steps_figure(
        title,
        note,
        curves,
        spoken=f"{title} over {len(middle) + len(second)} steps",
        tips=tips or tips_at(second, lambda value: f"{name} {compact(value)}"),
        bands=[Band(_spread_spans(spread), "a")],
        keys=keys if second else (),
        low=0,
        num_ticks=4,
    )


def _curve_figure(
    metrics: Sequence[StepMetrics],
    key: str,
    texts: tuple[str, str, str, str],
    *,
    high: float | None = None,
    label: Callable[[float], str] = compact,
) -> str:
    """Draw a scalar from 0 on, by step; `texts` are those of `THROUGHPUT`."""
    points = series(metrics, key)
    title, note, spoken, unit = texts
    return steps_figure(
        title,
        note,
        _with_mean(points, is_filled=True),
        spoken=f"{spoken} over {len(points)} steps",
        tips=tips_at(points, lambda value: f"{label(value)} {unit}"),
        low=0,
        high=high,
        num_ticks=4,
        label=label,
    )


def _drift_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the largest difference of sampled and recomputed log-probabilities, by step."""
    names = ("against a plain forward", "against the trainer's forward")
    drifts = [
        (style, name, points)
        for style, name, key in zip("ab", names, DRIFT_KEYS, strict=True)
        if (points := series(metrics, key))
    ]
    if not drifts:
        return ""
    values = [value for *_, points in drifts for _, value in points]
    return steps_figure(
        "Log-probability drift",
        "largest of a step, nats",
        [Curve(points, style, has_dots=len(points) <= MAX_DOTS) for style, _, points in drifts],
        spoken=f"Log-probability drift over {len(values)} measurements, logarithmic",
        tips=tips_at(drifts[-1][2], lambda value: f"{scientific(value)} nats"),
        keys=[(style, name) for style, name, _ in drifts],
        y=log_axis(values, floor=DRIFT_FLOOR),
    )


def steps_figure(
    title: str,
    note: str,
    curves: Sequence[Curve],
    *,
    spoken: str,
    tips: Sequence[tuple[float, str]],
    bands: Sequence[Band] = (),
    keys: Sequence[tuple[str, str]] = (),
    style: str = "",
    y: Axis | None = None,
    **axis: Any,
) -> str:
    """Draw curves and bands by step, under a title, a note and a legend; empty without `tips`.

    `spoken` is the title for screen readers, `keys` are pairs of style and name. Without a `y`
    axis, a linear axis is made of all values, with the arguments `axis`.
    """
    if not tips:
        return ""
    drawn = [*chain(*(x.points for x in curves)), *chain(*(x.spans for x in bands))]
    steps = [step for step, *_ in drawn]
    x = linear_axis(steps, low=min(steps), high=max(steps), num_ticks=6, is_whole=True)
    y = y or linear_axis([value for _, *values in drawn for value in values], **axis)
    chart = curve_chart(curves, x=x, y=y, title=spoken, tips=tips, bands=bands)
    legend = "".join(
        f'<span class="key {key_style}"><i></i>{escape(text)}</span>' for key_style, text in keys
    )
    return (
        f'<figure class="{style}"><figcaption><h2>{escape(title)}</h2><p>{escape(note)}</p>'
        f'<p class="keys">{legend}</p></figcaption>{chart}</figure>'
    )


def _with_mean(points: Sequence[Point], *, is_filled: bool = False) -> list[Curve]:
    """Return a curve, or where it would be too jagged, a raw curve and its moving mean."""
    if len(points) <= MAX_JAGGED_POINTS:
        return [Curve(points, "a", is_filled=is_filled)]
    return [Curve(points, "raw"), Curve(smoothed(points), "a", is_filled=is_filled)]


def tips_at(points: Sequence[Point], text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return the text shown when the pointer is over each step."""
    return [(step, f"step {step:,}: {text(value)}") for step, value in points]
