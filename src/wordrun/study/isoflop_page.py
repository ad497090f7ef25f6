"""The table, figure and page of ``wordrun study isoflop``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wordrun import files
from wordrun.errors import UserError
from wordrun.study import figure
from wordrun.study.fits import Optimum, PowerLaw, minimum, power_law
from wordrun.study.points import DONE, number
from wordrun.study.results import Row, write_page
from wordrun.study.table import figures, markdown

HEADS = ("budget [FLOPs]", "sizes", "best N", "error", "tokens D", "D / N", "loss")
NOTES = """\
N counts the weights of matrix products: the blocks' and the output layer's, without embeddings. FLOPs are wordrun's own
count, 6 N and the attention's share for each token. The best N is the minimum of a parabola in log N, and its error the
standard error that follows from the scatter of the losses around it; D is interpolated between the runs. Minima outside
the range of trained sizes are extrapolated, and the power laws leave them out."""


@dataclass(frozen=True)
class Budget:
    """The runs with one budget, and the best size."""

    flops: float
    points: Sequence[tuple[float, float, float]]
    """N, tokens and loss of each run, by N."""
    best: Optimum | None

    @property
    def tokens(self) -> float:
        """Tokens of the best size, interpolated between the runs."""
        assert self.best is not None
        sizes, tokens, _ = zip(*self.points, strict=True)
        return float(np.exp(np.interp(np.log(self.best.x), np.log(sizes), np.log(tokens))))


def write(folder: Path, rows: Sequence[Row], command: Sequence[str]) -> list[Path]:
    """Write isoflop.md, .csv, .png and .svg, if a point is finished; return their paths.

    Raises:
        UserError: a file cannot be written.
    """
    found = budgets(rows)
    if not found:
        return []
    laws = fitted(found)
    lines = ["# Best model size for each budget", ""]
    for name, what in (("n", "N"), ("tokens", "D")):
        if law := laws.get(name):
            lines.append(f"- {what} = {law.factor:.3g} C^{shown(law.exponent, law.error)}")
    if not laws:
        lines.append("- no power law: it needs the minima of at least two budgets")
    lines += ["", markdown(HEADS, [_cells(each) for each in found]), "", "![loss over model size](isoflop.svg)", ""]
    page, table = folder / "isoflop.md", folder / "isoflop.csv"
    write_page(page, [*lines, NOTES, ""], rows, command)
    try:
        files.replace(table, _csv(found))
    except OSError as error:
        raise UserError(f"cannot write {table}: {error.strerror}; start the study again to write it") from None
    return [page, table, *_draw(folder, found, laws.get("n"))]


def budgets(rows: Sequence[Row]) -> list[Budget]:
    """Return the budgets with finished points, the smallest first, each with its fit."""
    groups: dict[float, list[tuple[float, float, float]]] = {}
    for row in rows:
        n, tokens, loss = (number(row, name) for name in ("n", "tokens", "val_loss"))
        if row["state"] == DONE and None not in (n, tokens, loss):
            groups.setdefault(float(row["budget"]), []).append((n or 0.0, tokens or 0.0, loss or 0.0))
    return [
        Budget(flops, sorted(points), minimum([n for n, _, _ in points], [loss for _, _, loss in points]))
        for flops, points in sorted(groups.items())
    ]


def fitted(found: Sequence[Budget]) -> Mapping[str, PowerLaw]:
    """Return the best N and its tokens as powers of the budget; empty with fewer than two minima."""
    inside = [(each, each.best) for each in found if each.best is not None and each.best.inside]
    if len(inside) < 2:
        return {}
    flops, errors = [each.flops for each, _ in inside], [best.error for _, best in inside]
    return {
        "n": power_law(flops, [best.x for _, best in inside], errors),
        # At a given budget, twice the size leaves about half the tokens: the relative errors are the same.
        "tokens": power_law(flops, [each.tokens for each, _ in inside], errors),
    }


def shown(value: float, error: float | None) -> str:
    """Return a value with its error, if it is known."""
    return f"{value:.3f}" if error is None else f"({value:.3f} ± {error:.3f})"


def _cells(each: Budget) -> list[str]:
    best, sizes = each.best, str(len(each.points))
    if best is None:
        why = "no minimum" if len(each.points) > 2 else "too few sizes"
        return [f"{each.flops:.3g}", sizes, why, *["-"] * 4]
    if not best.inside:
        beyond = "below the smallest" if best.x < each.points[0][0] else "above the largest"
        return [f"{each.flops:.3g}", sizes, beyond, *["-"] * 4]
    error = "-" if best.error is None else f"{best.error:.1%}"
    ratio = each.tokens / best.x
    numbers = [figures(best.x), error, figures(each.tokens), figures(ratio), f"{best.y:.4f}"]
    return [f"{each.flops:.3g}", sizes, *numbers]


def _csv(found: Sequence[Budget]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("budget", "sizes", "n", "n_relative_error", "tokens", "loss", "inside"))
    for each in found:
        if each.best is not None:
            error = "" if each.best.error is None else f"{each.best.error:.6g}"
            numbers = (f"{value:.6g}" for value in (each.best.x, each.tokens, each.best.y))
            n, tokens, loss = numbers
            writer.writerow((f"{each.flops:g}", len(each.points), n, error, tokens, loss, each.best.inside))
    return text.getvalue()


def _draw(folder: Path, found: Sequence[Budget], law: PowerLaw | None) -> list[Path]:
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator, NullLocator

    image, (left, right) = figure.panels(["loss of each size", "best size of each budget"], height=3.8, same_y=False)
    for number_, each in enumerate(found):
        color = colormaps["viridis"](number_ / max(1, len(found) - 0.5))
        sizes = [n for n, _, _ in each.points]
        left.plot(sizes, [loss for _, _, loss in each.points], "o", ms=4, color=color, label=f"{each.flops:.3g} FLOPs")
        best = each.best
        if best is None:
            continue
        span = np.geomspace(sizes[0], sizes[-1], 100)
        left.plot(span, [best.at(x) for x in span], lw=1, color=color)
        if best.inside:
            left.plot(best.x, best.y, "*", ms=11, color=color)
            right.errorbar(each.flops, best.x, yerr=_bar(best), fmt="*", ms=10, capsize=3, color=color)
    left.set(xscale="log", xlabel="N (weights of matrix products)", ylabel="validation loss [nats/token]")
    left.legend(frameon=False, fontsize=8)
    if law:
        _line(right, found, law)
    right.set(xscale="log", yscale="log", xlabel="budget C [FLOPs]", ylabel="best N")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+0", "e").replace("e+", "e"))
        axis.set_minor_locator(NullLocator())
    return figure.save(image, folder, "isoflop")


def _bar(best: Optimum) -> Any:
    """Return the lengths of the error bars below and above; the error is one of the logarithm."""
    return None if best.error is None else [[best.x * (1 - np.exp(-best.error))], [best.x * (np.exp(best.error) - 1)]]


def _line(axes: Any, found: Sequence[Budget], law: PowerLaw) -> None:
    flops = np.geomspace(found[0].flops / 1.5, found[-1].flops * 1.5, 50)
    label = f"N = {law.factor:.2g} C^{shown(law.exponent, law.error)}"
    axes.plot(flops, [law.at(x) for x in flops], "--", lw=1, color="gray", label=label)
    axes.legend(frameon=False, fontsize=8)
