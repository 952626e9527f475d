"""Figures of a report: numbers by step, each drawn for one run or for two, and what they show.

A panel whose records are missing is an empty string. If a step was recorded several times (by a
resumed run, say), the last metrics count. Every function is pure.
"""

import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from cb_rollout.metrics.run_records import Mode, StepMetrics
from cb_rollout.tools.report import svg
from cb_rollout.tools.report.svg import Point, Span

Metrics = Sequence[StepMetrics]

T = TypeVar("T", Point, Span)

# First the verification against a plain forward; TRL's own difference is recorded on more steps.
DRIFT_KEYS = ("rollout/logprob_drift_max", "sampling/sampling_logp_difference/max")

# Below the resolution of a float32 log-probability; drawn as zero, which a log axis cannot show.
DRIFT_FLOOR = 1e-9

# A wider window would smooth away the changes of a long run.
MAX_WINDOW = 51

# A metric of one reward function, under TRL's name.
_REWARD_FUNCTION = re.compile(r"rewards/(.+)/mean")

# Styles of two curves: those of a panel, or those of two runs.
STYLES = ("a", "b")

# Number of steps to examine at each end of a run.
WINDOW = 10

# A drift that grows by a smaller factor, or is smaller in nats, may be rounding on other tokens.
DRIFT_GROWTH = 4.0
LEAST_DRIFT = 1e-3


class Pattern(NamedTuple):
    """A metric that calls for advice when its mean over the last steps reaches a threshold."""

    key: str
    threshold: float
    """From this mean on, the pattern is unlikely to be chance."""
    sentence: str
    """The advice, which is formatted with the mean."""


PATTERNS = (
    Pattern(
        key="frac_reward_zero_std",
        threshold=0.5,
        sentence="{share} of the groups have equal rewards, and train nothing. Take easier or "
        "harder prompts, a finer reward, or the strategy DynamicSampling.",
    ),
    Pattern(
        key="completions/clipped_ratio",
        threshold=0.3,
        sentence="{share} of the completions end by their length. Raise max_completion_length, or "
        "reward short answers.",
    ),
    Pattern(
        key="rollout/preemptions",
        threshold=0.1,
        sentence="The KV cache is full: {number} preemptions a step. Raise max_memory_percent or "
        "num_blocks, or lower max_requests_per_batch.",
    ),
    Pattern(
        key="rollout/step_share",
        threshold=0.8,
        sentence="Rollouts take {share} of a step. Longer completions cost most: look at the "
        "spread of lengths, and at OverSampling.",
    ),
)


def series(metrics: Metrics, key: str, mode: Mode = "train") -> list[Point]:
    """Return `(step, value)` for each step with a finite scalar `key`, by ascending step."""
    values: dict[int, float] = {}
    for record in metrics:
        value = record.scalars.get(key, math.nan)
        if record.mode == mode and math.isfinite(value):
            values[record.step] = value
    return sorted(values.items())


def reward_spread(metrics: Metrics) -> list[Span]:
    """Return the mean reward minus and plus its standard deviation, by ascending step.

    Where rewards are recorded, the spread is clamped to the step's lowest and highest reward.
    """
    deviations = dict(series(metrics, "reward_std"))
    ranges = _reward_ranges(metrics)
    spans: list[Span] = []
    for step, reward in series(metrics, "reward"):
        if step not in deviations:
            continue
        lowest, highest = ranges.get(step, (-math.inf, math.inf))
        low = max(lowest, reward - deviations[step])
        high = min(highest, reward + deviations[step])
        # A step's rewards may be recorded without those of another process.
        spans.append((step, _finite(min(low, reward)), _finite(max(high, reward))))
    return spans


def _reward_ranges(metrics: Metrics) -> dict[float, tuple[float, float]]:
    """Return the lowest and the highest recorded reward of each step that has any."""
    ranges: dict[float, tuple[float, float]] = {}
    for record in metrics:
        all_rewards = chain.from_iterable(record.group_rewards)
        rewards = [reward for reward in all_rewards if math.isfinite(reward)]
        if record.mode == "train" and rewards:
            ranges[record.step] = (min(rewards), max(rewards))
    return ranges


def _finite(value: float) -> float:
    return max(-sys.float_info.max, min(value, sys.float_info.max))


def length_spread(metrics: Metrics) -> list[Span]:
    """Return the 10th and the 90th percentile of completion lengths, by ascending step."""
    lengths_by_step: dict[int, Sequence[int]] = {}
    for record in metrics:
        # A trainer's last log has no lengths, and the number of its last step.
        if record.mode == "train" and record.completion_lengths:
            lengths_by_step[record.step] = record.completion_lengths
    spans: list[Span] = []
    for step, lengths in sorted(lengths_by_step.items()):
        if len(lengths) == 1:
            # Python 3.11 has no quantiles of a single value.
            spans.append((step, lengths[0], lengths[0]))
            continue
        deciles = statistics.quantiles(lengths, n=10, method="inclusive")
        spans.append((step, deciles[0], deciles[-1]))
    return spans


def group_share(metrics: Metrics, *, solved: bool) -> list[Point]:
    """Return the share of groups with differing rewards, or of solved ones, by ascending step.

    In a solved group each completion has the run's highest reward. Groups with a missing reward are
    not counted.
    """
    groups_by_step: dict[int, Sequence[Sequence[float]]] = {}
    for record in metrics:
        if record.mode == "train" and record.group_rewards:
            groups = [group for group in record.group_rewards if all(map(math.isfinite, group))]
            groups_by_step[record.step] = groups
    all_groups = chain.from_iterable(groups_by_step.values())
    highest = max(chain.from_iterable(all_groups), default=0.0)

    def is_counted(group: Sequence[float]) -> bool:
        if solved:
            return min(group) == highest
        return min(group) != max(group)

    shares: list[Point] = []
    for step, groups in sorted(groups_by_step.items()):
        if groups:
            num_counted = len([group for group in groups if is_counted(group)])
            shares.append((step, num_counted / len(groups)))
    return shares


def without_overflow(
    statistic: Callable[[Sequence[float]], float], values: Sequence[float]
) -> float:
    """Return a mean or a median, even of values whose sum overflows a float."""
    size = max(map(abs, values))
    if size < svg.LARGEST:
        return statistic(values)
    return size * statistic([value / size for value in values])


def smoothing_window(num_points: int) -> int:
    """Return the window of `smoothed`: odd, about a twelfth of the points, 1 below 24."""
    window = num_points // 12
    if window % 2 == 0:
        window += 1
    return min(MAX_WINDOW, window)


def smoothed(points: Sequence[T]) -> list[T]:
    """Replace each value of a step by the mean of the window around it, narrower at the ends."""
    smooth: list[Any] = []
    half = smoothing_window(len(points)) // 2
    for place, point in enumerate(points):
        step = point[0]
        window = points[max(0, place - half) : place + half + 1]
        columns = list(zip(*window, strict=True))
        means = [without_overflow(fmean, column) for column in columns[1:]]
        smooth.append((step, *means))
    return smooth


class SecondCurve(NamedTuple):
    """A second curve in a panel, shown only for a single run."""

    first_name: str
    """Name of the panel's own curve in the legend."""
    name: str
    curve: Callable[[Metrics], list[Point]]


class Panel(NamedTuple):
    """A curve by step, and the other content of its figure."""

    title: str
    note: str
    curve: Callable[[Metrics], list[Point]]
    """The panel's curve, which a comparison shows for both runs."""
    label: Callable[[float], str] = svg.compact
    second: SecondCurve | None = None
    spread: Callable[[Metrics], list[Span]] | None = None
    low: float | None = 0
    """The axis' low end; None: the values decide."""
    is_log: bool = False
    style: str = ""

    def spans(self, metrics: Metrics) -> list[Span]:
        """Return the spread at each step; empty if the panel shows no spread."""
        if self.spread is None:
            return []
        return self.spread(metrics)


def _scalar(key: str) -> Callable[[Metrics], list[Point]]:
    mode = "train"
    if key.startswith("eval_"):
        mode = "eval"
    return partial(series, key=key, mode=mode)


PANELS = (
    Panel(
        title="Reward",
        note="mean of each step; band: one standard deviation, within the step's rewards",
        curve=_scalar("reward"),
        second=SecondCurve("training", "evaluation", _scalar("eval_reward")),
        spread=reward_spread,
        low=None,
        style="wide",
    ),
    Panel(title="Loss", note="as the trainer logged it", curve=_scalar("loss"), low=None),
    Panel(
        title="KL divergence", note="from the reference model, nats a token", curve=_scalar("kl")
    ),
    Panel(
        title="Gradient norm",
        note="before clipping, as the trainer logged it",
        curve=_scalar("grad_norm"),
    ),
    Panel(
        title="Learning rate",
        note="of each step",
        curve=_scalar("learning_rate"),
        label=svg.compact,
    ),
    Panel(
        title="Groups",
        note="share whose rewards differ; solved: all have the run's highest reward",
        curve=partial(group_share, solved=False),
        label=svg.percent,
        second=SecondCurve("rewards differ", "solved", partial(group_share, solved=True)),
    ),
    Panel(
        title="Length of completions",
        note="mean of each step, tokens; band: 10th to 90th percentile",
        curve=_scalar("completions/mean_length"),
        spread=length_spread,
    ),
    Panel(title="Entropy", note="in the loss, nats a token", curve=_scalar("entropy")),
    Panel(
        title="Staleness",
        note="policy versions from sampling to training",
        curve=_scalar("rollout/staleness_mean"),
        second=SecondCurve("mean", "largest", _scalar("rollout/staleness_max")),
    ),
    Panel(title="Step time", note="seconds of each step", curve=_scalar("step_seconds")),
    Panel(
        title="Throughput",
        note="sampled tokens per second of rollout",
        curve=_scalar("rollout/tokens_per_second"),
    ),
    Panel(
        title="Rollout's share of a step",
        note="of its wall-clock time",
        curve=_scalar("rollout/step_share"),
        label=svg.percent,
    ),
    Panel(
        title="Memory",
        note="GiB of the process; on a GPU its peak so far",
        curve=_scalar("memory_gib"),
    ),
    Panel(
        title="Log-probability drift",
        note="largest of a step, nats",
        curve=_scalar(DRIFT_KEYS[0]),
        label=svg.scientific,
        second=SecondCurve(
            "against a plain forward", "against the trainer's forward", _scalar(DRIFT_KEYS[1])
        ),
        is_log=True,
    ),
    Panel(
        title="Routes",
        note="router choices that differ from the rollout's, unreplayed",
        curve=_scalar("rollout/router_disagreement"),
        label=svg.percent,
    ),
)


def figures_html(runs: Mapping[str, Metrics]) -> str:
    """Return the figures of one run, or of two by their names."""
    figures: list[str] = []
    first, *others = PANELS
    for panel in (first, *_reward_panels(runs.values()), *others):
        if len(runs) == 1:
            drawing = _drawing_of_run(panel, *runs.values())
        else:
            drawing = _drawing_of_two(panel, runs)
        if drawing.curves:
            figures.append(_figure(panel, drawing))
    return "\n".join(figures)


def _reward_panels(runs: Iterable[Metrics]) -> list[Panel]:
    """Return a panel for each reward function, if there are several."""
    names: dict[str, None] = {}
    for metrics in runs:
        for record in metrics:
            for key in record.scalars:
                match = _REWARD_FUNCTION.fullmatch(key)
                if match:
                    names[match[1]] = None
    if len(names) < 2:
        return []
    panels: list[Panel] = []
    for name in names:
        curve = _scalar(f"rewards/{name}/mean")
        note = "mean of each step, without its weight"
        panels.append(Panel(title=f"Reward: {name}", note=note, curve=curve, low=None))
    return panels


class Drawing(NamedTuple):
    """A figure's curves and bands, each with its style, and the texts about them."""

    curves: list[tuple[str, list[Point]]]
    """Style and points of each curve, the last on top; empty if nothing was recorded."""
    bands: list[tuple[str, list[Span]]]
    keys: list[tuple[str, str]]
    """Style and text of each entry of the legend."""
    tips: list[tuple[float, str]]
    """A step, and the text that is shown where the pointer is at it."""


def _drawing_of_run(panel: Panel, metrics: Metrics) -> Drawing:
    """Draw a run's curve, its spread, and the panel's second curve."""
    drawing = Drawing(curves=[], bands=[], keys=[], tips=[])
    first_style, second_style = STYLES
    points = panel.curve(metrics)
    second_points: list[Point] = []
    if panel.second:
        second_points = panel.second.curve(metrics)
    window = smoothing_window(len(points))
    if window > 1:
        drawing.curves.append(("raw", points))
    if points:
        drawing.curves.append((first_style, smoothed(points)))
    if second_points:
        # The second curve is not smoothed, because its largest values matter.
        drawing.curves.append((second_style, second_points))

    if panel.second and points and second_points:
        drawing.keys.append((first_style, panel.second.first_name))
        drawing.keys.append((second_style, panel.second.name))
    if window > 1:
        drawing.keys.append(("raw", f"each step; the line: mean over {window}"))

    spans = panel.spans(metrics)
    if spans:
        drawing.bands.append((first_style, smoothed(spans)))
    if points and second_points and panel.second:
        drawing.tips.extend(_tips(panel, points, spans, panel.second.name, second_points))
    else:
        drawing.tips.extend(_tips(panel, points or second_points, spans))
    return drawing


def _drawing_of_two(panel: Panel, runs: Mapping[str, Metrics]) -> Drawing:
    """Draw the curve and the spread of both runs."""
    drawing = Drawing(curves=[], bands=[], keys=[], tips=[])
    named_points: list[tuple[str, list[Point]]] = []
    for style, (name, metrics) in zip(STYLES, runs.items(), strict=True):
        points = panel.curve(metrics)
        if points:
            drawing.curves.append((style, smoothed(points)))
            drawing.keys.append((style, name))
            named_points.append((name, points))
        spans = panel.spans(metrics)
        if spans:
            drawing.bands.append((style, smoothed(spans)))
    if len(named_points) == 2:
        (_, points), (second_name, second_points) = named_points
        drawing.tips.extend(_tips(panel, points, [], second_name, second_points))
    elif named_points:
        drawing.tips.extend(_tips(panel, named_points[0][1], spans=[]))
    return drawing


def _tips(
    panel: Panel,
    points: Sequence[Point],
    spans: Sequence[Span],
    second_name: str = "",
    second_points: Sequence[Point] = (),
) -> Iterator[tuple[float, str]]:
    """Yield the text of each step: its value, its spread, and the second curve's value.

    Args:
        panel: the panel, which labels values.
        points: the first curve.
        spans: the spread around it.
        second_name: name of the second curve.
        second_points: the second curve; empty: there is none.
    """
    texts: dict[float, str] = {}
    for step, value in points:
        texts[step] = panel.label(value)
    for step, low, high in spans:
        if step in texts:
            texts[step] += f" ({panel.label(low)} to {panel.label(high)})"
    for step, value in second_points:
        text = f"{second_name} {panel.label(value)}"
        texts[step] = f"{texts[step]}; {text}" if step in texts else text
    for step, text in sorted(texts.items()):
        yield step, f"step {step:,}: {text}"


def _figure(panel: Panel, drawing: Drawing) -> str:
    steps: list[float] = []
    values: list[float] = []
    for _, points in drawing.curves:
        for step, value in points:
            steps.append(step)
            values.append(value)
    for _, spans in drawing.bands:
        for step, low, high in spans:
            steps.append(step)
            values.extend((low, high))
    x = svg.linear_axis(steps, low=min(steps), high=max(steps), num_ticks=6, is_whole=True)
    if panel.is_log:
        y = svg.log_axis(values, floor=DRIFT_FLOOR)
    else:
        y = svg.linear_axis(values, low=panel.low, num_ticks=4, label=panel.label)
    chart = svg.curve_chart(
        drawing.curves, drawing.bands, drawing.tips, x=x, y=y, title=panel.title
    )
    legend = "".join(
        f'<span class="key {style}"><i></i>{escape(text)}</span>' for style, text in drawing.keys
    )
    return (
        f'<figure class="{panel.style}"><figcaption><h2>{escape(panel.title)}</h2>'
        f'<p>{escape(panel.note)}</p><p class="keys">{legend}</p></figcaption>{chart}</figure>'
    )


def advice(metrics: Metrics) -> Iterator[str]:
    """Yield a sentence or two about each known pattern in the last steps of a run."""
    for key in DRIFT_KEYS:
        drift = [value for _, value in series(metrics, key)]
        if len(drift) < 2 * WINDOW:
            continue
        first = without_overflow(statistics.median, drift[:WINDOW])
        last = without_overflow(statistics.median, drift[-WINDOW:])
        if last > max(LEAST_DRIFT, DRIFT_GROWTH * first):
            change = f"{svg.compact(first)} nats at first, {svg.compact(last)} now"
            yield f"{key} grows: {change}. cb-rollout audit names the cause."
    for pattern in PATTERNS:
        values = [value for _, value in series(metrics, pattern.key)[-WINDOW:]]
        if not values:
            continue
        mean = without_overflow(fmean, values)
        if mean >= pattern.threshold:
            yield pattern.sentence.format(share=svg.percent(mean), number=svg.compact(mean))
