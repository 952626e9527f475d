"""Charts as inline SVG: axes, lines, bands and dots from plain numbers. Every function is pure.

A chart has no viewBox, so that it fills any width while text keeps its size: curves lie in a
stretched inner viewport, labels and dots are placed by percentages. `report.css` has the colours.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

# An x with a low and a high value; lists of spans are sorted by ascending x.
Span = tuple[float, float, float]

# More hover bands would be too narrow to point at.
MAX_TIPS = 200

# More dots hide their line.
MAX_DOTS = 30

# Units of the stretched viewport: 0.1 percent is finer than a pixel.
SPAN = 1000

# A larger number is drawn as this number, so that sums of an axis' ends are finite.
LARGEST = 1e305

# Values that differ by a smaller share are drawn as equal: their ticks could not be told apart.
LEAST_SHARE = 1e-12

# A narrower axis has ticks that a float cannot hold.
LEAST_WIDTH = 1e-300

# Two numbers of steps, or of decades, that differ by less count as equal.
ROUNDING = 1e-9

# More labels of a logarithmic axis would touch.
MAX_DECADES = 6


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
        clamped = min(max(value, self.low), self.high)
        if not self.is_log:
            return (clamped - self.low) / (self.high - self.low)
        log_low = math.log10(self.low)
        log_high = math.log10(self.high)
        return (math.log10(clamped) - log_low) / (log_high - log_low)


def compact(value: float) -> str:
    """Format a number in few characters: 2.8e-6, 0.05, 3.2, 1,480, 12.5k, 3M, 1.0e308."""
    size = abs(value)
    if size >= 1e15:
        return scientific(value)
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
    """Format a share as a percentage, and a value far from 0..1 as a number."""
    if abs(value) >= 1e4:
        return compact(value)
    return f"{100 * value:.3g}%"


def drawable(value: float) -> float:
    """Return `value`, clamped to plus or minus `LARGEST`, for an axis."""
    return max(-LARGEST, min(value, LARGEST))


def linear_axis(
    values: Iterable[float],
    *,
    low: float | None = None,
    high: float | None = None,
    num_ticks: int = 5,
    is_whole: bool = False,
    label: Callable[[float], str] = compact,
) -> Axis:
    """Create an axis over `values`.

    Args:
        values: numbers that the axis has to reach.
        low: the low end; None: the least value, or the round number below it.
        high: the high end; None: the largest value, or the round number above it.
        num_ticks: about how many values get a label.
        is_whole: label whole numbers only.
        label: writes a labelled value.
    """
    values = [drawable(value) for value in values]
    least = low
    if least is None:
        least = min(values)
    most = high
    if most is None:
        most = max(values)
    size = max(abs(least), abs(most))
    if most - least <= max(LEAST_WIDTH, LEAST_SHARE * size):
        if low is not None:
            most = least + 1
        else:
            # A margin that changes the digits of a label, however large the value is.
            margin = max(0.5, 1e-3 * size)
            most = least + margin
            least = least - margin
    step = _round_step((most - least) / num_ticks)
    if is_whole:
        step = math.ceil(step)

    # A given end of the axis stays, with its ticks inside; an open end is moved out to a tick.
    if low is None:
        first = math.floor(least / step + ROUNDING)
    else:
        first = math.ceil(least / step - ROUNDING)
    if high is None:
        last = math.ceil(most / step - ROUNDING)
    else:
        last = math.floor(most / step + ROUNDING)
    ticks = [number * step for number in range(first, last + 1)]
    if ticks:
        least = min(least, ticks[0])
        most = max(most, ticks[-1])
    return Axis(low=least, high=most, ticks=tuple(ticks), label=label)


def log_axis(values: Iterable[float], *, floor: float) -> Axis:
    """Create an axis of whole decades; its low end is labelled 0 and shows values up to `floor`."""
    values = [drawable(value) for value in values]
    positive = [value for value in values if value > floor]
    if not positive:
        positive = [floor]
    first = math.floor(math.log10(min(positive)) - ROUNDING)
    last = max(math.ceil(math.log10(max(positive)) + ROUNDING), first + 2)
    stride = math.ceil((last - first) / MAX_DECADES)
    ticks = [10.0**power for power in range(first, last + 1, stride)]
    zero = ticks[0] / 10
    if len(positive) < len(values):
        ticks.insert(0, zero)

    def label(value: float) -> str:
        if value == zero:
            return "0"
        return scientific(value, digits=0)

    return Axis(low=ticks[0], high=10.0**last, ticks=tuple(ticks), label=label, is_log=True)


def curve_chart(
    curves: Sequence[tuple[str, Sequence[Point]]],
    bands: Sequence[tuple[str, Sequence[Span]]],
    tips: Sequence[tuple[float, str]],
    *,
    x: Axis,
    y: Axis,
    title: str,
) -> str:
    """Draw curves over bands, the last on top; a curve with few points gets dots.

    Args:
        curves: a class of `report.css`, and the points of the curve, by ascending x.
        bands: a class of `report.css`, and the low and the high end of the tinted area at each x.
        tips: an x, and the text that is shown while the pointer is at it.
        x: the horizontal axis.
        y: the vertical axis.
        title: the chart's name for screen readers.
    """
    paths = ""
    for style, spans in bands:
        # The outline runs along the high ends, and back along the low ends.
        outline: list[Point] = []
        for at, _, high in spans:
            outline.append((at, high))
        for at, low, _ in reversed(spans):
            outline.append((at, low))
        paths += f'<path class="band {style}" d="M{_corners(outline, x, y)}Z"/>'
    dots = ""
    for style, points in curves:
        paths += f'<path class="line {style}" d="M{_corners(points, x, y)}"/>'
        dots += _dots(style, points, x, y)
    return (
        f'<svg class="chart" width="100%" role="img" aria-label="{escape(title)}">{_grid(x, y)}'
        f'<svg width="100%" height="100%" viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" '
        f'overflow="visible">{paths}</svg>{dots}{_tip_bands(tips, x)}</svg>'
    )


def _grid(x: Axis, y: Axis) -> str:
    lines = ""
    for tick in y.ticks:
        down = _down(tick, y)
        lines += f'<line class="grid" x1="0%" x2="100%" y1="{down}%" y2="{down}%"/>'
        text = escape(y.label(tick))
        lines += f'<text class="tick y" x="-8" y="{down}%" dy="0.32em">{text}</text>'
    labels = ""
    for tick in x.ticks:
        text = escape(x.label(tick))
        labels += f'<text class="tick x" x="{_across(tick, x)}%" y="100%" dy="18">{text}</text>'
    return f'{lines}<line class="axis" x1="0%" x2="100%" y1="100%" y2="100%"/>{labels}'


def _corners(points: Sequence[Point], x: Axis, y: Axis) -> str:
    corners: list[str] = []
    for across, up in points:
        from_left = x.position(across) * SPAN
        from_top = (1 - y.position(up)) * SPAN
        corners.append(f"{from_left:.1f} {from_top:.1f}")
    return "L".join(corners)


def _dots(style: str, points: Sequence[Point], x: Axis, y: Axis) -> str:
    # A line gets a dot at its end; otherwise a single point would be invisible.
    if len(points) > MAX_DOTS:
        points = points[-1:]
    dots = ""
    for at, up in points:
        center = f'cx="{_across(at, x)}%" cy="{_down(up, y)}%"'
        dots += f'<circle class="dot {style}" {center} r="3.5"/>'
    return dots


def _tip_bands(tips: Sequence[tuple[float, str]], x: Axis) -> str:
    chosen = tips[:: math.ceil(len(tips) / MAX_TIPS)]
    width = 100 / len(chosen)
    bands = ""
    for across, text in chosen:
        left = _across(across, x) - width / 2
        band = f'<rect x="{left:.2f}%" width="{width:.2f}%" y="0" height="100%"/>'
        bands += f'<g class="tip">{band}<text x="50%" y="2">{escape(text)}</text></g>'
    return bands


def _across(value: float, x: Axis) -> float:
    return round(100 * x.position(value), 2)


def _down(value: float, y: Axis) -> float:
    return round(100 * (1 - y.position(value)), 2)


def _round_step(size: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    for factor in (1, 2, 2.5, 5):
        if factor * power >= size * 0.999:
            return factor * power
    return 10 * power
