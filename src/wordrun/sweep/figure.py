"""The figure of a search: a line for each point, across one axis per option and one for the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from optuna.distributions import BaseDistribution, CategoricalDistribution

# Keeps labels readable where lines cross them.
BEHIND = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}


def parallel_coordinates(
    path: Path, space: Mapping[str, BaseDistribution], rows: Sequence[tuple[Mapping[str, Any], float]], metric: str, *,
    higher: bool,
) -> None:  # fmt: skip
    """Write the figure as PNG.

    Args:
        path: the file.
        space: the options and their values.
        rows: each point's values by option, and its metric.
        metric: its name.
        higher: whether higher values of it are better.
    """
    names = list(space)
    figure = Figure(figsize=(1.9 * (len(names) + 1) + 1, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = np.array([value for _, value in rows])
    low, high = values.min(), values.max()
    colors = ScalarMappable(Normalize(low, high if high > low else low + 1), "viridis_r" if higher else "viridis")
    heights = np.array([[height(space[name], params[name]) for name in names] for params, _ in rows])
    last = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    heights = np.column_stack([heights, last])
    order = np.argsort(values) if higher else np.argsort(-values)  # the best ones on top
    for row in order:
        color = colors.to_rgba(values[row])
        axes.add_patch(PathPatch(curve(heights[row]), fill=False, lw=1.4, alpha=0.8, edgecolor=color))
    axes.set(xlim=(-0.1, len(names) + 0.1), ylim=(-0.03, 1.03), yticks=[], xticks=range(len(names) + 1))
    axes.set_xticklabels([*names, metric])
    axes.tick_params(axis="x", length=0, pad=8)
    axes.spines[:].set_visible(False)
    for at, name in enumerate([*names, metric]):
        axes.axvline(at, color="0.4", lw=0.8)
        ends = [(f"{low:.4g}", 0.0), (f"{high:.4g}", 1.0)]
        for label, y in labels(space[name]) if name in space else ends:
            axes.annotate(label, (at, y), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=BEHIND)
    figure.colorbar(colors, ax=axes, label=metric, pad=0.08)
    figure.savefig(path, dpi=150)


def height(values: BaseDistribution, value: Any) -> float:
    """Return where ``value`` is on its axis, from 0 to 1."""
    if isinstance(values, CategoricalDistribution):
        return values.choices.index(value) / max(1, len(values.choices) - 1)
    low, high = scaled(values, values.low), scaled(values, values.high)  # type: ignore[attr-defined]
    return (scaled(values, value) - low) / (high - low) if high > low else 0.5


def scaled(values: BaseDistribution, value: float) -> float:
    """Return ``value``, or its logarithm if the axis is logarithmic."""
    return float(np.log(value)) if values.log else float(value)  # type: ignore[attr-defined]


def labels(values: BaseDistribution) -> list[tuple[str, float]]:
    """Return the labels of an axis and where they are."""
    if isinstance(values, CategoricalDistribution):
        return [(str(choice), height(values, choice)) for choice in values.choices]
    low, high = values.low, values.high  # type: ignore[attr-defined]
    middle = [float(np.sqrt(low * high))] if values.log else []  # type: ignore[attr-defined]
    return [(f"{value:.3g}", height(values, value)) for value in (low, *middle, high)]


def curve(heights: np.ndarray[Any, np.dtype[np.float64]]) -> Curve:
    """Return a smooth line that crosses axis number i at height i."""
    points, codes = [(0.0, heights[0])], [Curve.MOVETO]
    for at in range(len(heights) - 1):
        points += [(at + 0.4, heights[at]), (at + 0.6, heights[at + 1]), (at + 1.0, heights[at + 1])]
        codes += [Curve.CURVE4] * 3
    return Curve(points, codes)
