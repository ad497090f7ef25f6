"""The figures of a report, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wordrun.runs.metrics import Metrics, Table
from wordrun.track.plots import POINTS, smooth, thin

COLORS = ("#3b82f6", "#f97316", "#22a06b", "#e0484d", "#a26bd6", "#b0764a", "#e273b4", "#8b95a1", "#b3a62c", "#2bb3c0")
"""The colours of runs and parts, which can be told apart on white and on black."""
INK = "#010203"
"""Stands for the page's text colour."""
BOX = (0.135, 0.16, 0.845, 0.81)
"""Left, bottom, width and height of a figure's axes, as shares of the figure."""
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
    """As matplotlib's; o-: with points if there are few, v: points alone."""


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


def draw(figure: Figure) -> str:
    """Return the figure as an SVG element."""
    return _svg(lambda axes: _fill(axes, figure))


def _fill(axes: Any, figure: Figure) -> None:
    from matplotlib.ticker import EngFormatter

    if figure.bands:
        xs = figure.bands[0].x
        chosen = range(0, len(xs), max(1, len(xs) // POINTS))
        axes.stackplot(
            [xs[i] for i in chosen], [[_zero(band.y[i]) for i in chosen] for band in figure.bands],
            labels=[band.label for band in figure.bands], colors=[band.color for band in figure.bands],
            alpha=0.75, lw=0,
        )  # fmt: skip
    for curve in figure.curves:
        if curve.is_noisy and len(curve.x) > 2:
            x, low, high, _ = thin(curve.x, curve.y)
            if len(x) < len(curve.x):
                axes.fill_between(x, low, high, color=curve.color, alpha=0.2, lw=0)
            else:
                axes.plot(curve.x, curve.y, color=curve.color, lw=0.7, alpha=0.3)
            smoothed = smooth([y for y in curve.y if math.isfinite(y)])
            x, _, _, y = thin([x for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)], smoothed)
        else:
            x, _, _, y = thin(curve.x, curve.y)
        marker = "v" if curve.style == "v" else "o" if len(x) == 1 or (curve.style == "o-" and len(x) <= 60) else ""
        style = {"o-": "-", "v": ""}.get(curve.style, curve.style)
        axes.plot(x, y, color=curve.color, lw=1.5, label=curve.label or None, marker=marker, ms=3.5, ls=style)
    for mark in figure.marks:
        axes.axvline(mark, color=INK, ls=":", lw=0.8, alpha=0.6)
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    # Each label is complete: there is no room for a power of ten above the axes.
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if figure.y_label.endswith("/s") else "{x:g}")
    if figure.from_zero or figure.bands:
        axes.set_ylim(bottom=0)
    labels = [curve for curve in (*figure.curves, *figure.bands) if curve.label]
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=2 if len(labels) > 3 else 1, labelcolor=INK)


def _zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _svg(fill: Callable[[Any], None]) -> str:
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    style = {
        "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.unicode_minus": False,
        "path.simplify": True,
    }  # fmt: skip
    with rc_context(style):
        canvas = Canvas(figsize=(5.6, 2.9))
        axes = canvas.add_axes(BOX)  # an automatic layout takes as long as the drawing
        axes.grid(alpha=0.18, color=INK, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes)
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    # The page decides about the size, the font, and the colour of text in the light and in the dark.
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S).replace(INK, "currentColor")


def over_axes(metrics: Metrics, make: Callable[[str], Figure]) -> dict[str, str]:
    """Return the figure that ``make`` describes, drawn over each axis that the run has."""
    return {axis: draw(make(axis)) for axis in AXES if axis in metrics.training}


def curve(metrics: Metrics, table: Table, name: str, axis: str, **options: Any) -> Curve:
    """Return a metric of a run over ``axis``."""
    if table is metrics.training:
        return Curve(table[axis], table[name], **options)
    steps, values = table.known(name)
    return Curve(metrics.along(axis, steps), values, **{"style": "o-", **options})


def marks(metrics: Metrics, axis: str, color: str) -> Curve:
    """Return the losses of the lines that count a new spike."""
    table, rows = metrics.training, metrics.spikes()
    x, y = ([table[name][row] for row in rows] for name in (axis, "loss"))
    return Curve(x, y, color, "spike since the line before", style="v")
