"""Figures of a report: metrics, axes, titles, legends and captions.

A figure whose metrics are missing is an empty string.
"""

from collections.abc import Callable, Sequence
from html import escape
from statistics import median

from cb_rollout.metrics.run_records import StepMetrics
from cb_rollout.tools.report.series import (
    completion_lengths,
    early_and_late,
    series,
    shares_by_bin,
    smoothed,
)
from cb_rollout.tools.report.svg import (
    Axis,
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


def throughput_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw sampled tokens per second of rollout, by step."""
    speed = series(metrics, "rollout/tokens_per_second")
    if not speed:
        return ""
    chart = curve_chart(
        _filled(speed),
        x=step_axis(speed),
        y=linear_axis((value for _, value in speed), low=0, num_ticks=4),
        title=f"Tokens per second over {len(speed)} steps",
        tips=tips_at(speed, lambda value: f"{compact(value)} tokens/s"),
    )
    return figure("Throughput", "sampled tokens per second of rollout", chart)


def share_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the rollout's share of each step's time."""
    share = series(metrics, "rollout/step_share")
    if not share:
        return ""
    chart = curve_chart(
        _filled(share),
        x=step_axis(share),
        y=linear_axis([], low=0, high=1, num_ticks=4, label=percent),
        title=f"Share of each of {len(share)} steps spent in rollout",
        tips=tips_at(share, lambda value: f"{value:.1%} of the step"),
    )
    return figure("Rollout's share of a step", "of its wall-clock time", chart)


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


def routes_figure(metrics: Sequence[StepMetrics]) -> str:
    """Draw the share of router choices that differ from the rollout's, by step."""
    shares = series(metrics, "rollout/router_disagreement")
    if not shares:
        return ""
    chart = curve_chart(
        _filled(shares),
        x=step_axis(shares),
        y=linear_axis((value for _, value in shares), low=0, num_ticks=4, label=percent),
        title=f"Router choices that differ from the rollout's over {len(shares)} steps",
        tips=tips_at(shares, lambda value: f"{percent(value)} of the choices"),
    )
    return figure("Routes", "router choices that differ from the rollout's, unreplayed", chart)


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
