"""A small loss curve for terminals, in braille characters."""

from __future__ import annotations

import math
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

ROWS = 5
POINTS = 2000
"""Above this number, neighboring points are averaged."""
MARGIN = 8
"""Columns for the numbers beside the curve."""
LEAST = (60, 20)
"""Columns and lines that a terminal must have: on a smaller one, the curve would take the place of the log."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille character: two columns from the left, each from the top."""


class TerminalCurve:
    """Draws the losses so far over the width of the terminal."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._drawn = Text()
        self._width = 0

    @staticmethod
    def fits(screen: Console) -> bool:
        """Return whether ``screen`` is large enough for a curve and can show it."""
        return screen.width >= LEAST[0] and screen.height >= LEAST[1] and screen.encoding.lower().startswith("utf")

    def add(self, step: int, loss: float) -> None:
        """Add a point; points of this and later steps are removed, because the run has rolled back."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if math.isfinite(loss):
            self._points.append((step, loss))
        if len(self._points) > POINTS:
            self._points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs(self._points)]
        self._width = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the curve, once it has two points."""
        if self._width != options.max_width:  # else it has not changed since the last refresh
            self._width = options.max_width
            self._drawn = self._draw(self._width - MARGIN)
        if self._drawn:
            yield self._drawn

    def _draw(self, columns: int) -> Text:
        if len(self._points) < 2 or columns < LEAST[0] // 2:  # the terminal has become narrow
            return Text()
        heights, lowest, highest = self._heights(2 * columns, 4 * ROWS)
        cells = [[0] * columns for _ in range(ROWS)]
        for x, (before, now) in enumerate(pairwise([heights[0], *heights])):
            low, high = sorted((before + (now > before) - (now < before) if now != before else now, now))
            for y in range(low, high + 1):
                cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        labels = {0: f"{highest:.3g}", ROWS - 1: f"{lowest:.3g}"}
        text = Text(no_wrap=True)
        for number, row in enumerate(cells):
            text.append(f"{labels.get(number, ''):>{MARGIN - 1}} ", "dim")
            text.append("".join(chr(0x2800 + bits) for bits in row) + "\n" * (number < ROWS - 1), "cyan")
        return text

    def _heights(self, columns: int, rows: int) -> tuple[list[int], float, float]:
        """Return the row of the curve in each column of dots, from the top, and the lowest and the highest loss."""
        first, last = self._points[0][0], self._points[-1][0]
        means: list[list[float]] = [[] for _ in range(columns)]
        for step, loss in self._points:
            means[int((columns - 1) * (step - first) / (last - first))].append(loss)
        known = [(x, sum(losses) / len(losses)) for x, losses in enumerate(means) if losses]
        lowest, highest = min(loss for _, loss in known), max(loss for _, loss in known)
        scale = (rows - 1) / (highest - lowest or 1.0)
        heights = [rows - 1] * columns
        for (x, a), (end, b) in pairwise(known):
            for column in range(x, end + 1):
                loss = a + (b - a) * (column - x) / (end - x)
                heights[column] = round((highest - loss) * scale)
        return heights, lowest, highest


def pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the points two by two; the last one is paired with itself if their number is odd."""
    return [(points[i], points[min(i + 1, len(points) - 1)]) for i in range(0, len(points), 2)]
