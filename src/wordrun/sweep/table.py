"""The progress of a sweep, as a table on a terminal and as a line per event elsewhere, and its results."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import timedelta

from rich.live import Live
from rich.table import Table
from rich.text import Text

from wordrun.log import console
from wordrun.runs.record import RECORD, load
from wordrun.sweep.folder import Point, Sweep
from wordrun.sweep.pool import Ended, Pool

STYLES = {"running": "green", "failed": "red", "stopped": "yellow", "pruned": "yellow"}
SHOWN = 30
"""Most points in the table while they run."""


class LiveTable:
    """What is shown while a sweep runs; used as a context manager."""

    def __init__(
        self, sweep: Sweep, pool: Pool, metric: str = "", *, higher: bool = False, keys: Collection[str] = ()
    ) -> None:
        """Show the best ``metric``, and of the overrides those of ``keys``, or those that not all points share.

        Without a ``metric``, it is the points' train.best_metric, as soon as one of them has recorded it.
        """
        self.sweep, self.pool, self.keys = sweep, pool, keys
        self._metric = (metric, higher) if metric else None
        self.states: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self._varied: dict[int, tuple[str, ...]] = {}
        self._live: Live | None = None
        self._drawn = 0.0

    def __enter__(self) -> LiveTable:
        """Draw the table, on a terminal."""
        screen = console()
        if screen.is_terminal:
            self._live = Live(self.table(SHOWN), console=screen, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the table, whose last version ``finish`` prints."""
        if self._live:
            self._live.stop()

    def set_states(self, states: Mapping[int, str]) -> None:
        """Show the state of points that have been run before, by their numbers."""
        self.states.update(states)

    def started(self, point: Point) -> None:
        """Show that ``point`` has started."""
        self.states[point.number] = "running"
        self._say(point, "started", "")

    def ended(self, ended: Ended, state: str) -> None:
        """Show that a point has ended, and how."""
        point = ended.point
        self.states[point.number], self.seconds[point.number] = state, ended.seconds
        self._say(point, state, f"after {timedelta(seconds=round(ended.seconds))}  {self.value(point)}")

    def _say(self, point: Point, state: str, more: str) -> None:
        if self._live is None:
            words = "" if state != "started" else " ".join(self.varied(point))
            print(f"point {point.number}  {state} {more or words}".rstrip(), flush=True)

    def varied(self, point: Point) -> tuple[str, ...]:
        """Return what is different from other points."""
        if self.keys:
            return tuple(word for word in point.overrides if word.partition("=")[0] in self.keys)
        if len(self._varied) != len(self.sweep.points):
            numbers = (each.number for each in self.sweep.points)
            self._varied = dict(zip(numbers, self.sweep.varied(), strict=True))
        return self._varied[point.number]

    def metric(self) -> tuple[str, bool]:
        """Return the metric that is shown, and whether higher values are better."""
        begun = (point for point in self.sweep.points if (point.dir / RECORD).exists()) if self._metric is None else ()
        if (point := next(iter(begun), None)) is not None:
            record = load(point.dir)
            self._metric = record.best_metric, record.higher_is_better
        return self._metric or ("val_loss", False)

    def value(self, point: Point) -> str:
        """Return the point's best value, for people to read."""
        metric, higher = self.metric()
        best = point.best(metric, higher=higher)
        return "" if best is None else f"best {metric} {best:.4f}"

    def draw(self) -> None:
        """Bring the table up to date, once per second."""
        if self._live and time.monotonic() - self._drawn > 1:
            self._drawn = time.monotonic()
            self._live.update(self.table(SHOWN), refresh=True)

    def table(self, most: int) -> Table:
        """Return the table of at most ``most`` points, the running ones first of all."""
        begun = {each.point.number: each.begun for each in self.pool.running}
        points = sorted(self.sweep.points, key=lambda point: point.number not in begun)[:most]
        left_out = len(self.sweep.points) - len(points)
        more = f"{left_out} more points" if left_out else None
        table = Table(box=None, pad_edge=False, header_style="bold", caption=more)
        metric, higher = self.metric()
        for name in ("point", "state", "time", f"best {metric}", "overrides"):
            table.add_column(name, overflow="fold", justify="left" if name in ("state", "overrides") else "right")
        for point in sorted(points, key=lambda point: point.number):
            state = self.states.get(point.number, "waiting")
            seconds = self.seconds.get(point.number)
            if point.number in begun:
                seconds = time.monotonic() - begun[point.number]
            clock = "" if seconds is None else str(timedelta(seconds=round(seconds)))
            best = None if state == "waiting" else point.best(metric, higher=higher)
            table.add_row(
                str(point.number), Text(state, style=STYLES.get(state, "")), clock,
                "" if best is None else f"{best:.4f}", Text(" ".join(self.varied(point))),
            )  # fmt: skip
        return table

    def summary(self) -> str:
        """Print the final table, and the failed points with their directories."""
        screen = console()
        screen.print(self.table(len(self.sweep.points)))
        failed = [point for point in self.sweep.points if self.states.get(point.number) == "failed"]
        for point in failed:
            where = point.dir if (point.dir / "run.json").exists() else point.log
            print(f"point {point.number} failed ({where}): {point.reason()}")
        counts = {state: list(self.states.values()).count(state) for state in dict.fromkeys(self.states.values())}
        counts["not started"] = len(self.sweep.points) - len(self.states)
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
