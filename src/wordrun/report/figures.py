"""The figures of a report, as SVG that takes its text colour from the page.

They are written as text, because matplotlib takes 35 ms for each, and a run waits for twenty of them at its end.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from wordrun.runs.metrics import Metrics, Table
from wordrun.track.plots import smooth

COLORS = ("#3b82f6", "#f97316", "#22a06b", "#e0484d", "#a26bd6", "#b0764a", "#e273b4", "#8b95a1", "#b3a62c", "#2bb3c0")
"""The colours of runs and parts, which can be told apart on white and on black."""
POINTS = 1200
"""A curve is drawn with at most about this many points."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 403, 209, 54, 395, 8, 174
"""The size of a figure, and the edges of its axes."""
ROW, CHARACTER = 12, 4.6
"""The height of a row of the legend, and the usual width of a character in it."""
UNITS = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
AXES = {"step": "step", "tokens": "tokens", "time": "time [s]"}
"""What curves can be drawn over."""


@dataclass
class Curve:
    """One line of a figure."""

    x: Sequence[float]
    y: Sequence[float]
    color: str
    label: str = ""
    is_noisy: bool = False
    """Draw it faintly, and a smoothed curve over it."""
    style: str = "-"


@dataclass
class Figure:
    """What a figure shows; ``draw`` makes the SVG."""

    curves: list[Curve]
    y_label: str
    x_label: str = "step"
    marks: Sequence[float] = ()
    """Where to draw vertical lines: the starts of later launches."""
    from_zero: bool = False
    bands: list[Curve] = field(default_factory=list)
    """Curves to stack on each other as filled areas."""


@dataclass
class Path:
    """A line, an area or dots in the units of the axes."""

    x: Sequence[float]
    y: Sequence[float]
    attributes: str
    is_area: bool = False
    is_dots: bool = False


def draw(figure: Figure) -> str:
    """Return the figure as an SVG element."""
    paths = list(_paths(figure))
    legend, top = _legend([each for each in (*figure.curves, *figure.bands) if each.label])
    left, right = _range([x for path in paths for x in path.x], 0.02)
    low, high = _range([y for path in paths for y in path.y], 0.05)
    if (figure.from_zero or figure.bands) and not any(y < 0 for path in paths for y in path.y):
        low = 0.0

    def across(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (RIGHT - LEFT)

    def down(y: float) -> float:
        return BOTTOM - (y - low) / (high - low) * (BOTTOM - top)

    found = [*legend]
    short = figure.x_label == AXES["tokens"]
    for at in ticks(left, right):
        x = f"{across(at):.1f}"
        found.append(f'<path d="M{x} {BOTTOM}V{top}" stroke-width="0.6" stroke-opacity="0.18"/>')
        found.append(_text(x, BOTTOM + 13, _number(at, short=short)))
    for at in ticks(low, high):
        y = f"{down(at):.1f}"
        found.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke-width="0.6" stroke-opacity="0.18"/>')
        text = _number(at, short=figure.y_label.endswith("/s"))
        found.append(_text(LEFT - 5, f"{down(at) + 3:.1f}", text, 'text-anchor="end"'))
    found.append(f'<path d="M{LEFT} {top}V{BOTTOM}H{RIGHT}" stroke-width="0.8"/>')
    for path in paths:
        points = ((across(x), down(y)) for x, y in zip(path.x, path.y, strict=True))
        found.append(f'<path d="{_d(points, path)}" {path.attributes}/>')
    dotted = 'stroke-width="0.8" stroke-opacity="0.6" stroke-dasharray="1 2"'
    found += [f'<path d="M{across(at):.1f} {BOTTOM}V{top}" {dotted}/>' for at in figure.marks if left <= at <= right]
    found.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, figure.x_label))
    middle = (top + BOTTOM) / 2
    found.append(_text(10, middle, figure.y_label, f'transform="rotate(-90 10 {middle})"'))
    style = 'fill="none" stroke="currentColor" font-size="9" font-family="system-ui, sans-serif"'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {style} text-anchor="middle">{"".join(found)}</svg>'


def _paths(figure: Figure) -> Iterator[Path]:
    """Yield what to draw, from back to front."""
    below: list[float] = []
    for band in figure.bands:
        chosen = range(0, len(band.x), max(1, len(band.x) // POINTS))
        over = [band.x[i] for i in chosen]
        below = below or [0.0] * len(over)
        above = [
            least + (band.y[i] if math.isfinite(band.y[i]) else 0.0) for i, least in zip(chosen, below, strict=True)
        ]
        yield Path([*over, *over[::-1]], [*above, *below[::-1]], _area(band.color, 0.75), is_area=True)
        below = above
    for curve in figure.curves:
        x, low, high, y = thin(curve.x, curve.y)
        if curve.is_noisy and len(curve.x) > 2:
            if len(x) < len(curve.x):
                yield Path([*x, *x[::-1]], [*low, *high[::-1]], _area(curve.color, 0.2), is_area=True)
            else:
                yield Path(curve.x, curve.y, f'stroke="{curve.color}" stroke-width="0.7" stroke-opacity="0.3"')
            finite = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
            x, _, _, y = thin([x for x, _ in finite], smooth([y for _, y in finite]))
        yield Path(x, y, f'stroke="{curve.color}" stroke-width="1.5" stroke-linejoin="round"')
        if len(x) == 1 or (curve.style == "o-" and len(x) <= 60):
            yield Path(x, y, f'stroke="{curve.color}" stroke-width="4" stroke-linecap="round"', is_dots=True)


def _area(color: str, opacity: float) -> str:
    return f'fill="{color}" fill-opacity="{opacity}" stroke="none"'


def _d(points: Iterator[tuple[float, float]], path: Path) -> str:
    """Return the points as the data of an SVG path; a line is interrupted where it is not finite, an area is not."""
    found, pen = list[str](), "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "L" if path.is_area and found else "M"
            continue
        found.append(f"{pen}{x:.1f} {y:.1f}{'h0' * path.is_dots}")
        pen = "M" if path.is_dots else "L"
    return "".join(found) + "Z" * path.is_area


def _legend(curves: Sequence[Curve]) -> tuple[list[str], float]:
    """Return the names of the curves, in rows above the axes, and the upper edge of the axes."""
    found: list[str] = []
    if len(curves) < 2:
        return found, TOP
    x, y = float(LEFT), TOP + 2.0
    for curve in curves:
        width = 24 + CHARACTER * len(curve.label)
        if x > LEFT and x + width > RIGHT:
            x, y = LEFT, y + ROW
        found.append(f'<path d="M{x:.1f} {y}h10" stroke="{curve.color}" stroke-width="3"/>')
        found.append(_text(f"{x + 14:.1f}", y + 3, curve.label, 'text-anchor="start" font-size="8"'))
        x += width
    return found, y + ROW


def _text(x: Any, y: Any, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="currentColor" stroke="none" {attributes}>{html.escape(text)}</text>'


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return the least and the greatest finite value, with a ``margin`` as a share of their distance."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    extra = margin * (high - low) or 0.05 * abs(high) or 0.5
    return low - extra, high + extra


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most about ``most``."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float, *, short: bool) -> str:
    size, unit = next(((size, unit) for size, unit in UNITS.items() if short and abs(value) >= size), (1, ""))
    return f"{value / size:,.8g}{unit}"


def thin(
    x: Sequence[float], y: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
    """Return at most about ``POINTS`` points: x, and the least, greatest and mean finite y around each."""
    size = math.ceil(len(x) / POINTS)
    if size <= 1:
        return x, y, y, y
    parts = []
    for start in range(0, len(x), size):
        values = [value for value in y[start : start + size] if math.isfinite(value)] or [math.nan]
        parts.append((x[min(start + size // 2, len(x) - 1)], min(values), max(values), sum(values) / len(values)))
    xs, low, high, mean = (list(column) for column in zip(*parts, strict=True))
    return xs, low, high, mean


def over_axes(metrics: Metrics, make: Callable[[str], Figure]) -> dict[str, str]:
    """Return the figure that ``make`` describes, drawn over each axis that the run has."""
    return {axis: draw(make(axis)) for axis in AXES if axis in metrics.training}


def curve(metrics: Metrics, table: Table, name: str, axis: str, **options: Any) -> Curve:
    """Return a metric of a run over ``axis``."""
    steps, values = table["step"], table[name]
    chosen = [i for i, value in enumerate(values) if not math.isnan(value)] if table is metrics.evaluation else None
    if chosen is not None:
        steps_, values_ = [steps[i] for i in chosen], [values[i] for i in chosen]
        return Curve(metrics.along(axis, steps_), values_, **{"style": "o-", **options})
    return Curve(table[axis], values, **options)
