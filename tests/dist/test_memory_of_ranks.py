"""Ranks with different amounts of memory decide together whether their run fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

SCRIPT = """
import sys
from wordrun import dist
from wordrun.common import cgroup
from wordrun.commands import train

rank = dist.discover().rank
cgroup.memory = lambda: 2 * (2**30 if rank else 2**40)  # for both ranks of the host
sys.exit(train.main())
"""


@pytest.mark.parametrize("under", ["fork", "mpiexec"])
def test_the_rank_with_least_memory_decides(under: str, ranks: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["data=sample", "tracker=jsonl", "train.device=cpu", "model.batch_size=50000", "model.n_layer=20"]
    done = ranks(2, "script.py", *words, under=under)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("not enough memory: this run needs about") == 1
    assert " has 1.00 GiB available for each of its 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()
