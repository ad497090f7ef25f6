"""Which signals launch passes on to the ranks of an srun, and how ranks are found that it did not start itself."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wordrun.launch import processes
from wordrun.launch.job import Job
from wordrun.launch.launchers import LAUNCHERS

SQUEUE = """#!/bin/sh
case "$*" in *--steps*) echo "17.3 wordrun-1-aa"; echo "17.batch batch" ;; *) echo {state} ;; esac
"""


@pytest.mark.parametrize(
    ("state", "number", "sent"),
    [
        ("RUNNING", signal.SIGTERM, True),
        ("COMPLETING", signal.SIGTERM, False),  # SLURM has sent one itself: scancel, requeue, time limit
        ("PREEMPTED", signal.SIGTERM, False),
        ("COMPLETING", signal.SIGKILL, True),
        ("RUNNING", signal.SIGUSR1, True),
        ("", signal.SIGTERM, True),  # unknown
    ],
)
def test_a_stop_request_arrives_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, number: signal.Signals, sent: bool
) -> None:
    job = Job(hosts=("n1",), cores=(4,), devices=(0,), slots=(1,), scheduler="slurm", id="17")
    for name, text in (("squeue", SQUEUE.format(state=state)), ("scancel", '#!/bin/sh\necho "$*" > asked\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    LAUNCHERS["srun"]("/usr/bin/srun").send(number, 0, job, "wordrun-1-aa")
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == (f"--signal={number.name} 17.3\n" if sent else "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ranks_of_a_schedulers_daemon_are_found(tmp_path: Path) -> None:
    """Neither below the launcher nor in its group or session, as under srun and PALS."""
    code = "import os, subprocess, sys, time; print(os.getpid(), flush=True)\n"
    rank = f"{code}subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = f"setsid {shlex.quote(sys.executable)} -c {shlex.quote(rank)} > pid 2>&1 &"
    subprocess.run(["sh", "-c", start], check=True, env={**os.environ, "WORDRUN_LAUNCH_ID": "7-ab"})
    told, end = tmp_path / "pid", time.monotonic() + 90
    while not (told.exists() and told.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    pid = int(told.read_text())
    with subprocess.Popen(["sleep", "60"]) as launcher:
        try:
            assert processes.pythons(launcher.pid, "7-ab") == [pid]
            assert processes.pythons(launcher.pid, "7-a") == []
        finally:
            launcher.kill()
            os.killpg(pid, signal.SIGKILL)


# Warnings that come before a process handles them, just after it has stopped doing so, and when it has almost ended.
BESIDES = """
import atexit, os, signal, sys
warn = lambda: os.kill(os.getpid(), signal.SIGUSR1)
def warned(function):
    def call(*args, **named):
        warn()
        try:
            return function(*args, **named)
        finally:
            warn()
    return call
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)
sys.last = Last()  # deleted after Python has dropped its handlers
"""


@pytest.mark.parametrize("words", [["-n", "1", "true"], ["-n", "2", "--launcher", "hydra", "true"]])
def test_warnings_around_a_launch_are_harmless(words: list[str]) -> None:
    code = f"{BESIDES}\nfrom wordrun.launch import cli, run\ncli._launch = warned(cli._launch)\nsys.exit(cli.main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_warnings_around_the_training_are_harmless(tmp_path: Path) -> None:
    """SIGUSR1 reached a run that had finished and ended it with status 138."""
    code = f"""{BESIDES}
from wordrun import cli, dist
dist.discover_or_exit = warned(dist.discover_or_exit)
from wordrun.train.trainer import Trainer
train = Trainer.train
Trainer.train = lambda trainer: (train(trainer), warn())
sys.exit(cli.main())
"""
    words = ["data=sample", "train=smoke", "tracker=jsonl", "train.max_iters=2", "hydra.run.dir=run"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").exists()
