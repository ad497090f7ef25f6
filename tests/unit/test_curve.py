"""The loss curve over the progress bar."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from wordrun.train.hooks.standard import POINTS, ROWS, TerminalCurve


def screen(width: int = 80, height: int = 24, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, height=height, force_terminal=True, color_system=None)


def drawn(curve: TerminalCurve, width: int = 80) -> list[str]:
    """Return the rows that ``curve`` takes on a terminal."""
    console = screen(width)
    with console.capture() as capture:
        console.print(curve)
    return capture.get().splitlines()


def dots(rows: list[str]) -> list[list[int]]:
    """Return the rows, from the top, in which each column of dots has one."""
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    return [
        [4 * number + y for number, row in enumerate(rows) for y in range(4) if ord(row[8 + x // 2]) & bits[x % 2][y]]
        for x in range(2 * (len(rows[0]) - 8))
    ]


def test_a_falling_loss_is_a_falling_curve_with_its_limits_beside_it() -> None:
    curve = TerminalCurve()
    for step in range(1, 1001):
        curve.add(step, 5 - 3 * step / 1000)
    for width in (60, 80, 120):
        rows = drawn(curve, width)
        assert [len(row) for row in rows] == [width] * ROWS
        assert (float(rows[0][:8]), float(rows[-1][:8])) == pytest.approx((5, 2), abs=0.05)
        columns = dots(rows)
        assert all(column for column in columns), "no gaps"
        assert (columns[0], columns[-1]) == ([0], [4 * ROWS - 1])
        assert columns == sorted(columns)


def test_a_spike_reaches_the_top() -> None:
    curve = TerminalCurve()
    for step in range(1, 101):
        curve.add(step, 9.0 if step == 50 else 2.0)
    columns = dots(drawn(curve))
    assert 0 in [row for column in columns[60:84] for row in column]
    assert columns[0] == columns[-1] == [4 * ROWS - 1]


def test_few_points_and_equal_losses_are_drawn_too() -> None:
    curve = TerminalCurve()
    assert drawn(curve) == []
    curve.add(1, 3.0)
    assert drawn(curve) == []
    curve.add(10, math.nan)
    curve.add(20, 3.0)
    assert all(column == [0] for column in dots(drawn(curve)))
    curve.add(10, 1.0)  # after a rollback
    assert drawn(curve)[-1].startswith("      1 ")


def test_a_long_run_keeps_a_limited_number_of_points() -> None:
    curve = TerminalCurve()
    for step in range(1, 10 * POINTS):
        curve.add(step, 1 / step)
    assert len(curve._points) <= POINTS
    assert curve._points == sorted(curve._points)
    assert len(drawn(curve)) == ROWS


@pytest.mark.parametrize(
    ("width", "height", "encoding", "fits"),
    [
        (80, 24, "utf-8", True),
        (60, 20, "utf-8", True),
        (59, 24, "utf-8", False),
        (80, 19, "utf-8", False),
        (80, 24, "latin-1", False),
    ],
)
def test_only_a_large_terminal_has_a_curve(width: int, height: int, encoding: str, fits: bool) -> None:
    assert TerminalCurve.fits(screen(width, height, encoding)) == fits
