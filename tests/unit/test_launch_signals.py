"""Which signals launch passes on to the ranks of an srun."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from wordrun.launch.command import Decided, Ranks, build
from wordrun.launch.job import Job
from wordrun.launch.launcher import Launcher
from wordrun.launch.options import Options
from wordrun.launch.run import _signal_step

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
        ("", signal.SIGTERM, True),  # nobody knows
    ],
)
def test_an_order_to_end_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, number: signal.Signals, sent: bool
) -> None:
    job = Job(hosts=("n1",), cores=(4,), devices=(0,), slots=(1,), scheduler="slurm", id="17")
    decided = Decided("1-aa", "R", 12345, str(tmp_path), "/s", "/venv/bin", "a")
    plan = build(job, Options(command=("x",)), Ranks((1,), ""), Launcher("srun", "/usr/bin/srun"), decided, {})
    for name, text in (("squeue", SQUEUE.format(state=state)), ("scancel", '#!/bin/sh\necho "$*" > asked\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    _signal_step(plan, number)
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == (f"--signal={number.name} 17.3\n" if sent else "")
