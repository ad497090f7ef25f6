"""A run that hangs says which rank the others wait for, and in which line it is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hanging

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.timeout(120)

CULPRIT = """
def loop_forever():
    while True: pass  # endless

def hold_the_lock():
    re.match("(a+)+$", 60 * "a" + "b")  # backtracks

class Asleep:
    def __init__(self, real):
        self.real = real
    def __len__(self):
        return len(self.real)
    def take(self, first, gas):
        time.sleep(1000)  # loader
    def __getitem__(self, index):
        time.sleep(1000)  # validation
    def close(self):
        pass

class Culprit(Hook):
    step = 0

    def setup(self, trainer):
        self.group = torch.distributed.new_group([0, 1]) if kind == "other" else None
        if kind != "start-up":
            return
        reach()
        if trainer.world.rank == 1:
            time.sleep(1000)  # setup
    def after_step(self, trainer):
        self.step = trainer.step
        if trainer.step == 3:
            reach()
        if trainer.step == 3 and trainer.world.rank == 0 and kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if trainer.step != 3 or trainer.world.rank != 1:
            return
        if kind == "loop":
            loop_forever()
        if kind == "lock":
            hold_the_lock()
        if kind == "other":
            torch.distributed.all_reduce(torch.zeros(77), group=self.group)  # other
        if kind == "data":
            trainer.loader = Asleep(trainer.loader)
        if kind == "evaluation":
            watch.Watch.opened[-1]._known.add("evaluation")  # as if it were not the first
            trainer.evaluation.validation = Asleep(trainer.evaluation.validation)
    def tensors(self):
        if kind == "save" and self.step and dist.discover().rank == 1:
            time.sleep(1000)  # tensors
        return {}
"""


@pytest.fixture
def hang(ranks: Any) -> Callable[..., tuple[str, str]]:
    """Return a function that lets rank 1 of 3 hang, and returns the message and the report."""
    return partial(hanging.run, ranks, 3, CULPRIT)


def line_of(comment: str) -> int:
    """Return the number of the script's line with a comment."""
    return hanging.line_of(comment, hanging.script(CULPRIT))


@pytest.mark.parametrize(
    ("kind", "where", "comment"),
    [
        ("loop", "loop_forever (training after 2 steps)", "endless"),
        ("data", "take (training after 3 steps)", "loader"),
        ("evaluation", "__getitem__ (evaluation after 3 steps)", "validation"),
        ("save", "tensors (saving a checkpoint after 3 steps)", "tensors"),
        ("start-up", "setup (start-up)", "setup"),
    ],
)
def test_the_rank_that_does_not_come_is_named_with_its_line(hang: Any, kind: str, where: str, comment: str) -> None:
    message, report = hang(kind, *(["train.hang_s=1"] if kind == "start-up" else []))
    assert "rank 1 has not reached " in message
    assert re.search(r"rank 1 \([\w.-]+\) is at hang.py:" + str(line_of(comment)) + re.escape(f" in {where}"), message)
    assert re.search(r"ranks 0, 2 \([\w.-]+\) are at ", message)
    assert report.startswith(message.partition(". Stacks of all")[0])
    assert f'hang.py", line {line_of(comment)}' in report


def test_a_rank_that_holds_the_interpreter_is_described_by_its_neighbor(hang: Any) -> None:
    message, report = hang("lock")
    where = f"hang.py:{line_of('backtracks')} in hold_the_lock, where its interpreter is blocked"
    assert re.search(r"rank 1 \([\w.-]+\) is at " + where, message)
    assert "rank 1 has not reached " in message
    assert "after_step" in report


def test_a_stopped_process_is_named(hang: Any) -> None:
    """Also if it is the one that reports as a rule, and has the store."""
    message, _ = hang("stop")
    assert re.search(r"rank 0 \([\w.-]+\) is stopped \(SIGSTOP", message)
    assert "rank 0 has not reached " in message


def test_ranks_in_different_collectives_are_named(hang: Any) -> None:
    message, _ = hang("other")
    assert "rank 1 has not reached all_reduce number" in message
    assert f"hang.py:{line_of('other')} in after_step" in message
    assert "waiting in all_reduce of float32 [77] of another group" in message


def test_a_wait_in_mpi_is_named(ranks: Any) -> None:
    """DDP averages the gradients of CPUs over MPI, of which torch knows nothing and for which ranks poll."""
    message, report = hanging.run(ranks, 2, CULPRIT, "loop", under="mpiexec")
    assert "rank 0 waits in communicator.Allreduce for rank 1; " in message
    assert f"hang.py:{line_of('endless')} in loop_forever" in message
    assert "in average_over_mpi" in report


SHAPES = """
import sys
import torch
import torch.distributed

def train(rank):
    torch.distributed.all_reduce(torch.ones(8 + rank))  # shapes

if sys.argv[1] == "session":
    from wordrun import dist

    with dist.session(hang_s=60) as world:
        train(world.rank)
else:
    torch.distributed.init_process_group("gloo")
    train(torch.distributed.get_rank())
"""


@pytest.mark.parametrize("how", ["session", "launch --hang"])
def test_the_line_is_printed_in_which_ranks_have_different_shapes(
    how: str, ranks: Any, command: Command, tmp_path: Path
) -> None:
    """gloo aborts one of them from a thread of its own, and does not say where: faulthandler does."""
    (tmp_path / "shapes.py").write_text(SHAPES)
    if how == "session":
        done = ranks(2, "shapes.py", how, under="fork", timeout=60)
    else:
        done = command("launch", "--hang", "60", "-n", "2", sys.executable, "shapes.py", how)
    said = done.stdout + done.stderr
    assert abs(done.returncode) % 128 == signal.SIGABRT, said
    assert ("collective mismatch" if torch.__version__ >= "2.9" else "enforce fail") in said  # gloo's own words
    assert "Fatal Python error: Aborted" in said
    assert re.search(rf'^  File ".*shapes.py", line {hanging.line_of("shapes", SHAPES)} in train$', said, re.M), said


NETWORK = """
import ctypes, os, subprocess, sys
import torch
import torch.distributed

def enter(namespace):
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0

def train(rank):
    for step in range(100_000):
        torch.distributed.all_reduce(torch.ones(8))  # network
        if step == 3 and rank == 1:
            subprocess.run(["ip", "link", "set", "cable", "down"], check=True)

rank = int(os.environ["RANK"])
enter(sys.argv[2 + rank])
os.environ |= {"MASTER_ADDR": "10.99.77.1", "GLOO_SOCKET_IFNAME": "cable"}
if sys.argv[1] == "session":
    from wordrun import dist

    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank)}
    os.environ |= {**alone, "WORDRUN_HOSTS": "one,two"}
    with dist.session(hang_s=2):
        train(rank)
else:
    torch.distributed.init_process_group("gloo")
    train(rank)
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Return the names of two network namespaces, which a cable connects."""
    names = [f"wordrun-{os.getpid()}-{i}" for i in range(2)]

    def on(host: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", names[host], *words]

    def run(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")

    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        cable = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
        run("ip", "link", "add", "cable", "netns", names[0], *cable)
        for host in range(2):
            run(*on(host, "ip", "addr", "add", f"10.99.77.{host + 1}/24", "dev", "cable"))
            for device in ("lo", "cable"):
                run(*on(host, "ip", "link", "set", device, "up"))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


ENDING = """
import os, runpy, sys, threading, time
from pathlib import Path
from wordrun.dist.hang import stacks
from wordrun.dist.hang import watch

def end_when_reported():
    while not list(Path.cwd().rglob("hang-*.txt")):
        time.sleep(0.05)
    os._exit(1)

stacks.DUMP_S = 20.0
threading.Thread(target=end_when_reported, daemon=True).start()
if "WORDRUN_HANG_S" in os.environ:
    # On a busy machine any step may take seconds.
    measured = watch.Waits.__call__
    watch.Waits.__call__ = lambda self: measured(self) if os.path.exists("reached") else 0.0
    watch.start_from_env()  # as the sitecustomize of launch --hang does
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program until a hang is reported."""
CUT_OFF = r"(all ranks have|rank \d has not) reached all_reduce number \d+ of float32 \[8\] of 2 ranks"


def test_a_host_that_is_cut_off(hosts: list[str], ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "ending.py").write_text(ENDING)
    ranks(2, "ending.py", "network.py", "session", *hosts, under="fork", timeout=60)
    (report,) = tmp_path.glob("failures/*/hang-*.txt")
    text = report.read_text()
    assert re.search(CUT_OFF, text)
    assert f"network.py:{hanging.line_of('network', NETWORK)} in train" in text
    assert ("(one)" in text and "(two)" in text) or "(one, two)" in text


def test_a_host_that_is_cut_off_under_launch_hang(hosts: list[str], command: Command, tmp_path: Path) -> None:
    """The program knows nothing of wordrun."""
    (tmp_path / "network.py").write_text(NETWORK)
    done = command("launch", "--hang", "2", "-n", "2", sys.executable, "network.py", "plain", *hosts)
    assert done.returncode == 124, done.stderr
    assert re.search(f"no progress for 2 s: {CUT_OFF}", done.stderr), done.stderr
    assert f"network.py:{hanging.line_of('network', NETWORK)} in train" in done.stderr


PLAIN = """
import os, signal, sys, time
import torch
import torch.distributed as td

kind, rank = sys.argv[1], int(os.environ["RANK"])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        if kind == "data" and i > 3 and rank == 1:
            time.sleep(1000)  # loader
        return torch.ones(4)

torch.set_num_threads(1)
td.init_process_group("gloo")
group = td.new_group([0, 1])
for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=1)):
    td.all_reduce(batch)  # everyone
    if step == 3:
        open("reached", "w").close()
    if step == 3 and rank == 1:
        if kind == "loop":
            while True: pass  # endless
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # stop
        if kind == "other":
            td.all_reduce(torch.zeros(77), group=group)  # other
"""


HANG = {"WORDRUN_HANG_S": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
"""What ``launch --hang 1`` gives to ranks."""


@pytest.fixture
def plain_hang(ranks: Any, tmp_path: Path) -> Callable[..., str]:
    """Return a function that lets ranks of a program hang that knows nothing of wordrun, and returns the report."""

    def run(size: int, *words: str, **env: str) -> str:
        (tmp_path / "plain.py").write_text(PLAIN)
        (tmp_path / "ending.py").write_text(ENDING)
        done = ranks(size, "ending.py", "plain.py", *words, under="fork", timeout=60, **HANG, **env)
        (report,) = tmp_path.rglob("hang-*.txt")
        text = report.read_text()
        assert text.startswith("no progress for 1 s: "), done.stdout + done.stderr
        return text.partition("\n")[0]

    return run


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("loop", f"at plain.py:{hanging.line_of('endless', PLAIN)} in <module>;"),
        ("data", f"at plain.py:{hanging.line_of('loader', PLAIN)} in __getitem__;"),
        ("other", f"at plain.py:{hanging.line_of('other', PLAIN)} in <module>, waiting in all_reduce of float32 [77]"),
        ("stop", "stopped (SIGSTOP or SIGTSTP);"),
    ],
)
def test_a_plain_programs_rank_that_does_not_come_is_named(plain_hang: Any, kind: str, where: str) -> None:
    message = plain_hang(3, kind)
    waits = r"rank 1 has not reached all_reduce number \d+ of float32 \[1, 4\] of 3 ranks; "
    assert re.match(rf"no progress for 1 s: {waits}rank 1 \([\w.-]+\) is {re.escape(where)}", message)
    everyone = hanging.line_of("everyone", PLAIN)
    assert re.search(rf"; ranks 0, 2 \([\w.-]+\) are at plain.py:{everyone} in <module>", message)
