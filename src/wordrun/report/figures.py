"""The figures of a report, as SVG that takes its text color from the page."""

from __future__ import annotations

import io
import logging
import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from wordrun.runs.metrics import Metrics, Table
from wordrun.track.plots import smooth, thin

COLORS = ("#3b82f6", "#f97316", "#22a06b", "#e0484d", "#a26bd6", "#b0764a", "#e273b4", "#8b95a1", "#b3a62c", "#2bb3c0")
"""The colors of runs and parts, which can be told apart on white and on black."""
INK = "#010203"
"""Stands for the page's text color."""
BOX = (0.14, 0.165, 0.845, 0.81)
"""Left, bottom, width and height of a figure's axes, as shares of the figure."""
PEAK = 2
"""Stacked bands are shown up to this many times the height that nine tenths of them do not exceed."""


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
    """What a figure shows; ``Canvas`` makes the SVG."""

    curves: list[Curve]
    y_label: str
    x_label: str = "step"
    marks: Sequence[float] = ()
    """Where to draw vertical lines: the starts of later launches."""
    from_zero: bool = False
    bands: list[Curve] = field(default_factory=list)
    """Curves to stack on each other as filled areas, all over the same x."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The labels and colors of the curves; empty if there are less than two."""
        found = [(curve.label, curve.color) for curve in (*self.curves, *self.bands) if curve.label]
        return found if len(found) > 1 else []


class Canvas:
    """Draws figures one after the other on the same axes: new ones would take longer than everything else."""

    STYLE: ClassVar[dict[str, Any]] = {
        "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.unicode_minus": False,
        "path.simplify": True,
    }  # fmt: skip

    def __init__(self) -> None:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Sheet
        from matplotlib.ticker import MaxNLocator

        with rc_context(self.STYLE):
            self._sheet = Sheet(figsize=(5, 2.7))
            self._axes = self._sheet.add_axes(BOX)  # an automatic layout takes as long as the drawing
            self._axes.grid(alpha=0.18, color=INK, lw=0.6)
            self._axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))  # 2.5 would be no step
            # Where tick labels leave room; to find out how much takes long.
            self._axes.xaxis.set_label_coords(0.5, -0.105)
            self._axes.yaxis.set_label_coords(-0.13, 0.5)
            self._axes.tick_params(length=0, left=False, bottom=False)
            self._axes.spines[["top", "right"]].set_visible(False)

    def draw(self, figure: Figure) -> str:
        """Return the figure as an SVG element."""
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context(self.STYLE):
            for artist in (*self._axes.lines, *self._axes.collections):
                artist.remove()
            self._axes.relim()
            self._axes.autoscale()
            _fill(self._axes, figure)
            self._sheet.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = text.getvalue()[text.getvalue().index("<svg") :]
        # The page decides about the size, the font, and the color of text in the light and in the dark.
        svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
        svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
        return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S).replace(INK, "currentColor")


def _fill(axes: Any, figure: Figure) -> None:
    from matplotlib.ticker import EngFormatter

    highest = _stack(axes, figure.bands) if figure.bands else math.nan
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
        axes.plot(x, y, color=curve.color, lw=1.5, marker=marker, ms=3.5, ls=style)
    for mark in figure.marks:
        axes.axvline(mark, color=INK, ls=":", lw=0.8, alpha=0.6)
    cut = ", higher peaks cut off" if math.isfinite(highest) and highest < axes.dataLim.y1 else ""
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label + cut)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    # Each label is complete: there is no room for a power of ten above the axes.
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if figure.y_label.endswith("/s") else "{x:g}")
    if figure.from_zero or figure.bands:
        top = 1.12 * (highest if figure.bands else axes.dataLim.y1)
        axes.set_ylim(0, top if math.isfinite(top) and top > 0 else None)


def _stack(axes: Any, bands: Sequence[Curve]) -> float:
    """Stack ``bands`` on each other; return what the axes should show of them: without rare, much higher peaks."""
    x = thin(bands[0].x, bands[0].y)[0]
    heights = [[y if math.isfinite(y) else 0.0 for y in thin(band.x, band.y)[3]] for band in bands]
    axes.stackplot(x, heights, colors=[band.color for band in bands], alpha=0.75, lw=0)
    totals = sorted(map(sum, zip(*heights, strict=True)))
    return min(totals[-1], PEAK * totals[9 * len(totals) // 10])


def titles(everything: Iterable[Metrics]) -> dict[str, str]:
    """Return the titles of the axes that any of the runs has, and convert all their times to the unit in the title."""
    tables = [metrics.training for metrics in everything]
    longest = max((table.last("time") or 0.0 for table in tables), default=0.0)
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if longest > 3 * size), (1, "s"))
    for table in tables:
        if "time" in table:
            table.columns["time"] = array("d", (seconds / size for seconds in table["time"]))
    known = {"step": "step", "tokens": "tokens", "time": f"time [{unit}]"}
    return {axis: title for axis, title in known.items() if any(axis in table for table in tables)}


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
