"""A sweep whose points have several ranks each."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = pytest.mark.forked_programs

SMALL = tuple(
    shlex.split("""
    model=nano
    data=sample tracker=jsonl model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16
    model.batch_size=2 train.global_batch_size=4 train.max_iters=2 train.eval_interval=1
    train.eval_iters=1 train.device=cpu train.dtype=fp32
""")
)


def test_each_point_is_a_launch_of_two_ranks(command: Command, tmp_path: Path) -> None:
    sweep = ("-m", *SMALL, "train.seed=1,2", "hydra/launcher=wordrun", "hydra.launcher.np=2", "hydra.sweep.dir=s")
    done = command("wordrun", *sweep, timeout=170)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("s/*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    records = [json.loads((tmp_path / "s" / str(point) / "launch.json").read_text()) for point in range(2)]
    assert [record["np"] for record in records] == [2, 2]
    assert [record["exit_status"] for record in records] == [0, 0]
    assert len({record["run_id"] for record in records}) == 2
    values = [row.split()[5] for row in done.stdout.splitlines() if row.split()[1:2] == ["finished"] and "seed" in row]
    assert len(values) == 2
    assert min(map(float, values)) > 0


def test_sweeps_that_start_together_have_folders_of_their_own(start: Start, tmp_path: Path) -> None:
    """Two members of a job array, on one of whose file systems a lock would not help."""
    sweep = ["wordrun", "-m", *SMALL, "hydra/launcher=wordrun", "train.global_batch_size=2"]
    array = {"SLURM_ARRAY_JOB_ID": "7", "PATH": os.environ["PATH"]}
    jobs = [
        start(*sweep, f"train.seed={2 * n},{2 * n + 1}", env={**os.environ, **array, "SLURM_ARRAY_TASK_ID": str(n)})
        for n in range(2)
    ]
    said = [job.communicate(timeout=170) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    folders = sorted((tmp_path / "outputs" / "sweeps").iterdir(), key=lambda path: path.name[-1])
    assert [re.sub(r"^\d{8}-\d{6}-[0-9a-f]{4}", "", folder.name) for folder in folders] == ["-7_0", "-7_1"]
    for n, folder in enumerate(folders):
        with (folder / "points.csv").open(newline="") as file:
            rows = [(row["state"], row["overrides"].split()[-1]) for row in csv.DictReader(file)]
        assert rows == [("done", f"train.seed={2 * n}"), ("done", f"train.seed={2 * n + 1}")]
