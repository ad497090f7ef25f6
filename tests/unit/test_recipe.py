"""What benchmarks/recipe.py counts, on outputs like those of both programs."""

from __future__ import annotations

import pytest

from recipe import Result, compared, points, row, seconds_of_nanogpt

pytestmark = pytest.mark.unit

NANOGPT = [
    (3.0, "using fused AdamW: False\n"),
    (5.0, "step 0: train loss 4.2, val loss 4.2\n"),  # 2 s of evaluation
    (6.0, "iter 0: loss 4.2, time 3000.00ms, mfu -100.00%\n"),
    (7.0, "iter 1: loss 4.0, time 1000.00ms, mfu -100.00%\n"),
    (9.5, "step 2: train loss 3.9, val loss 3.9\n"),  # 2.5 s
    (9.6, "saving checkpoint to out\n"),
    (10.5, "iter 2: loss 3.9, time 3500.00ms, mfu -100.00%\n"),
]
WORDRUN = [
    {"step": 1, "loss": 4.0, "dt": 1.0, "time": 1.0},
    {"step": 2, "loss": 3.0, "dt": 0.5, "time": 1.5},
    {"step": 2, "val_loss": 3.1},  # 2 s
    {"step": 3, "loss": 2.0, "dt": 0.5, "time": 4.0},
    {"step": 4, "loss": 1.0, "dt": 0.5, "time": 4.5},
    {"step": 4, "val_loss": 1.1},
]


def test_evaluations_do_not_count() -> None:
    assert seconds_of_nanogpt(NANOGPT) == (6.0, [(5.0, 3.9)])
    assert points(3.0, WORDRUN) == [(2, 3.5, 3.1), (4, 4.5, 1.1)]


@pytest.mark.parametrize(
    ("mark", "theirs", "found"),
    [
        (3.1, 4.0, Result(3.1, 4.0, 3.5, 2, 3.1)),
        (3.0, 5.0, Result(3.0, 5.0, 4.5, 4, 1.1)),
        (1.0, 3.0, Result(1.0, 3.0, float("inf"), 0, float("inf"))),
    ],
)
def test_the_mark_is_reached_at_the_first_evaluation_below_it(mark: float, theirs: float, found: Result) -> None:
    assert compared(mark, theirs, points(3.0, WORDRUN)) == found


def test_a_line_of_the_table_has_means() -> None:
    results = [Result(2.0, 8.0, 1.0, 10, 1.5), Result(2.0, 12.0, 3.0, 30, 1.7)]
    assert row("play", results) == "| play | 2.000 | 10.0 | 2.0 | 10-30 | 0.20 | 1.600 | -0.400 |"
