"""What benchmarks/race.py counts, on outputs like those of both programs."""

from __future__ import annotations

import pytest

from race import Result, between, row

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


def test_evaluations_do_not_count() -> None:
    seconds, stepping, steps = between(NANOGPT, r"^iter \d+: loss", r"^step \d+: train loss")
    assert (seconds, stepping, steps) == (6.0, 2.0, 3)


def test_a_line_of_the_table_has_means_and_deviations() -> None:
    results = [Result(5.0, 1.5, 80, 1.83, 823_232, 24), Result(7.0, 2.5, 80, 1.85, 823_232, 24)]
    assert row("wordrun", results) == ("| wordrun | 823,232 | 6.0 ± 1.4 | 2.0 ± 0.7 | 80 | 122,880 | 1.8400 ± 0.0141 |")
    assert row("wordrun", results[:1]) == "| wordrun | 823,232 | 5.0 | 1.5 | 80 | 122,880 | 1.8300 |"
