"""The progress of points: a line for each event, and a table of the results at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from rich.table import Table
from rich.text import Text

from wordrun.common.log import console
from wordrun.common.run_dir import RECORD
from wordrun.study.launch_pool import Ended
from wordrun.study.points import FAILED, Point, Points

STYLES = {"failed": "red", "stopped": "yellow", "pruned": "yellow"}

Result = Callable[[Mapping[str, str]], str]
"""Returns what to show of the row of a finished point."""
Words = Callable[[Point], Sequence[str]]
"""Returns which of a point's options to show."""


class Progress:
    """Prints what happens to points.

    Args:
        table: the points' rows.
        states: the states, by name, of points that are not run now.
        result: returns what to show of the row of a finished point.
        words: returns which of a point's options to show.
    """

    def __init__(self, table: Points, states: Mapping[str, str], result: Result, words: Words) -> None:
        self.table, self.states, self.result, self.words = table, dict(states), result, words
        self.clocks: dict[str, str] = {}

    def started(self, point: Point) -> None:
        """Print that ``point`` has started."""
        self.states[point.name] = "running"
        print(f"point {point.name}  started {' '.join(self.words(point))}".rstrip(), flush=True)

    def ended(self, ended: Ended, state: str) -> None:
        """Print that a point has ended, and how."""
        name, clock = ended.point.name, str(timedelta(seconds=round(ended.seconds)))
        self.states[name], self.clocks[name] = state, clock
        print(f"point {name}  {state} after {clock}  {self._result(name)}".rstrip(), flush=True)

    def summary(self, points: Sequence[Point]) -> str:
        """Print the table, and the failed points with their directories; return the number of each state."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("point", "state", "time", "result", "overrides"):
            table.add_column(name, overflow="fold", justify="left" if name in ("state", "overrides") else "right")
        for point in points:
            state = self.states.get(point.name, "waiting")
            shown, words = Text(state, style=STYLES.get(state, "")), Text(" ".join(self.words(point)))
            table.add_row(point.name, shown, self.clocks.get(point.name, ""), self._result(point.name), words)
        console().print(table)
        for point in points:
            if self.states.get(point.name) == FAILED:
                where = point.dir if (point.dir / RECORD).exists() else point.log
                print(f"point {point.name} failed ({where}): {self.table.rows[point.name]['reason']}")
        counts = {state: list(self.states.values()).count(state) for state in dict.fromkeys(self.states.values())}
        counts["not started"] = len(points) - len(self.states)
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)

    def _result(self, name: str) -> str:
        return self.result(self.table.rows[name]) if self.states.get(name) == "finished" else ""


def varied(points: Sequence[Point]) -> Words:
    """Return a function that returns the options of a point that not all ``points`` share."""
    words = {point.name: [" ".join(point.launch), *point.overrides] for point in points}
    shared = set.intersection(*map(set, words.values())) if len(words) > 1 else {""}
    return lambda point: [word for word in words[point.name] if word not in shared]
