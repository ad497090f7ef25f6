"""The results of a study, beside points.csv: a table as CSV, figures as PNG, and a short report.md that shows both."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun.common import files
from wordrun.common.errors import UserError
from wordrun.study.points import DONE, cell

Row = Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The results of a study."""

    name: str
    """Name of the CSV file, without its suffix."""
    text: Sequence[str]
    """Lines about what was run, and the result."""
    heads: Mapping[str, str]
    """Maps each column of the CSV file to its title in report.md."""
    table: Sequence[Mapping[str, Any]]
    """Rows of values by column."""
    figures: Mapping[str, Any]
    """Matplotlib figures by name."""
    notes: Sequence[str]
    """Lines below the table and the figures."""

    def write(self, folder: Path, points: Sequence[Row], command: Sequence[str]) -> list[Path]:
        """Write NAME.csv, a PNG for each figure, and report.md into ``folder``; return their paths.

        Args:
            folder: the study's folder.
            points: the rows of points.csv.
            command: the study's command line.

        Raises:
            UserError: a file cannot be written.
        """
        page, table = folder / "report.md", folder / f"{self.name}.csv"
        paths = {folder / f"{name}.png": figure for name, figure in self.figures.items()}
        try:
            files.replace(table, _csv(self.heads, self.table))
            for path, figure in paths.items():
                figure.savefig(path)
            files.replace(page, "\n".join([*self._results(), *_conditions(points, command)]))
        except OSError as error:
            raise UserError(
                f"cannot write to {folder}: {error.strerror}; start the study again to write its report"
            ) from None
        return [page, table, *paths]

    def _results(self) -> list[str]:
        cells = [[shown(row[column]) for column in self.heads] for row in self.table]
        images = [f"![{name}]({name}.png)\n" for name in self.figures]
        return [*self.text, "", markdown([*self.heads.values()], cells), "", *images, *self.notes, ""]


def _conditions(points: Sequence[Row], command: Sequence[str]) -> list[str]:
    """Return the lines of report.md about the points without a result, and about where and when the others ran."""
    lines, done = list[str](), [row for row in points if row["state"] == DONE]
    if others := [[row["point"], row["state"], row["reason"]] for row in points if row["state"] != DONE]:
        lines += ["## Points without a result", "", markdown(("point", "state", "reason"), others), ""]
    lines += ["## Conditions", ""]
    for column in ("device", "site", "hosts", "global_batch", "commit", "versions"):
        if values := list(dict.fromkeys(row[column] for row in done if row.get(column))):
            lines.append(f"- {column.replace('_', ' ')}: {', '.join(values)}")
    lines.append(f"- measured: {min(row['started'] for row in done)} to {max(row['started'] for row in done)}")
    return [
        *lines,
        f"- command: `{shlex.join(command)}`",
        f"- options of {done[0]['point']}: `{done[0]['overrides']}`",
        "",
    ]


def _csv(heads: Mapping[str, str], table: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([cell(row[column]) for column in heads] for row in table)
    return text.getvalue()


def shown(value: Any) -> str:
    """Return a value as text: numbers with three significant digits, or all before the point; None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [
        list(heads),
        ["---"] * len(heads),
        *([" ".join(cell.replace("|", r"\|").split()) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def panels(titles: Sequence[str], *, same_y: bool = True) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with a panel for each of ``titles``, at most three in a row, and its axes.

    With ``same_y``, they have the same y axis.
    """
    from matplotlib.figure import Figure

    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained", dpi=150)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=same_y).flat)
    for each, title in zip(axes, titles, strict=False):
        each.set_title(title, fontsize=10)
        each.grid(alpha=0.3)
    for empty in axes[len(titles) :]:
        empty.set_visible(False)
    return figure, axes[: len(titles)]


def colors(count: int) -> list[Any]:
    """Return ``count`` colors, from dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(1, count - 0.5)) for i in range(count)]


def mark(axis: Any, sizes: Sequence[int]) -> None:
    """Mark these ``sizes`` on a logarithmic axis."""
    axis.set_ticks(sizes, [str(size) for size in sizes])
    axis.set_ticks([], minor=True)
