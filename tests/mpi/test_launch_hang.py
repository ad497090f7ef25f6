"""``launch --hang`` and ``launch --stacks``: where ranks are, also of programs that know nothing of wordrun."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = pytest.mark.mpi

PLAIN = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def forgets_the_others():
    time.sleep(1000)  # here

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        forgets_the_others()
    model(torch.ones(2, 4)).sum().backward()  # there
"""
SESSION = """
import sys, time
import torch
import torch.distributed
from wordrun import dist

with dist.session(hang_s=float(sys.argv[1])) as world:
    for step in range(100_000):
        if step == 3 and world.rank == 1 and sys.argv[1] == "1":
            time.sleep(1000)  # here
        torch.distributed.all_reduce(torch.ones(8))
        time.sleep(0.01)  # between
        if step == 3:
            print("ready", flush=True)
"""


MPI_ONLY = """
import time
import numpy
from mpi4py import MPI

comm, x, until = MPI.COMM_WORLD, numpy.ones(8), time.monotonic() + 4
while comm.bcast(time.monotonic() < until): time.sleep(0.01)  # nobody waits for long
if comm.rank == 1:
    time.sleep(1000)  # here
CALL  # there
"""
POINT_TO_POINT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(8)
dist.all_reduce(x)
if dist.get_rank() == 1:
    time.sleep(1000)  # here
CALL  # there
"""
START = """
import os, time
import torch.distributed as dist

if os.environ["RANK"] == "1":
    time.sleep(1000)  # here
CALL  # there
"""
STUCK = """import os, sys, time

class Stuck:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(1000)

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Stuck())
"""


def line_of(script: str, comment: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {comment}"))


def test_a_program_that_knows_nothing_of_wordrun(command: Command, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.own_site = True\n")
    words = ["--hang", "2", "-n", "3", "--env", f"PYTHONPATH={tmp_path / 'own'}"]
    check = "import runpy; assert own_site; runpy.run_path('plain.py', run_name='__main__')"
    done = command("launch", *words, sys.executable, "-c", check)
    assert done.returncode == 124, done.stderr
    assert done.stderr.count("no progress for 2 s: rank 1 has not reached all_reduce number ") == 1, done.stderr
    here, there = line_of(PLAIN, "here"), line_of(PLAIN, "there")
    assert re.search(rf"rank 1 \([\w.-]+\) is at plain.py:{here} in forgets_the_others", done.stderr)
    assert re.search(rf"ranks 0, 2 \([\w.-]+\) are at plain.py:{there} in <module>", done.stderr)


@pytest.mark.parametrize(
    ("script", "call", "says"),
    [
        (MPI_ONLY, "comm.Allreduce(x, x.copy())", "2 s: rank 0 waits in comm.Allreduce for rank 1; "),
        (MPI_ONLY, "comm.recv(source=1)", "2 s: rank 0 waits in comm.recv for rank 1; "),
        (MPI_ONLY, "request = comm.irecv(source=1)\nrequest.wait()", "2 s: rank 0 waits in request.wait for rank 1; "),
        (POINT_TO_POINT, "dist.recv(x, src=1)", "2 s: rank 0 waits in recv for rank 1; "),
        (START, "dist.init_process_group('gloo')", "5 s: rank 0 waits in init_process_group for rank 1; "),
    ],
    ids=["mpi4py", "mpi4py, point-to-point", "mpi4py, request", "torch, point-to-point", "start-up"],
)
def test_waits_that_torch_does_not_count(script: str, call: str, says: str, command: Command, tmp_path: Path) -> None:
    hang_s = "1" if script == START else "2"  # of which the start may take five times as much
    script = script.replace("CALL", call)
    (tmp_path / "script.py").write_text(script)
    done = command("launch", "--hang", hang_s, "-n", "2", sys.executable, "script.py")
    assert done.returncode == 124, done.stderr
    assert done.stderr.count(f"no progress for {says}") == 1, done.stderr
    assert f"script.py:{line_of(script, 'here')} in <module>" in done.stderr
    assert f"script.py:{line_of(script, 'there')} in <module>" in done.stderr


def test_a_rank_that_hangs_before_it_has_a_trainer(command: Command, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(STUCK)
    words = ["--hang", "1", "-n", "2", "--env", f"PYTHONPATH={tmp_path / 'own'}"]
    done = command("launch", *words, sys.executable, "-m", "wordrun", "data=sample", "train=smoke", "tracker=jsonl")
    assert done.returncode == 124, done.stderr
    # Rank 1 says it, too, if rank 0, which imports torch meanwhile, does not answer in time.
    assert done.stdout.count("no progress for 5 s: ") in (1, 2), done.stdout
    assert re.search(r"rank 1 \([\w.-]+\) is at [\w/.-]+/sitecustomize.py:6 in find_spec", done.stdout), done.stdout


def test_a_session_says_where_its_ranks_hang(start: Start, tmp_path: Path) -> None:
    (tmp_path / "session.py").write_text(SESSION)
    job = start("mpiexec", "-n", "2", sys.executable, "session.py", "1")
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("failures/*/hang-*.txt"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    text = found[0].read_text()
    assert text.startswith("no progress for 1 s: rank 1 has not reached all_reduce number 4 of float32 [8] of 2 ranks")
    assert f"is at session.py:{line_of(SESSION, 'here')} in <module>" in text
    job.terminate()
    job.wait(90)


def test_a_living_job_is_asked_and_answers(start: Start, command: Command, tmp_path: Path) -> None:
    (tmp_path / "session.py").write_text(SESSION)
    # In the background of a script, which ignores SIGQUIT.
    words = ["launch", "--hang", "10", "-n", "2", sys.executable, "session.py", "100"]
    job = start("sh", "-c", 'trap "" QUIT; exec "$@"', "sh", *words)
    assert job.stdout is not None
    assert next(line for line in job.stdout if "[Gloo]" not in line) == "ready\n"  # torch 2.8's prints lines
    (record,) = (tmp_path / "state").rglob("*.json")
    for run in (record, record.stem):
        done = command("launch", "--stacks", run)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("where the ranks are now: "), done.stdout
        assert "session.py" in done.stdout
        assert re.search("ranks? (0-)?1", done.stdout)
    job.send_signal(signal.SIGQUIT)
    deadline = time.monotonic() + 90
    while len(list(record.parent.glob("*.failures/stacks-*.txt"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    job.terminate()
    _, err = job.communicate(timeout=90)
    assert "launch: asked the ranks where they are" in err
    assert err.count("where the ranks are now: ") == 3, err
    assert job.returncode == 128 + signal.SIGTERM
    done = command("launch", "--stacks", record)
    assert done.returncode == 1
    assert done.stderr.startswith(f"launch: --stacks {record}: it has ended (20")


def test_a_run_that_does_not_exist_cannot_be_asked(command: Command, tmp_path: Path) -> None:
    for run, message in (("nothing", "should be a run directory, a launch.json or the ID of a run"), (".", "is not a")):
        done = command("launch", "--stacks", run)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    (tmp_path / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
    done = command("launch", "--stacks", ".")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "launch: --stacks .: it has ended (finished)"


LEAVES = """
import os, sys
import torch.distributed as dist

if os.environ["RANK"] == "1":
    sys.exit(0)
dist.init_process_group("gloo")  # there
"""


def test_a_rank_that_has_ended_is_not_called_silent(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES)
    done = command("launch", "--hang", "1", "-n", "2", sys.executable, "train.py")
    assert done.returncode == 124, done.stderr
    there = f"train.py:{line_of(LEAVES, 'there')}"
    assert f"rank 1 ({os.uname().nodename}) has ended with status 0; others wait for it at {there}" in done.stderr
    assert "silent" not in done.stderr
