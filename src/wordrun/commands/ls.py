"""``wordrun ls [DIR]``: the runs below outputs/ as a table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.files import read_bytes
from wordrun.common.run_dir import METRICS, find
from wordrun.common.section import Section
from wordrun.common.validation import positive
from wordrun.config.arguments import run, with_first
from wordrun.track.metrics_jsonl import parsed
from wordrun.track.run_json import RunRecord, load, state_of

USAGE = """\
Show the runs below a folder, the most recently active one at the bottom.

  wordrun ls                 # the runs below outputs/
  wordrun ls multirun        # below another folder
  wordrun ls last=5
"""
STYLES = {"running": "green", "failed": "red", "died": "red", "silent": "yellow", "stopped": "yellow"}
TAIL_BYTES = 16384
"""How much of the end of metrics.jsonl is read: the last line of training and usually an evaluation."""


@dataclass
class LsConfig(Section):
    """Which runs to show."""

    dir: str = "outputs"
    """Folder to search."""
    last: int = 30
    """Number of runs to show, the most recently active ones."""

    def problems(self) -> list[str]:
        return list(positive("", self, "last"))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    return run(LsConfig, USAGE, show, with_first(argv, "dir"))


def show(options: LsConfig) -> None:
    """Print the table of runs.

    Raises:
        ConfigError: there is none.
    """
    from rich.table import Table
    from rich.text import Text

    from wordrun.common.log import console

    folder = Path(options.dir)
    records = sorted((load(path) for path in find(folder)), key=lambda record: record.written)
    if not records:
        raise ConfigError(f"there are no runs below {folder.absolute()}; wordrun ls DIR searches another folder")
    shown = records[-options.last :]
    metrics = list(dict.fromkeys(record.best_metric for record in shown if record.best_metric != "val_loss"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for name in ("step", "loss", "val_loss", "val_bpb", *(f"best {metric}" for metric in metrics), "speed", "written"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hosts", overflow="ellipsis", no_wrap=True)
    for record in shown:
        state = state_of(record)
        cells = row(record, metrics)
        name = str(record.path.relative_to(folder.resolve()))
        table.add_row(Text(name), Text(state, style=STYLES.get(state, "")), *map(Text, cells))
    console().print(table)
    if len(records) > options.last:
        print(f"{len(records) - options.last} older runs not shown (last={len(records)} shows all)")


def row(record: RunRecord, metrics: Sequence[str] = ()) -> list[str]:
    """Return a run's step, loss, validation loss, bits per byte, speed, age and hosts, for people to read.

    After the losses, each of ``metrics`` has a cell: its best value if it is the run's train.best_metric, else empty.
    """
    training, evaluation = last_lines(record.path / METRICS)
    step = max(training.get("step", 0), evaluation.get("step", 0), record.facts.get("steps", 0))
    rates = ((training.get(name), unit) for name, unit in RATES)
    rate = next((f"{_number(rate)} {unit}" for rate, unit in rates if rate and isinstance(rate, int | float)), "")
    hosts = record.hosts
    where = hosts[0] + (f" +{len(hosts) - 1}" if len(hosts) > 1 else "") if hosts else ""
    losses = [evaluation.get(name, record.facts.get(name)) for name in ("val_loss", "val_bpb")]
    best = [record.best_value() if metric == record.best_metric else None for metric in metrics]
    values = [f"{value:.4f}" if isinstance(value, float) else "" for value in (training.get("loss"), *losses, *best)]
    return [str(step), *values, rate, f"{age(time.time() - record.written)} ago", where]


RATES = (("tps", "tok/s"), ("sps", "ex/s"))


def last_lines(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last line of training and the last of an evaluation near the end of metrics.jsonl."""
    found: dict[bool, dict[str, Any]] = {}
    for text in read_bytes(file, TAIL_BYTES).splitlines():
        if (line := parsed(text)) is not None:  # the first line is incomplete, and the last may be
            found["loss" in line] = line
    return found.get(True, {}), found.get(False, {})


def age(seconds: float) -> str:
    """Return a duration with its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _number(value: float) -> str:
    """Return ``value`` with three digits and a unit prefix."""
    power = min(max(int(math.log10(value)) // 3, 0), 4) if value >= 1 else 0
    return f"{value / 1000**power:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


if __name__ == "__main__":
    sys.exit(main())
