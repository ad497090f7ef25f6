"""The table, the figure and the page of ``wordrun study scaling``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wordrun import files
from wordrun.errors import UserError
from wordrun.study import figure
from wordrun.study.points import DONE, number
from wordrun.study.table import figures, markdown

Row = Mapping[str, str]
HEADS = (
    "tokens/s", "min", "max", "speed-up", "efficiency", "step [ms]", "MFU", "memory [GiB]",
    "node hours per 10^9 tokens",
)  # fmt: skip
NOTES = """\
Tokens/s are the median of {measurements} of {steps} steps each, after {steps} steps to warm up; min and max are
the slowest and the fastest measurement. Speed-up and efficiency refer to the fastest backend on {least}. MFU is the
share of the devices' peak floating-point operations (- where the peak is unknown). Memory is the highest peak of any
rank, on CPUs of the whole process. Node hours count whole nodes."""


@dataclass(frozen=True)
class Study:
    """What the page says about the study as a whole."""

    command: Sequence[str]
    unit: str
    """ranks or nodes."""
    steps: int
    repeats: int


def write(folder: Path, rows: Sequence[Row], study: Study) -> list[Path]:
    """Write scaling.md, .png and .svg, if a point is finished; return their paths.

    Raises:
        UserError: a file cannot be written.
    """
    by_backend: dict[str, list[Row]] = {}
    for row in rows:
        if row["state"] == DONE:
            by_backend.setdefault(row["backend"], []).append(row)
    if not by_backend:
        return []
    page = folder / "scaling.md"
    try:
        files.replace(page, _page(by_backend, rows, study))
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror}; start the study again to write it") from None
    return [page, *_figure(folder, by_backend, study.unit)]


def _page(by_backend: Mapping[str, Sequence[Row]], rows: Sequence[Row], study: Study) -> str:
    done = [row for mine in by_backend.values() for row in mine]
    kind = done[0]["scaling"]
    batch = "the same global batch" if kind == "strong" else "the same number of sequences per rank"
    sizes = ", ".join(dict.fromkeys(row[study.unit] for row in done))
    lines = [f"# {kind.capitalize()} scaling on {sizes} {study.unit}", "", f"Every point trains with {batch}.", ""]
    tables, base = [], _base(done, study.unit)
    least = base[study.unit]
    for backend, mine in by_backend.items():
        cells = [[row[study.unit], *_results(row, base, study.unit)] for row in mine]
        tables += [f"## {backend}", "", markdown((study.unit, *HEADS), cells), ""]
        if (most := cells[-1])[0] != least:
            result = f"{most[1]} tokens/s on {most[0]} {study.unit}, {most[4]} times as many as on {least}"
            lines.append(f"- {backend}: {result} (efficiency {most[5]})")
    lines += ["", "![tokens per second](scaling.svg)", "", *tables]
    unit = study.unit.removesuffix("s") if least == "1" else study.unit
    measurements = f"{study.repeats} measurement{'s' * (study.repeats > 1)}"
    lines += [NOTES.format(steps=study.steps, measurements=measurements, least=f"{least} {unit}"), ""]
    if others := [[row["point"], row["state"], row["reason"]] for row in rows if row["state"] != DONE]:
        lines += ["## Points without a result", "", markdown(("point", "state", "reason"), others, text=3), ""]
    return "\n".join([*lines, "## Conditions", "", *_conditions(done, study), ""])


def _base(rows: Sequence[Row], unit: str) -> Row:
    """Return the fastest of the smallest points."""
    return min(rows, key=lambda row: (int(row[unit]), -(number(row, "tps") or 0.0)))


def _conditions(done: Sequence[Row], study: Study) -> Iterator[str]:
    for name in ("device", "site", "hosts", "global_batch", "commit", "versions"):
        if values := list(dict.fromkeys(row[name] for row in done if row[name])):
            yield f"- {name.replace('_', ' ')}: {', '.join(values)}"
    yield f"- measured: {min(row['started'] for row in done)} to {max(row['started'] for row in done)}"
    yield f"- command: `{shlex.join(study.command)}`"
    yield f"- options of {done[0]['point']}: `{done[0]['overrides']}`"


def _results(row: Row, base: Row, unit: str) -> list[str]:
    """Return the cells of HEADS; ``base`` is the point to which the speed-up refers."""
    tps, step = number(row, "tps") or 0.0, number(row, "step_s") or 0.0
    speed_up = tps / (number(base, "tps") or tps)
    efficiency = speed_up * int(base[unit]) / int(row[unit])
    mfu, cost = number(row, "mfu"), int(row["nodes"]) * 1e9 / tps / 3600
    return [
        figures(tps), *(figures(number(row, name)) for name in ("tps_min", "tps_max")), f"{speed_up:.2f}",
        f"{efficiency:.0%}", figures(1000 * step), "-" if mfu is None else f"{mfu:.1f} %",
        figures(number(row, "memory_gib")), figures(cost),
    ]  # fmt: skip


def _figure(folder: Path, by_backend: Mapping[str, Sequence[Row]], unit: str) -> list[Path]:
    """Draw tokens/s over ranks or nodes, a panel for each backend, with the ideal line."""
    from matplotlib.ticker import EngFormatter, LogLocator

    drawing, panels = figure.panels(list(by_backend))
    done = [row for rows in by_backend.values() for row in rows]
    base, all_sizes = _base(done, unit), sorted({int(row[unit]) for row in done})
    per_size = (number(base, "tps") or 0.0) / int(base[unit])
    for axes, rows in zip(panels, by_backend.values(), strict=True):
        sizes = [int(row[unit]) for row in rows]
        middle, least, most = ([number(row, name) or 0.0 for row in rows] for name in ("tps", "tps_min", "tps_max"))
        both = [(m - lo, hi - m) for lo, m, hi in zip(least, middle, most, strict=True)]
        axes.plot(all_sizes, [per_size * size for size in all_sizes], "--", color="0.5", lw=1, label="ideal")
        axes.errorbar(sizes, middle, list(zip(*both, strict=True)), fmt="o-", ms=4, lw=1.4, capsize=3, label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(all_sizes, [str(size) for size in all_sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.set(xlabel=unit, ylabel="tokens/s")
        axes.label_outer()
    panels[0].legend(frameon=False, fontsize=8)
    return figure.save(drawing, folder, "scaling")
