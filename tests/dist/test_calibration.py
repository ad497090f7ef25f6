"""What tensor parallelism adds on each rank is measured on groups that divide the model, if these ranks can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wordrun.plan.time import load_speeds

SMALL = [
    "data=sample", "tokenizer=byte", "train.device=cpu", "train.dtype=fp32", "model.block_size=16",
    "model.batch_size=1",
]  # fmt: skip
SCRIPT = """
import sys
from wordrun.study import calibrate

calibrate.ROUNDS = calibrate.IN_A_ROW = 1  # how exact the times are does not matter here
measure = calibrate.RankTimer._seconds


def seconds(ranks, *actions):
    # Those of tensor parallelism are differences of small times, which other load can exceed: they are given [s].
    if len(actions) < 5:
        return measure(ranks, *actions)
    for action in actions:
        action()
    undivided, divided, pairs = (3.0, 5.0), (4.0, 7.0), 0.1 * calibrate.PAIRS  # one block, two blocks
    return [*undivided, *divided, pairs]


calibrate.RankTimer._seconds = seconds
sys.exit(calibrate.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("count", "heads", "groups"), [(4, 4, [2, 4]), (2, 3, [])])
def test_what_tensor_parallelism_adds(count: int, heads: int, groups: list[int], ranks: Any, tmp_path: Path) -> None:
    words = ("--no-bandwidth", *SMALL, f"model.n_head={heads}", f"model.n_embd={16 * heads}")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(count, "script.py", "speeds.json", *words, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_speeds(tmp_path / "speeds.json")
    assert [each["ranks"] for each in found.split] == groups
    for each in found.split:  # a block waits for 4 pairs of collectives of 0.1 s, the rest for 2
        assert each["block_s"] == pytest.approx(3 - 2 / each["ranks"] - 4 * 0.1)
        assert each["rest_s"] == pytest.approx(1 - 1 / each["ranks"] - 2 * 0.1)
    assert found.copy_s > 0
