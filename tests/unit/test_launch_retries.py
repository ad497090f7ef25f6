"""Ranks that get SIGKILL, and when --retries starts them again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from wordrun.launch.launchers.hydra import Hydra
from wordrun.launch.retries import Outcome, Retries

pytestmark = pytest.mark.timeout(600)

# wordrun, which is killed before the steps that a file lists, each time at the next one.
KILLED = """
import os, signal, sys
from pathlib import Path
from wordrun import cli
from wordrun.train.trainer import Trainer
step = Trainer._train_step
def killed(trainer, lr):
    steps = Path("steps").read_text().split()
    if steps and trainer.step == int(steps[0]):
        Path("steps").write_text(" ".join(steps[1:]))
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, lr)
Trainer._train_step = killed
sys.exit(cli.main())
"""
TINY = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.max_iters=12 train.log_interval=1 train.eval_interval=100
    train.checkpoint_interval=3 model.n_layer=1 model.n_head=1 model.n_embd=16 model.block_size=16
    model.batch_size=2 train.dtype=fp32 train.sample_tokens=0 hydra.run.dir=run
""")


@pytest.mark.parametrize(("steps", "status"), [("4 8", 0), ("4 4 4", 137)])
def test_a_training_that_is_killed_goes_on(tmp_path: Path, steps: str, status: int) -> None:
    """But not if it dies of the same step again."""
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "steps").write_text(steps)
    words = [sys.executable, "-m", "wordrun.launch", "--retries", "5", sys.executable, "killed.py", *TINY]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert "launch: rank 0 was killed at step 4 (SIGKILL, not for lack of memory on this host): relaunching" in (
        done.stderr
    )
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line] == [*range(1, 5 if status else 13)]
    found = json.loads((tmp_path / "run" / "run.json").read_text())["recoveries"]
    assert [(fault["rank"], fault["cause"], fault["last_step"]) for fault in found] == [
        (0, "SIGKILL", int(step)) for step in dict.fromkeys(steps.split())
    ]
    assert all(fault["source"] == "disk" and fault["resumed_step"] <= fault["last_step"] for fault in found)
    if status:
        assert "launch: rank 0 was killed twice at step 4, so relaunching would not help" in done.stderr


def test_a_kill_for_memory_is_not_tried_again() -> None:
    retries = Retries()
    assert (
        retries.after_kill(Outcome(137, failed=1, memory="the kernel killed python because memory ran out"), "") is None
    )
    assert retries.refusal == "relaunching would need as much memory"


@pytest.mark.parametrize(
    ("outcome", "killed"),
    [
        (Outcome(137, failed=1), True),
        (Outcome(137), True),
        (Outcome(9, killed_status=Hydra.killed_status), True),  # if the rank's shell was killed too
        (Outcome(9, failed=0, killed_status=Hydra.killed_status), False),
        (Outcome(9), False),  # another launcher's
        (Outcome(134, failed=0), False),
        (Outcome(124), False),
    ],
)
def test_which_endings_are_kills(outcome: Outcome, killed: bool) -> None:
    assert (Retries().after_kill(outcome, "") is not None) == killed


# A process of Hydra's that cleans up fails, too, and mpiexec returns 255 instead of 9: recorded with MPICH 5.0.2.
CLEANS_UP = """#!/bin/sh
cat <<END
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
END
cat >&2 <<END
[proxy:1@vm] HYD_pmcd_pmip_control_cmd_cb (pm/hydra/proxy/pmip_cb.c:490): assert (!closed) failed
[mpiexec@vm] main (pm/hydra/mpiexec/mpiexec.c:270): process manager error waiting for completion
END
exit 255
"""
# Rank 0 was reading the memory of rank 1, and all were ended before rank 1 was reported: recorded with MPICH 5.0.2,
# and shortened.
READS = """#!/bin/sh
cat >&2 <<END
Abort(879308175) on node 0 (rank 0 in comm 0): Fatal error in internal_Allreduce_c: Other MPI error, error stack:
copy_iovs(224)....................................: process_vm_readv failed (errno 3)
END
exit 143
"""
LAUNCH = "import sys; from wordrun.launch import cli, launchers; launchers.base.own_bin = str; sys.exit(cli.main())"


@pytest.mark.parametrize(
    ("where", "says"),
    [([], CLEANS_UP), (["--hostfile", "hosts"], CLEANS_UP), ([], READS)],
    ids=["one host", "two hosts", "while its memory is read"],
)
def test_a_guardian_that_is_killed_before_it_connects_is_started_again(
    tmp_path: Path, where: list[str], says: str
) -> None:
    """Once: there may be nothing that would help."""
    (tmp_path / "hosts").write_text(f"{os.uname().nodename}\nlocalhost\n")
    mpiexec = tmp_path / "mpiexec.hydra"
    mpiexec.write_text(says)
    mpiexec.chmod(0o755)
    words = [sys.executable, "-c", LAUNCH, "-n", "2", "--elastic", "--launcher", "hydra", *where, "python", "x.py"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": f"{tmp_path}/state"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 9, done.stderr
    assert done.stderr.count("launch: a guardian was lost (lost guardian): relaunching") == 1
    assert "launch: a guardian was lost twice, so relaunching would not help" in done.stderr


def test_other_ranks_and_other_steps_are_other_deaths(tmp_path: Path) -> None:
    """The record in outputs/launches is a link into the run's directory."""
    (tmp_path / "run").mkdir()
    (tmp_path / "launch.json").symlink_to(tmp_path / "run" / "launch.json")
    retries = Retries()

    def again(rank: int, step: int) -> bool:
        (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": {step}, "loss": 2.0}}\n')
        return retries.after_kill(Outcome(137, failed=rank), str(tmp_path / "launch.json")) is not None

    assert [again(0, 5), again(1, 5), again(0, 6), again(1, 5)] == [True, True, True, False]
