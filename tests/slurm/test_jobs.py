"""Jobs that end early, for every reason that SLURM has, and runs that lose nothing by it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stand_in

from wordrun.commands import new

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = pytest.mark.timeout(600)

# wordrun, which waits for a signal after as many steps as a file says, and has less patience with another run.
HELD = """
import os, sys, time
from pathlib import Path
from wordrun import cli
from wordrun.train import run, stop
from wordrun.train.trainer import Trainer
stop.AGREE_EVERY_S = 0  # ranks check for signals after every step
step = Trainer._train_step
def held(trainer, lr):
    while "FREE" not in os.environ and not trainer.stop.signal and trainer.step >= int(Path("until").read_text()):
        time.sleep(0.02)
    return step(trainer, lr)
Trainer._train_step = held
run.LOCK_PATIENCE_S = 2
sys.exit(cli.main())
"""
STEPS = 60
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
TINY = [
    "data=sample",
    "tracker=jsonl",
    f"train.max_iters={STEPS}",
    *shlex.split("""
    model=nano
    train.global_batch_size=8 model.batch_size=4
    train.log_interval=1 train.eval_interval=20 train.eval_iters=2 train.checkpoint_interval=10
    model.n_layer=1 model.n_head=2 model.n_embd=32 model.block_size=32 model.dropout=0.1
"""),
]
# As docs/jobs.md has it.
BY_HAND = """\
#!/bin/bash
#SBATCH --job-name=by-hand --nodes=1 --ntasks=1 --time=0:10:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append --output=%x-%j.out
trap 'ending=yes' TERM
launch {command}
status=$?
if [ $status -eq 75 ] && [ -z "${{ending-}}" ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $status
"""


def hold(until: int) -> None:
    Path("until.new").write_text(str(until))
    Path("until.new").replace("until")


def wait(cluster: Cluster, reached: Callable[[], Any], what: str, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not reached():
        outs = [f"== {path}\n{path.read_text()}" for path in sorted(Path().glob("*.out"))]
        assert time.monotonic() < end, "\n".join([what, cluster.run("squeue").stdout, *outs])
        time.sleep(0.1)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return what was measured, without what depends on the machine's speed."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    names = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens")
    return [{name: value for name, value in json.loads(line).items() if name in names} for line in whole]


def steps(run_dir: Path) -> int:
    return max((line["step"] for line in lines(run_dir)), default=0)


def exit_reasons(run_dir: Path) -> list[str]:
    """Return how each part of a run that was continued ended."""
    run = json.loads((run_dir / "run.json").read_text())
    return [part["exit_reason"] for part in (*run.get("earlier", []), run)]


def elapsed(cluster: Cluster, job: str) -> int:
    text = cluster.run("squeue", "--noheader", "--job", job, "--format=%M").stdout.strip()
    return sum(60**i * int(part) for i, part in enumerate(reversed(text.split(":"))))


def test_a_chain_of_three_equals_one_run(cluster: Cluster, programs: Path, tmp_path: Path) -> None:
    """Its links end by the time limit, by a requeue, by a SIGTERM, and at the last step."""
    (tmp_path / "held.py").write_text(HELD)
    hold(15)
    command = [sys.executable, "held.py", *TINY]
    alone = ("--env", "FREE=1", "--env", "PYTHONFAULTHANDLER=1", *command, "hydra.run.dir=whole")
    whole = cluster.start("salloc", "-N2", "-n2", "launch", *alone, **{stand_in.VARIABLE: str(programs)})
    words = ("-N", "2", "-n", "2", "--walltime", "0:10:00", "--walltime-margin", "60", "--job-name", "link")
    got = cluster.run("launch", "--submit", *words, "--chain", "3", "--", *command, PATH=PATH)
    assert got.returncode == 0, got.stderr
    jobs = re.findall(r"^submitted (.*) \(site", got.stdout)[0].split(" then ")
    (run_id,) = re.findall(r"^run (\S+); scancel ", got.stdout, re.MULTILINE)

    def out(link: int) -> str:
        file = tmp_path / f"link-{jobs[link]}.out"
        return file.read_text() if file.exists() else ""

    def run_dir() -> Path:
        return next(tmp_path.glob(f"outputs/*/*/{run_id}"), tmp_path / "none")

    wait(cluster, lambda: steps(run_dir()) == 15, "the first link has begun")
    second = cluster.run(
        "launch", "--scheduler", "none", *command, f"hydra.run.dir={run_dir()}", "train.resume=auto", timeout=120
    )
    assert second.returncode == 2, second.stdout + second.stderr
    assert "is in use by process" in second.stderr
    # SLURM looks at its jobs' time limits every 30 s, and these are whole minutes.
    minutes = (elapsed(cluster, jobs[0]) + 20) // 60 + 1
    cluster.run("scontrol", "update", f"jobid={jobs[0]}", f"timelimit={minutes}").check_returncode()
    wait(cluster, lambda: "saved: the next job of the chain resumes" in out(0), "the first link has been told")
    assert "launch: stopped early, with its state saved (exit status 75)\n" in out(0)
    assert "to continue from step " in out(0)
    assert "rank 0 ended" not in out(0)

    hold(25)
    wait(cluster, lambda: steps(run_dir()) == 25, "the second link goes on")
    assert cluster.outcome(whole, timeout=60) == 0
    cluster.run("scontrol", "requeue", jobs[1]).check_returncode()
    wait(cluster, lambda: out(1).count("resumed from") == 2, "the second link is there again")
    hold(35)
    wait(cluster, lambda: steps(run_dir()) == 35, "it goes on")
    cluster.run("scancel", "--signal=TERM", jobs[1]).check_returncode()
    wait(cluster, lambda: "saved: the next job of the chain resumes" in out(1), "the second link has been told")
    hold(STEPS)
    wait(cluster, lambda: "run directory" in out(2) and exit_reasons(run_dir())[-1] == "finished", "the last link ends")
    cluster.wait_idle(60)

    reasons = exit_reasons(run_dir())
    assert len(reasons) == 4
    assert [reasons[0], *reasons[2:]] == ["stopped by SIGUSR1, saved", "stopped by SIGTERM, saved", "finished"]
    assert [line["step"] for line in lines(run_dir()) if "loss" in line] == list(range(1, STEPS + 1))
    assert lines(run_dir()) == lines(tmp_path / "whole")
    assert len(list(tmp_path.glob("outputs/*/*/*/run.json"))) == 1


@pytest.mark.forked_programs
def test_a_job_that_has_saved_starts_itself_again_unless_it_was_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """One that launch has submitted, and one by hand, which tells nobody the run's name."""
    (tmp_path / "held.py").write_text(HELD)
    hold(15)
    command = [sys.executable, "held.py", *TINY]
    names, jobs = ("again", "cancelled", "by-hand"), []
    for seed, name in enumerate(names[:2]):
        words = ("-n", "1", "--walltime", "0:10:00", "--job-name", name, "--", *command, f"train.seed={seed}")
        got = cluster.run("launch", "--submit", *words, PATH=PATH)
        assert got.returncode == 0, got.stderr
        jobs += re.findall(r"^submitted (\d+) ", got.stdout)
    (tmp_path / "job.sh").write_text(BY_HAND.format(command=" ".join([*command, "train.seed=2"])))
    jobs.append(cluster.run("sbatch", "--parsable", "job.sh", PATH=PATH).stdout.strip())
    outs = [tmp_path / f"{name}-{job}.out" for name, job in zip(names, jobs, strict=True)]

    def run_dirs() -> list[Path]:
        """Return the runs' directories by their seeds."""
        paths = [path.parent for path in tmp_path.glob("outputs/*/*/*/run.json")]
        return sorted(paths, key=lambda path: int(json.loads((path / "run.json").read_text())["seeds"]["data"]))

    wait(cluster, lambda: len(run_dirs()) == 3 and min(map(steps, run_dirs())) == 15, "all have begun")
    cluster.run("scancel", jobs[1]).check_returncode()
    cluster.run("scancel", "--signal=TERM", jobs[0], jobs[2]).check_returncode()
    saved = "launch: stopped early, with its state saved (exit status 75)"
    wait(cluster, lambda: all(saved in out.read_text() for out in (outs[0], outs[2])), "both have saved")
    hold(STEPS)
    wait(cluster, lambda: [exit_reasons(each)[-1] for each in run_dirs()].count("finished") == 2, "both are finished")
    cluster.wait_idle(60)
    for run_dir in (run_dirs()[0], run_dirs()[2]):
        assert exit_reasons(run_dir) == ["stopped by SIGTERM, saved", "finished"]
        assert [line["step"] for line in lines(run_dir) if "loss" in line] == list(range(1, STEPS + 1))
    assert len(run_dirs()) == 3
    by_hand = outs[2].read_text()
    assert "launch: continuing run " in by_hand
    assert "begun by this job before it was requeued (SLURM_RESTART_COUNT=1)" in by_hand
    # Plain scancel gives ranks the time to save, and the user the last word.
    assert len(exit_reasons(run_dirs()[1])) == 1
    assert list(run_dirs()[1].glob(f"checkpoints/step-*{steps(run_dirs()[1])}")), list(run_dirs()[1].glob("*/*"))
    assert "saved: " not in outs[1].read_text()


def test_jobs_that_would_run_again_for_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """The second job of a chain whose first has ended with 0, and a program that always asks to be requeued."""

    def submitted(name: str, *words: str) -> list[Path]:
        got = cluster.run(
            "launch", "--submit", "-n", "1", "--walltime", "0:10:00", "--job-name", name, *words, PATH=PATH
        )
        assert got.returncode == 0, got.stderr
        jobs = re.findall(r"^submitted (.*) \(site", got.stdout)[0].split(" then ")
        return [tmp_path / f"{name}-{job}.out" for job in jobs]

    first, second = submitted("done", "--chain", "2", "--", "echo", "has run")
    (saves,) = submitted("saves", "--", "sh", "-c", "exit 75")
    cluster.wait_idle(120)
    assert "has run" in first.read_text()
    assert second.read_text().startswith(
        "nothing to do: an earlier job of the chain ended with 0 (to run it again, remove "
    )
    assert "has run" not in second.read_text()
    text = saves.read_text()
    assert text.count("saved: SLURM requeues this job") == 3
    assert re.search(
        r"launch: start 4 of this job asks to be requeued \(exit status 75\) without progress: it ended", text
    )


@pytest.mark.forked_programs
@pytest.mark.parametrize(("ranks", "layout"), [("4", [2, 2]), ("5", [3, 2])])
def test_ranks_lie_on_the_nodes_evenly(cluster: Cluster, tmp_path: Path, ranks: str, layout: list[int]) -> None:
    """--ntasks alone would fill the first node's four cores."""
    words = ("-N", "2", "-n", ranks, "--walltime", "0:05:00", "--job-name", "even", "--")
    got = cluster.run("launch", "--submit", *words, "sh", "-c", "echo on $NODE_RANK", PATH=PATH)
    assert got.returncode == 0, got.stderr
    cluster.wait_idle(60)
    text = next(tmp_path.glob("even-*.out")).read_text()
    assert [text.count(f"on {node}\n") for node in (0, 1)] == layout, text


def test_the_script_of_a_new_project_needs_no_environment(cluster: Cluster, tmp_path: Path) -> None:
    new.write(tmp_path / "adder")
    words = ["tracker=jsonl", "model.n_layer=1", "model.n_embd=32", "train.max_iters=4", "train.eval_iters=2"]
    out = tmp_path / "job.out"
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--wait",
        f"--chdir={tmp_path / 'adder'}",
        f"--output={out}",
        "job.sh",
        *words,
        timeout=200,
        PATH="/usr/bin:/bin",
    )
    assert job.returncode == 0, out.read_text()
    run = tmp_path / "adder" / "outputs" / "latest"
    assert json.loads((run / "run.json").read_text())["exit_reason"] == "finished"
    assert steps(run) == 4
