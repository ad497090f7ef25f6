"""Reads metrics.jsonl: line by line, or as columns with 8 bytes per number, so that 10^6 lines fit into memory."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from wordrun.common.run_dir import METRICS

LARGE = 2**53
"""Integers of this size or more are not measurements, and may not fit into a column."""


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl; None: it is broken, such as the last one of a run that was killed."""
    try:
        # Given bytes, json.loads would guess the encoding of each line separately.
        line = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] < LARGE else None


def each_line(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, without those that are broken."""
    with (run_dir / METRICS).open("rb") as file:
        yield from (line for text in file if (line := parsed(text)) is not None)


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, without those that are broken."""
    return list(each_line(run_dir))


def between(run_dir: Path, after: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of the steps after ``after`` up to ``last``, except for lines with lists.

    Another thread may append lines meanwhile.
    """
    for line in each_line(run_dir):
        if line["step"] > last:
            return
        if line["step"] > after and not any(isinstance(each, list) for each in line.values()):
            yield line


class Table:
    """Columns of numbers by name, all of the same length; NaN where a line lacks the metric."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0

    def add(self, line: dict[str, object]) -> None:
        """Append a line; what is not a number counts as missing."""
        for name, value in line.items():
            if isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGE):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self.rows - len(column)))
                column.append(value)
        self.rows += 1
        for column in self.columns.values():
            if len(column) < self.rows:
                column.append(math.nan)

    def __contains__(self, name: str) -> bool:
        """Return whether any line has the metric."""
        return name in self.columns

    def __getitem__(self, name: str) -> array[float]:
        """Return a metric's column."""
        return self.columns[name]

    def known(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps in which a metric is known, and its values there."""
        found = [(step, value) for step, value in zip(self["step"], self[name], strict=True) if not math.isnan(value)]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric that is a finite number."""
        return next((value for value in reversed(self.columns.get(name, ())) if math.isfinite(value)), None)


class Metrics:
    """What a run has logged: training steps, evaluations and the metrics of hooks, each with a column ``step``."""

    def __init__(self) -> None:
        self.training, self.evaluation, self.other = Table(), Table(), Table()
        self.broken = 0
        """Lines that are not JSON, such as the last one of a run that was killed."""

    def add(self, text: str | bytes) -> None:
        """Add a line of metrics.jsonl."""
        line = parsed(text)
        if line is None:
            self.broken += 1
        else:
            table = self.training if "loss" in line else self.evaluation if "val_loss" in line else self.other
            table.add(line)

    @property
    def last_step(self) -> float:
        """The last step of any line; -1: there is none."""
        tables = (self.training, self.evaluation, self.other)
        return max((max(table["step"]) for table in tables if table.rows), default=-1)

    def spikes(self) -> list[int]:
        """Return the rows of ``training`` that count more loss spikes than the row before."""
        counts = self.training.columns.get("spikes", ())
        return [row for row, (before, now) in enumerate(pairwise([0, *counts])) if now > before]


def read(run_dir: Path) -> Metrics:
    """Return the metrics of a run; empty if it has none yet."""
    metrics = Metrics()
    path = run_dir / METRICS
    try:
        if path.is_file():  # opening a pipe would wait
            with path.open("rb") as file:
                for text in file:
                    metrics.add(text)
    except OSError:  # no permission, or a failing disk
        pass
    return metrics


def evaluations(run_dir: Path, metric: str) -> list[tuple[int, float]]:
    """Return the steps and the finite values of ``metric`` in a run's evaluations so far."""
    table = read(run_dir).evaluation
    if metric not in table:
        return []
    pairs = zip(table["step"], table[metric], strict=True)
    return [(int(step), value) for step, value in pairs if math.isfinite(value)]
