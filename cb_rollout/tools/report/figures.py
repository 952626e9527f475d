"""Figures of a report: numbers by step, each drawn for one run or for two, and what they show.

A panel whose records are missing is an empty string. Of a step that was recorded several times (by
a resumed run, say), the last metrics count. Every function is pure.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from cb_rollout.metrics.run_records import Mode, StepMetrics
from cb_rollout.tools.report import svg
from cb_rollout.tools.report.svg import Point, Span

Metrics = Sequence[StepMetrics]

T = TypeVar("T", Point, Span)

# The verification against a plain forward first; TRL's own difference is recorded on more steps.
DRIFT_KEYS = ("rollout/logprob_drift_max", "sampling/sampling_logp_difference/max")

# Below the resolution of a float32 log-probability; drawn as zero, which a log axis cannot show.
DRIFT_FLOOR = 1e-9

# A wider window would smooth away the changes of a long run.
MAX_WINDOW = 51

# Of two curves: those of a panel, or those of two runs.
STYLES = ("a", "b")

# Steps at each end of a run that are looked at.
WINDOW = 10

# A drift that grows by less, or is smaller in nats, may be rounding on other tokens.
DRIFT_GROWTH, LEAST_DRIFT = 4.0, 1e-3

# Metrics, the mean of the last steps from which each is more than chance, and what to do.
PATTERNS = (
    (
        *("frac_reward_zero_std", 0.5),
        "{:.0%} of the groups have equal rewards, and train nothing. Take easier or harder "
        "prompts, a finer reward, or the strategy DynamicSampling.",
    ),
    (
        *("completions/clipped_ratio", 0.3),
        "{:.0%} of the completions end by their length. Raise max_completion_length, or reward "
        "short answers.",
    ),
    (
        *("rollout/preemptions", 0.1),
        "The KV cache is full: {:.1f} preemptions a step. Raise max_memory_percent or num_blocks, "
        "or lower max_requests_per_batch.",
    ),
    (
        *("rollout/step_share", 0.8),
        "Rollouts take {:.0%} of a step. Longer completions cost most: look at the spread of "
        "lengths, and at OverSampling.",
    ),
)


def series(metrics: Metrics, key: str, mode: Mode = "train") -> list[Point]:
    """Return `(step, value)` of each step with the scalar `key`, by ascending step."""
    values = {
        record.step: record.scalars[key]
        for record in metrics
        if record.mode == mode and key in record.scalars
    }
    return sorted(values.items())


def reward_spread(metrics: Metrics) -> list[Span]:
    """Return the mean reward less and plus its standard deviation, by ascending step."""
    deviations = dict(series(metrics, "reward_std"))
    reward = series(metrics, "reward")
    return [(s, x - deviations[s], x + deviations[s]) for s, x in reward if s in deviations]


def length_spread(metrics: Metrics) -> list[Span]:
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


def group_share(metrics: Metrics, *, solved: bool) -> list[Point]:
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


def smoothed(points: Sequence[T]) -> list[T]:
    """Replace each value of a step by the mean of the window around it, narrower at the ends."""
    smooth: list[Any] = []
    half = smoothing_window(len(points)) // 2
    for place, (step, *_) in enumerate(points):
        _, *values = zip(*points[max(0, place - half) : place + half + 1], strict=True)
        smooth.append((step, *(sum(window) / len(window) for window in values)))
    return smooth


class Panel(NamedTuple):
    """A curve by step, and what else a figure shows."""

    title: str
    note: str
    curve: Callable[[Metrics], list[Point]]
    """Compared between two runs."""
    label: Callable[[float], str] = svg.compact
    other: tuple[str, str, Callable[[Metrics], list[Point]]] | None = None
    """Names of the curve and of a second one, which a single run has beside it."""
    spread: Callable[[Metrics], list[Span]] | None = None
    low: float | None = 0
    """The axis' low end; None: the values'."""
    is_log: bool = False
    style: str = ""


def _scalar(key: str) -> Callable[[Metrics], list[Point]]:
    return partial(series, key=key, mode="eval" if key.startswith("eval_") else "train")


PANELS = (
    Panel("Reward", "mean of each step; band: one standard deviation", _scalar("reward"),
          other=("training", "evaluation", _scalar("eval_reward")), spread=reward_spread, low=None,
          style="wide"),
    Panel("Groups", "share whose rewards differ; solved: all have the run's highest reward",
          partial(group_share, solved=False), svg.percent,
          ("rewards differ", "solved", partial(group_share, solved=True))),
    Panel("Length of completions", "mean of each step, tokens; band: 10th to 90th percentile",
          _scalar("completions/mean_length"), spread=length_spread),
    Panel("Entropy", "in the loss, nats a token", _scalar("entropy")),
    Panel("Staleness", "policy versions from sampling to training",
          _scalar("rollout/staleness_mean"),
          other=("mean", "largest", _scalar("rollout/staleness_max"))),
    Panel("Throughput", "sampled tokens per second of rollout",
          _scalar("rollout/tokens_per_second")),
    Panel("Rollout's share of a step", "of its wall-clock time", _scalar("rollout/step_share"),
          svg.percent),
    Panel("Log-probability drift", "largest of a step, nats", _scalar(DRIFT_KEYS[0]),
          svg.scientific,
          ("against a plain forward", "against the trainer's forward", _scalar(DRIFT_KEYS[1])),
          is_log=True),
    Panel("Routes", "router choices that differ from the rollout's, unreplayed",
          _scalar("rollout/router_disagreement"), svg.percent),
)  # fmt: skip


def figures_html(runs: Mapping[str, Metrics]) -> str:
    """Return the figures of one run, or of two by their names."""
    return "\n".join(filter(None, (_figure(panel, runs) for panel in PANELS)))


def _figure(panel: Panel, runs: Mapping[str, Metrics]) -> str:
    first = next(iter(runs.values()))
    lines = [(name, panel.curve(metrics)) for name, metrics in runs.items()]
    if len(runs) == 1:
        name, other_name, other = panel.other or ("", "", lambda _: [])
        lines = [(name, lines[0][1]), (other_name, other(first))]
    drawn = [(style, *line) for style, line in zip(STYLES, lines, strict=True) if line[1]]
    if not drawn:
        return ""
    spans = [panel.spread(metrics) if panel.spread else [] for metrics in runs.values()]
    # There are styles for two runs; one run has a single band.
    bands = [(style, smoothed(x)) for style, x in zip(STYLES, spans, strict=False) if x]
    # A second curve of one run is as it was recorded: its largest values matter.
    curves = [
        (style, points if len(runs) == 1 and style == "b" else smoothed(points))
        for style, _, points in drawn
    ]
    keys = [(style, name) for style, name, _ in drawn] if len(runs) + len(drawn) > 2 else []
    if len(runs) == 1 and (window := smoothing_window(len(lines[0][1]))) > 1:
        curves.insert(0, ("raw", lines[0][1]))
        keys += [("raw", f"each step; the line: mean over {window}")]
    around = {
        step: f" ({panel.label(low)} to {panel.label(high)})"
        for step, low, high in (spans[0] if len(runs) == 1 else ())
    }
    tips = [
        (step, f"step {step:,}: {panel.label(value)}{around.get(step, '')}")
        for step, value in drawn[0][2]
    ]
    points = [point for _, line in (*curves, *bands) for point in line]
    steps, values = [x[0] for x in points], [value for _, *values in points for value in values]
    x = svg.linear_axis(steps, low=min(steps), high=max(steps), num_ticks=6, is_whole=True)
    y = svg.linear_axis(values, low=panel.low, num_ticks=4, label=panel.label)
    if panel.is_log:
        y = svg.log_axis(values, floor=DRIFT_FLOOR)
    chart = svg.curve_chart(curves, bands, tips, x=x, y=y, title=panel.title)
    legend = "".join(f'<span class="key {s}"><i></i>{escape(text)}</span>' for s, text in keys)
    return (
        f'<figure class="{panel.style}"><figcaption><h2>{escape(panel.title)}</h2>'
        f'<p>{escape(panel.note)}</p><p class="keys">{legend}</p></figcaption>{chart}</figure>'
    )


def advice(metrics: Metrics) -> Iterator[str]:
    """Yield a sentence or two about each known pattern in the last steps of a run."""
    for key in DRIFT_KEYS:
        drift = [value for _, value in series(metrics, key)]
        if len(drift) >= 2 * WINDOW:
            first, last = statistics.median(drift[:WINDOW]), statistics.median(drift[-WINDOW:])
            if last > max(LEAST_DRIFT, DRIFT_GROWTH * first):
                change = f"{svg.compact(first)} nats at first, {svg.compact(last)} now"
                yield f"{key} grows: {change}. cb-rollout audit names the cause."
    for key, least, sentence in PATTERNS:
        values = [value for _, value in series(metrics, key)[-WINDOW:]]
        if values and statistics.fmean(values) >= least:
            yield sentence.format(statistics.fmean(values))
