"""Charts as inline SVG: axes, lines, bands and dots from plain numbers. Every function is pure.

A chart has no viewBox, so that it fills any width while text keeps its size: curves lie in a
stretched inner viewport, labels and dots are placed by percentages. `report.css` has the colours.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

# An x with a low and a high value; several are by ascending x.
Span = tuple[float, float, float]

# More hover bands would be too narrow to point at.
MAX_TIPS = 200

# More dots hide their line.
MAX_DOTS = 30

# Units of the stretched viewport: 0.1 percent is finer than a pixel.
SPAN = 1000


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values mapped to 0..1, with its labelled values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: Callable[[float], str]
    is_log: bool = False

    def position(self, value: float) -> float:
        """Map `value` to 0 at `low` and 1 at `high`, clamped."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)


def compact(value: float) -> str:
    """Format a number in few characters: 2.8e-6, 0.05, 3.2, 1,480, 12.5k, 3M."""
    size = abs(value)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.4g}{unit}"
    if size >= 1e3:
        return f"{value:,.0f}"
    return scientific(value) if 0 < size < 1e-3 else f"{value:.3g}"


def scientific(value: float, digits: int = 1) -> str:
    """Format a number by its power of ten, as in 2.8e-6."""
    if value == 0:
        return "0"
    mantissa, power = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(power)}"


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.3g}%"


def linear_axis(
    values: Iterable[float],
    *,
    low: float | None = None,
    high: float | None = None,
    num_ticks: int = 5,
    is_whole: bool = False,
    label: Callable[[float], str] = compact,
) -> Axis:
    """Create an axis over `values`, widened to round numbers where an end is None.

    Labels about `num_ticks` values; `is_whole`: whole numbers only.
    """
    values = list(values)
    least = min(values) if low is None else low
    most = max(values) if high is None else high
    if most <= least:
        least, most = (least, least + 1) if low is not None else (least - 0.5, least + 0.5)
    step = _round_step((most - least) / num_ticks)
    step = math.ceil(step) if is_whole else step
    first = math.floor(least / step + 1e-9) if low is None else math.ceil(least / step - 1e-9)
    last = math.ceil(most / step - 1e-9) if high is None else math.floor(most / step + 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(min((least, *ticks)), max((most, *ticks)), ticks, label)


def log_axis(values: Iterable[float], *, floor: float) -> Axis:
    """Create an axis of whole decades; values up to `floor` lie at its low end, which says 0."""
    values = list(values)
    positive = [value for value in values if value > floor] or [floor]
    first = math.floor(math.log10(min(positive)) - 1e-9)
    last = max(math.ceil(math.log10(max(positive)) + 1e-9), first + 2)
    stride = math.ceil((last - first) / 6)
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    zero = ticks[0] / 10
    if len(positive) < len(values):
        ticks = (zero, *ticks)

    def label(value: float) -> str:
        return "0" if value == zero else scientific(value, digits=0)

    return Axis(ticks[0], 10.0**last, ticks, label, is_log=True)


def curve_chart(
    curves: Sequence[tuple[str, Sequence[Point]]],
    bands: Sequence[tuple[str, Sequence[Span]]],
    tips: Sequence[tuple[float, str]],
    *,
    x: Axis,
    y: Axis,
    title: str,
) -> str:
    """Draw curves over bands, each with its class of `report.css`, the last on top.

    A curve has dots if they are few. A band is the tinted area between two values of each x. `tips`
    are texts shown when the pointer is at an x.
    """
    paths = ""
    for style, spans in bands:
        outline = [(at, high) for at, _, high in spans]
        outline += [(at, low) for at, low, _ in reversed(spans)]
        paths += f'<path class="band {style}" d="M{_corners(outline, x, y)}Z"/>'
    paths += "".join(
        f'<path class="line {style}" d="M{_corners(points, x, y)}"/>' for style, points in curves
    )
    dots = "".join(_dots(style, points, x, y) for style, points in curves)
    return (
        f'<svg class="chart" width="100%" role="img" aria-label="{escape(title)}">{_grid(x, y)}'
        f'<svg width="100%" height="100%" viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" '
        f'overflow="visible">{paths}</svg>{dots}{_tip_bands(tips, x)}</svg>'
    )


def _grid(x: Axis, y: Axis) -> str:
    lines = "".join(
        f'<line class="grid" x1="0%" x2="100%" y1="{(down := _down(tick, y))}%" y2="{down}%"/>'
        f'<text class="tick y" x="-8" y="{down}%" dy="0.32em">{escape(y.label(tick))}</text>'
        for tick in y.ticks
    )
    labels = "".join(
        f'<text class="tick x" x="{_across(tick, x)}%" y="100%" dy="18">'
        f"{escape(x.label(tick))}</text>"
        for tick in x.ticks
    )
    return f'{lines}<line class="axis" x1="0%" x2="100%" y1="100%" y2="100%"/>{labels}'


def _corners(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return "L".join(
        f"{x.position(across) * SPAN:.1f} {(1 - y.position(up)) * SPAN:.1f}"
        for across, up in points
    )


def _dots(style: str, points: Sequence[Point], x: Axis, y: Axis) -> str:
    # A line gets a dot at its end, without which a single point is invisible.
    return "".join(
        f'<circle class="dot {style}" cx="{_across(at, x)}%" cy="{_down(up, y)}%" r="3.5"/>'
        for at, up in (points if len(points) <= MAX_DOTS else points[-1:])
    )


def _tip_bands(tips: Sequence[tuple[float, str]], x: Axis) -> str:
    chosen = tips[:: math.ceil(len(tips) / MAX_TIPS)]
    width = 100 / len(chosen)
    return "".join(
        f'<rect class="tip" x="{_across(across, x) - width / 2:.2f}%" width="{width:.2f}%" y="0" '
        f'height="100%"><title>{escape(text)}</title></rect>'
        for across, text in chosen
    )


def _across(value: float, x: Axis) -> float:
    return round(100 * x.position(value), 2)


def _down(value: float, y: Axis) -> float:
    return round(100 * (1 - y.position(value)), 2)


def _round_step(size: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
