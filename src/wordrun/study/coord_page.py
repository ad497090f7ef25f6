"""The tables, figures and page of ``wordrun study coord``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wordrun.runs import metrics
from wordrun.study import figure
from wordrun.study.fits import power_law
from wordrun.study.points import DONE, number
from wordrun.study.results import Row, write_page
from wordrun.study.table import markdown

KINDS = {"standard": "standard", "mup": "muP"}
MEASURES = {"activation": "activation", "change": "change"}
FLAT = 0.2
"""Largest power of the width, in absolute value, with which a layer may change and still count as independent of it:
from 64 to 1,024, a factor of 1.7."""
NOTES = """\
Activation is the mean absolute value of a layer's output for a fixed batch of validation data; change is that of the
difference from the output before the first step. The power is the slope of its logarithm over that of the width. A
parametrization is called flat if the changes of all layers have powers between -{flat} and {flat}, and no activation
one above {flat}. (Activations may shrink: before the first step, muP's logits do.)"""

Slopes = Mapping[str, Mapping[str, Mapping[str, float]]]


def write(folder: Path, rows: Sequence[Row], layers: Sequence[str], command: Sequence[str]) -> list[Path]:
    """Write coord.md and the figures, as far as points are finished; return their paths.

    Raises:
        UserError: a file cannot be written.
    """
    done = [row for row in rows if row["state"] == DONE]
    check = [row for row in done if number(row, f"change/{layers[0]}") is not None]
    transfer = [row for row in done if row not in check]
    if len({(row["parametrization"], row["width"]) for row in check}) < 2 * len(KINDS):
        return []
    slopes, steps = slopes_of(check, layers), int(check[0]["steps"])
    lines = ["# Coordinate check", "", *(f"- {KINDS[kind]}: {verdict(slopes[kind])}" for kind in KINDS), ""]
    heads = ["layer", *(f"{measure}, {KINDS[kind]}" for measure in MEASURES for kind in KINDS)]
    cells = [[layer, *(f"{slopes[k][m][layer]:+.2f}" for m in MEASURES for k in KINDS)] for layer in layers]
    lines += [f"Powers of the width after {steps} steps:", "", markdown(heads, cells), ""]
    each = {step: slopes_of(_after(folder, check, step), layers) for step in range(1, steps + 1)}
    cells = [[str(step), *(_range(found[kind]["change"]) for kind in KINDS)] for step, found in each.items()]
    heads = ["after step", *(f"powers of the changes, {KINDS[kind]}" for kind in KINDS)]
    lines += ["Smallest and largest after each step:", "", markdown(heads, cells), "", "![activations](coord.svg)", ""]
    lines += [NOTES.format(flat=FLAT), ""]
    paths = _draw(folder, check, layers)
    if transfer:
        lines += _transfer(transfer)
        paths += _draw_transfer(folder, transfer)
    write_page(folder / "coord.md", lines, rows, command)
    return [folder / "coord.md", *paths]


def slopes_of(rows: Sequence[Row], layers: Sequence[str]) -> Slopes:
    """Return the powers of the width by parametrization, measure and layer; NaN where there is nothing to fit."""
    return {
        kind: {
            measure: {layer: _slope(_points(rows, kind, f"{measure}/{layer}")) for layer in layers}
            for measure in MEASURES
        }
        for kind in KINDS
    }


def _after(folder: Path, rows: Sequence[Row], step: int) -> list[Row]:
    """Return ``rows`` with what was measured after ``step``, from the run directories that still exist."""
    found: list[Row] = []
    for row in rows:
        lines = metrics.read(folder / row["run_dir"]).other
        measured = {name: dict(zip(*lines.known(name), strict=True)) for name in lines.columns if "/" in name}
        if at := {name: f"{values[step]:.6g}" for name, values in measured.items() if step in values}:
            found.append({**row, **at})
    return found


def _range(slopes: Mapping[str, float]) -> str:
    known = [slope for slope in slopes.values() if not math.isnan(slope)]
    return f"{min(known):+.2f} to {max(known):+.2f}" if known else "-"


def verdict(slopes: Mapping[str, Mapping[str, float]]) -> str:
    """Return whether all layers are flat and, if not, which is the least so."""
    excess = {(m, layer): abs(s) if m == "change" else s for m, each in slopes.items() for layer, s in each.items()}
    worst = max(excess, key=lambda key: -math.inf if math.isnan(excess[key]) else excess[key])
    is_flat = "flat" if excess[worst] <= FLAT else "not flat"
    return f"{is_flat} (the {MEASURES[worst[0]]} of {worst[1]} has the power {slopes[worst[0]][worst[1]]:+.2f})"


def _slope(points: Sequence[tuple[float, float]]) -> float:
    points = [(x, y) for x, y in points if y > 0]  # projections may start with zeros
    if len({x for x, _ in points}) < 2:
        return math.nan
    return power_law([x for x, _ in points], [y for _, y in points]).exponent


def _points(rows: Sequence[Row], kind: str, column: str) -> list[tuple[float, float]]:
    """Return the widths of one parametrization and what was measured there."""
    mine = [(number(row, "width"), number(row, column)) for row in rows if row["parametrization"] == kind]
    return sorted((x, y) for x, y in mine if x is not None and y is not None and math.isfinite(y))


def _draw(folder: Path, rows: Sequence[Row], layers: Sequence[str]) -> list[Path]:
    titles = [f"{MEASURES[measure]}, {KINDS[kind]}" for measure in MEASURES for kind in KINDS]
    image, axes = figure.panels(titles)
    shown = [(measure, kind) for measure in MEASURES for kind in KINDS]
    colors = _colors(len(layers))
    for panel, (measure, kind) in zip(axes, shown, strict=True):
        for layer, color in zip(layers, colors, strict=True):
            points = [(x, y) for x, y in _points(rows, kind, f"{measure}/{layer}") if y > 0]
            panel.plot(*zip(*points, strict=True) if points else ((), ()), "o-", ms=3, lw=1, color=color, label=layer)
        _by_width(panel, sorted({int(row["width"]) for row in rows}))
        panel.set_yscale("log")
    for left in axes[::2]:
        left.set_ylabel("mean absolute value")
    image.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure.save(image, folder, "coord")


def _by_width(panel: Any, widths: Sequence[int]) -> None:
    panel.set(xscale="log", xlabel="width")
    panel.set_xticks(widths, [str(width) for width in widths])
    panel.minorticks_off()


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(1, count - 0.5)) for i in range(count)]


def best_rates(rows: Sequence[Row], kind: str) -> dict[int, float]:
    """Return the learning rate with the lowest loss at each width."""
    widths = sorted({int(row["width"]) for row in rows if row["parametrization"] == kind})
    return {width: min(_losses(rows, kind, width), key=lambda point: point[1])[0] for width in widths}


def _losses(rows: Sequence[Row], kind: str, width: int) -> list[tuple[float, float]]:
    mine = [row for row in rows if row["parametrization"] == kind and int(row["width"]) == width]
    return sorted((number(row, "learning_rate") or 0.0, number(row, "loss") or math.inf) for row in mine)


def _transfer(rows: Sequence[Row]) -> list[str]:
    best = {kind: best_rates(rows, kind) for kind in KINDS}
    widths = sorted({width for each in best.values() for width in each})
    lines = ["## Learning rates", ""]
    for kind, rates in best.items():
        if len(rates) > 1:
            first, last = rates[min(rates)], rates[max(rates)]
            lines.append(
                f"- {KINDS[kind]}: the best learning rate is {first:g} at width {min(rates)} and {last:g} at width "
                f"{max(rates)}"
            )
    cells = [[str(width), *(_best(rows, kind, width) for kind in KINDS)] for width in widths]
    heads = ("width", *(f"best rate (loss), {name}" for name in KINDS.values()))
    steps = rows[0]["steps"]
    return [
        *lines, "", markdown(heads, cells), "", "![loss over learning rate](transfer.svg)", "",
        f"Training losses are means over the last tenth of {steps} steps, in nats per token.", "",
    ]  # fmt: skip


def _best(rows: Sequence[Row], kind: str, width: int) -> str:
    losses = _losses(rows, kind, width)
    if not losses:
        return "-"
    rate, loss = min(losses, key=lambda point: point[1])
    return f"{rate:g} ({loss:.3f})"


def _draw_transfer(folder: Path, rows: Sequence[Row]) -> list[Path]:
    image, axes = figure.panels(list(KINDS.values()))
    widths = sorted({int(row["width"]) for row in rows})
    for panel, kind in zip(axes, KINDS, strict=True):
        for width, color in zip(widths, _colors(len(widths)), strict=True):
            losses = _losses(rows, kind, width)
            panel.plot(*zip(*losses, strict=True), "o-", ms=3, lw=1, color=color, label=str(width))
            panel.plot(*min(losses, key=lambda point: point[1]), "*", ms=10, color=color)
        panel.set(xscale="log", xlabel="learning rate")
    axes[0].set_ylabel("training loss [nats/token]")
    axes[1].legend(title="width", frameon=False, fontsize=8)
    return figure.save(image, folder, "transfer")
