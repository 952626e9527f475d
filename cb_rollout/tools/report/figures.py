"""Figures of a report: metrics, axes, titles, legends and captions.

A figure whose records are missing is an empty string.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain
from statistics import median

from cb_rollout.metrics.run_records import StepMetrics
from cb_rollout.tools.report.series import (
    GroupKind,
    Quantiles,
    RecordedStep,
    completion_lengths,
    early_and_late,
    group_shares,
    quantiles,
    series,
    shares_by_bin,
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
    histogram_chart,
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

# Fine enough for the shape of a long tail; every bin holds equally many whole numbers.
MAX_BINS = 32

# Title, note, title for screen readers, and what follows a value.
THROUGHPUT = (
    "Throughput",
    "sampled tokens per second of rollout",
    "Tokens per second",
    "tokens/s",
)
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
    figures = (
        learning_figure(metrics),
        groups_figure(metrics),
        length_spread_figure(metrics),
        surprise_figure(metrics, steps),
        staleness_figure(metrics),
        versions_figure(steps),
        curve_figure(metrics, "rollout/tokens_per_second", THROUGHPUT),
        curve_figure(metrics, "rollout/step_share", SHARE, high=1, label=percent),
        drift_figure(metrics),
        curve_figure(metrics, "rollout/router_disagreement", ROUTES, label=percent),
        lengths_figure(metrics),
    )
    return "\n".join(filter(None, figures))


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


def curve_figure(
    metrics: Sequence[StepMetrics],
    key: str,
    texts: tuple[str, str, str, str],
    *,
    high: float | None = None,
    label: Callable[[float], str] = compact,
) -> str:
    """Draw one scalar from 0 on, by step.

    Args:
        metrics: the run's metrics.
        key: the scalar.
        texts: title, note, title for screen readers, and what follows a value when pointed at.
        high: high end of its axis; None: a round number.
        label: format of a value.
    """
    points = series(metrics, key)
    if not points:
        return ""
    title, note, spoken, unit = texts
    chart = curve_chart(
        _filled(points),
        x=step_axis(points),
        y=linear_axis((value for _, value in points), low=0, high=high, num_ticks=4, label=label),
        title=f"{spoken} over {len(points)} steps",
        tips=tips_at(points, lambda value: f"{label(value)} {unit}"),
    )
    return figure(title, note, chart)


def drift_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the largest difference of sampled and recomputed log-probabilities, by step."""
    names = ("against a plain forward", "against the trainer's forward")
    styles = ("a", "b")
    found = [
        (style, name, series(metrics, key))
        for style, name, key in zip(styles, names, DRIFT_KEYS, strict=True)
        if series(metrics, key)
    ]
    if not found:
        return ""
    points = [point for *_, drift in found for point in drift]
    chart = curve_chart(
        [Curve(drift, style, has_dots=len(drift) <= MAX_DOTS) for style, _, drift in found],
        x=step_axis(points),
        y=log_axis((value for _, value in points), floor=DRIFT_FLOOR),
        title=f"Log-probability drift over {len(points)} measurements, logarithmic",
        tips=tips_at(found[-1][2], lambda value: f"{scientific(value)} nats"),
    )
    keys = [(style, name) for style, name, _ in found]
    return figure("Log-probability drift", "largest of a step, nats", chart, keys)


def lengths_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw histograms of the completion lengths of the first and the last third of the steps."""
    lengths = completion_lengths(metrics)
    if not lengths:
        return ""
    early, late = early_and_late(lengths)
    longest = max(*early, *late, 0)
    width = longest // MAX_BINS + 1
    num_bins = longest // width + 1
    x = linear_axis([], low=0, high=num_bins * width, num_ticks=6, is_whole=True)
    named = [("raw", "early", early), ("a", "late", late)] if late else [("a", "all", early)]
    groups = [
        (style, shares_by_bin(group, width=width, num_bins=num_bins)) for style, _, group in named
    ]
    y = linear_axis(
        [share for _, shares in groups for share in shares], low=0, num_ticks=4, label=percent
    )
    chart = histogram_chart(groups, x=x, y=y, title="Histogram of completion lengths in tokens")
    keys = [
        (style, f"{name}, median {median(group):,.0f}" if late else f"median {median(group):,.0f}")
        for style, name, group in named
    ]
    note = "first against last third of the steps, tokens" if late else "tokens"
    return figure("Completion lengths", note, chart, keys)


def figure(
    title: str, note: str, chart: str, keys: Sequence[tuple[str, str]] = (), style: str = ""
) -> str:
    """Put a chart under its title, note and legend; `keys` are pairs of style and name."""
    legend = "".join(
        f'<span class="key {key_style}"><i></i>{escape(text)}</span>' for key_style, text in keys
    )
    return (
        f'<figure class="{style}"><figcaption><h2>{escape(title)}</h2><p>{escape(note)}</p>'
        f'<p class="keys">{legend}</p></figcaption>{chart}</figure>'
    )


def _filled(points: Sequence[Point]) -> list[Curve]:
    if len(points) <= MAX_JAGGED_POINTS:
        return [Curve(points, "a", is_filled=True)]
    return [Curve(points, "raw"), Curve(smoothed(points), "a", is_filled=True)]


def step_axis(points: Sequence[Point]) -> Axis:
    """Return the axis of the steps of `points`."""
    steps = [step for step, _ in points]
    return linear_axis(steps, low=min(steps), high=max(steps), num_ticks=6, is_whole=True)


def tips_at(points: Sequence[Point], text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return the text shown when the pointer is over each step."""
    return [(step, f"step {step:,}: {text(value)}") for step, value in points]
