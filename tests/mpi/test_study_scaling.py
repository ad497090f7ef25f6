"""A scaling study on real ranks."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Command

SMALL = ("data=sample", "model.n_layer=4", "model.n_embd=16", "model.n_head=4", "model.block_size=16",
         "model.batch_size=4", "train.device=cpu")  # fmt: skip
STUDY = (sys.executable, "-m", "wordrun.study", "scaling")


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "points.csv").open(newline="") as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def test_1_2_and_4_ranks(command: Command, tmp_path: Path) -> None:
    """Each point has a row, and the second call runs nothing."""
    words = (*STUDY, "--ranks", "1,2,4", "--steps", "2", "--repeats", "2", "--out", "study", *SMALL)
    done = command(*words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "study")
    assert {name: (row["state"], row["ranks"]) for name, row in found.items()} == {
        f"DDP-{n}": ("done", f"{n}") for n in (1, 2, 4)
    }
    for row in found.values():
        assert float(row["tps_min"]) <= float(row["tps"]) <= float(row["tps_max"])
        assert row["global_batch"] == "16"
        assert "torch" in row["versions"]
        assert float(row["memory_gib"]) > 0
    assert "Strong scaling on 1, 2, 4 ranks" in (tmp_path / "study" / "scaling.md").read_text()
    assert (tmp_path / "study" / "scaling.svg").stat().st_size > 1000
    again = command(*words)
    assert "3 points, 0 of them to run" in again.stdout
    assert rows(tmp_path / "study") == found
