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

calibrate.ROUNDS = 2  # how exact the times are does not matter here
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
    # Differences of two times: where other load makes the first shorter, they are 0.
    assert all(each["block_s"] >= 0 and each["rest_s"] >= 0 for each in found.split)
    assert not groups or any(each["block_s"] > 0 for each in found.split)
    assert found.copy_s > 0
