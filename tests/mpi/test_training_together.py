"""Training under mpiexec: the losses of one process, and a failure in the middle of a run."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.device=cpu train.global_batch_size=8
    train.max_iters=20 train.log_interval=1 train.eval_interval=10 train.eval_iters=3
    train.sample_tokens=16 optimizer.warmup_iters=2 model.n_layer=1 model.n_head=2 model.n_embd=32
    model.block_size=32
""")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_under_mpiexec_have_the_losses_of_one_process(ranks: Command, tmp_path: Path) -> None:
    together = ranks(2, "-m", "wordrun", *SMALL, "model.batch_size=2", "hydra.run.dir=two")
    alone = ranks(1, "-m", "wordrun", *SMALL, "model.batch_size=8", "hydra.run.dir=one", under="fork")
    assert (together.returncode, alone.returncode) == (0, 0), together.stderr + alone.stderr
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == 22
    for name in ("loss", "val_loss", "grad_norm", "tokens", "lr"):
        figures = [line[name] for line in one if name in line]
        assert [line[name] for line in two if name in line] == pytest.approx(figures, rel=1e-5), name
    samples = [(tmp_path / name / "samples.txt").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]


BROKEN = f"""
import sys
import time
from pathlib import Path
import torch.distributed
from wordrun import cli, dist
from wordrun.backend.ddp import DDPBackend

right, steps = DDPBackend.train_step, 0

def train_step(self, *args):
    global steps
    steps += 1
    if steps == 4 and torch.distributed.get_rank() == 1:
        while len(Path("run/metrics.jsonl").read_text().splitlines()) < 3:  # rank 0 may still be writing the line
            time.sleep(0.01)
        raise ZeroDivisionError("a bug on rank 1")
    return right(self, *args)

DDPBackend.train_step = train_step
sys.exit(cli.main({[*SMALL, "model.batch_size=4", "hydra.run.dir=run"]!r}))
"""


@pytest.mark.parametrize("under", ["mpiexec", "fork"])
def test_a_rank_that_fails_in_the_middle_ends_the_run_and_keeps_what_was_written(
    under: str, ranks: Command, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = ranks(2, "broken.py", under=under)
    end = time.time()
    assert done.returncode != 0
    assert done.stderr.count("ZeroDivisionError: a bug on rank 1") == 1
    assert "terminate called" not in done.stderr
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    assert end - (tmp_path / "run" / "metrics.jsonl").stat().st_mtime < 10
