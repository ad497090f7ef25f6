"""What ``launch`` shows of ranks and launcher: whole lines, the failed rank's own, and no noise after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command, Start

by_launcher = pytest.mark.parametrize("launcher", ["hydra", "torchrun"])
# Each line in two writes with a pause between them, as unbuffered Python prints.
HALVES = """
import os, sys, time
for i in range(40):
    os.write(1, f"rank {os.environ['RANK']} ".encode())
    time.sleep(0.005)
    os.write(1, f"line {i}\\n".encode())
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no such thing")
while not any(name.isdigit() for name in os.listdir(os.environ["WORDRUN_STATUS_DIR"])):
    time.sleep(0.02)
time.sleep(0.5)
sys.stderr.write("[W1122 16:15:30.1 TCPStore.cpp:125] [c10d] lost contact\\n" + "my peer is gone\\n" * 20)
"""
ABORTS = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort(5)
time.sleep(30)
"""


def record(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "state/wordrun/launches").iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@by_launcher
def test_lines_of_different_ranks_do_not_mix(launcher: str, command: Command) -> None:
    done = command("launch", "--launcher", launcher, "-n", "3", "python", "-c", HALVES)
    assert sorted(done.stdout.splitlines()) == sorted(f"rank {rank} line {i}" for rank in range(3) for i in range(40))


def test_a_prompt_and_a_bar_do_not_wait_for_the_end_of_their_line(start: Start, tmp_path: Path) -> None:
    code = "printf 'rank %s? ' $RANK; printf '\\r50%%\\r' >&2; while [ ! -e go ]; do sleep 0.1; done; echo done"
    job = start("launch", "-n", "2", "sh", "-c", code)
    assert job.stdout
    assert job.stderr
    shown = b""
    while shown.count(b"? ") < 2:  # or the test runs into its time limit
        shown += os.read(job.stdout.fileno(), 100)
    bars = b""
    while bars.count(b"50%") < 2:
        bars += os.read(job.stderr.fileno(), 1000)
    (tmp_path / "go").touch()
    assert job.communicate(timeout=30)[0].count("done") == 2


@by_launcher
def test_the_last_lines_are_the_failed_ranks_own(launcher: str, command: Command) -> None:
    done = command("launch", "--launcher", launcher, "-n", "2", "python", "-c", FAILS)
    assert done.returncode == 1
    assert done.stderr.count("my peer is gone") == 20
    end = ["launch: rank 1 ended with exit status 1; its last lines:", "launch:   no such thing"]
    assert done.stderr.splitlines()[-2:] == end


@by_launcher
def test_what_the_launcher_says_of_a_failure_is_only_in_the_record(
    launcher: str, command: Command, tmp_path: Path
) -> None:
    done = command("launch", "--launcher", launcher, "-n", "2", "python", "-c", FAILS)
    assert done.stdout == ""
    assert "BAD TERMINATION" not in done.stderr
    assert "ChildFailedError" not in done.stderr
    if launcher == "torchrun":  # Hydra is silent about an exit status other than a signal's
        assert any("ChildFailedError" in line for line in record(tmp_path)["not_shown"])


def test_an_abort_is_one_line(command: Command, tmp_path: Path) -> None:
    done = command("launch", "-n", "2", "python", "-c", ABORTS)
    assert (done.returncode, done.stdout, done.stderr) == (
        5, "", "launch: starting 2 ranks on 1 host with hydra\nlaunch: rank 1 ended with exit status 5\n"
    )  # fmt: skip
    assert any(line.startswith("Abort(5) on node 1") for line in record(tmp_path)["not_shown"])


def test_what_only_the_launcher_knows_is_shown(command: Command) -> None:
    """No rank can report if its whole process group is killed."""
    done = command("launch", "-n", "2", "sh", "-c", "[ $RANK = 0 ] || kill -KILL 0; sleep 30")
    assert done.returncode == 9
    assert "launch: =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES" in done.stderr


def interrupted(job: subprocess.Popen[str], after_s: float) -> tuple[int, list[str]]:
    """Press Ctrl-C and return the exit status and all lines."""
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=25)
    return job.returncode, [*out.splitlines(), *err.splitlines()]


@by_launcher
@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0])
def test_ctrl_c_at_any_moment_is_one_line(launcher: str, after_s: float, start: Start) -> None:
    words: Sequence[str] = ("python", "-m", "wordrun.test_dist", "--steps", "1000000", "--no-profile")
    job = start("launch", "--launcher", launcher, "-n", "2", *words, start_new_session=True)
    status, lines = interrupted(job, after_s)
    own = [line for line in lines if line.startswith("launch: Ctrl-C: forwarded; ")]
    assert status in (130, -signal.SIGINT)
    assert "Traceback" not in "\n".join(lines)
    assert not [line for line in lines if line.startswith(("[mpiexec", "W1", "Abort", "="))]
    assert len(own) == (status == 130), lines


def test_ctrl_c_while_torch_is_imported_is_silent(start: Start, tmp_path: Path) -> None:
    """A KeyboardInterrupt in there may become any other exception."""
    fake = "try:\n    print('importing', flush=True)\n    import time\n    time.sleep(60)\n"
    (tmp_path / "torch.py").write_text(f"{fake}except BaseException:\n    raise ImportError('broken') from None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    job = start(sys.executable, "-m", "wordrun", "data=sample", env=env, start_new_session=True)
    assert job.stdout
    assert "loading torch" in job.stdout.readline()
    assert "importing" in job.stdout.readline()
    assert interrupted(job, 0.2) == (-signal.SIGINT, [])
