"""Ctrl-C under ``launch``, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.launch.supervisor import STOP_PATIENCE_S

if TYPE_CHECKING:
    from conftest import Start

# Later, launch kills ranks that have not heard of Ctrl-C.
HEARD_S = STOP_PATIENCE_S - 1
by_launcher = pytest.mark.parametrize("launcher", ["hydra", "torchrun"])
# As the command launch; an interrupt while Python itself starts is none of its business.
BEGIN = """
from wordrun.common import sigint
sigint.end_at_once("interrupted; nothing was started")
print("begun", flush=True)
from wordrun.launch.__main__ import main
raise SystemExit(main())
"""
LATE_MPIEXEC = """#!/bin/sh
[ "$1" = -n ] || exec echo HYDRA  # asked for its version
trap 'signalled=1' INT
touch waiting
while [ -z "$signalled" ]; do sleep 0.02; done
shift 2
PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 "$@"
"""
# Has started its rank, and loses Ctrl-C.
DEAF_MPIEXEC = """#!{python}
import os, signal, subprocess, sys
if sys.argv[1] != "-n":
    sys.exit("HYDRA")  # asked for its version
signal.signal(signal.SIGINT, lambda *_: None)
rank = {{"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}}
sys.exit(subprocess.call(sys.argv[3:], env={{**os.environ, **rank}}, start_new_session=True))
"""
WAITS_IN_MPI = """
import os, time
if os.environ["PMI_RANK"] == "1":
    time.sleep(1000)
from wordrun.dist import mpi
print(os.getpid(), flush=True)
mpi.communicator()
"""


def interrupted(job: subprocess.Popen[str], after_s: float, limit_s: float = 90) -> tuple[int, list[str]]:
    """Press Ctrl-C and return the exit status and all lines."""
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=limit_s)
    return job.returncode, [*out.splitlines(), *err.splitlines()]


@by_launcher
@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0])
def test_ctrl_c_at_any_moment_is_one_line(launcher: str, after_s: float, start: Start) -> None:
    words: Sequence[str] = ("python", "-m", "wordrun.test_dist", "--steps", "1000000", "--no-profile")
    job = start(sys.executable, "-c", BEGIN, "--launcher", launcher, "-n", "2", *words, start_new_session=True)
    assert job.stdout
    assert job.stdout.readline() == "begun\n"
    status, lines = interrupted(job, after_s, HEARD_S)
    own = [line for line in lines if line.startswith("launch: Ctrl-C: forwarded; ")]
    early = lines == ["interrupted; nothing was started"]
    assert status == 130
    assert "Traceback" not in "\n".join(lines)
    assert not [line for line in lines if line.startswith(("[mpiexec", "W1", "Abort", "="))]
    assert early or len(own) == 1, lines


@pytest.mark.parametrize(
    ("mpiexec", "command", "sign"),
    [(LATE_MPIEXEC, "touch begun", "waiting"), (DEAF_MPIEXEC, "touch begun; exec sleep 100", "begun")],
    ids=["before it starts a rank", "while it starts ranks"],
)
def test_ctrl_c_that_the_launcher_loses(mpiexec: str, command: str, sign: str, start: Start, tmp_path: Path) -> None:
    """Hydra loses a signal that arrives while it starts: its ranks would run, though the user has pressed Ctrl-C."""
    fake = tmp_path / "bin" / "mpiexec"
    fake.parent.mkdir()
    fake.write_text(mpiexec.format(python=sys.executable))
    fake.chmod(0o755)
    own_first = "import sys; sys.prefix = '.'; from wordrun.launch.cli import main; sys.exit(main())"
    words = (sys.executable, "-c", own_first, "--launcher", "hydra", "-n", "2", "sh", "-c", command)
    job = start(*words, cwd=tmp_path, start_new_session=True)
    while not (tmp_path / sign).exists():
        assert job.poll() is None
        time.sleep(0.02)
    status, lines = interrupted(job, 0.0, HEARD_S)
    assert status == 130, lines
    assert (tmp_path / "begun").exists() == (sign == "begun")


def test_ctrl_c_ends_a_rank_that_waits_in_mpi_for_one_that_is_gone(start: Start) -> None:
    """MPI_Init waits in C code that keeps the interpreter's lock: no handler of Python's runs."""
    job = start("launch", "--launcher", "hydra", "-n", "2", "python", "-c", WAITS_IN_MPI, start_new_session=True)
    assert job.stdout
    maps = Path("/proc", job.stdout.readline().strip(), "maps")
    while "libmpi" not in maps.read_text():  # not by a thread of the rank: MPI_Init may keep the lock before it looks
        time.sleep(0.01)
    status, _ = interrupted(job, 0.5, HEARD_S)
    assert status == 130


def test_ctrl_c_while_torch_is_imported_is_one_line(start: Start, tmp_path: Path) -> None:
    """A KeyboardInterrupt in there may become any other exception."""
    fake = "try:\n    print('importing', flush=True)\n    import time\n    time.sleep(60)\n"
    (tmp_path / "torch.py").write_text(f"{fake}except BaseException:\n    raise ImportError('broken') from None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    job = start(sys.executable, "-m", "wordrun", "data=sample", env=env, start_new_session=True)
    assert job.stdout
    while "importing" not in (line := job.stdout.readline()):
        assert line, "the job ended"
    assert interrupted(job, 0.2) == (130, ["interrupted; nothing to save"])
