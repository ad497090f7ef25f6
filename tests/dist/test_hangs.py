"""A run that hangs says which rank the others wait for, and in which line it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hanging

if TYPE_CHECKING:
    from conftest import Start

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
    def setup(self, trainer):
        self.group = torch.distributed.new_group([0, 1]) if kind == "other" else None
        if kind != "start-up":
            return
        reach()
        if trainer.world.rank == 1:
            time.sleep(1000)  # setup
    def after_step(self, trainer):
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
            watch._active[-1]._known.add("evaluation")  # as if it were not the first
            trainer.evaluation.validation = Asleep(trainer.evaluation.validation)
    def tensors(self):
        if kind == "save" and dist.discover().rank == 1:
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
    assert "rank 1 has not come to " in message
    assert re.search(r"rank 1 \([\w.-]+\) is at hang.py:" + str(line_of(comment)) + re.escape(f" in {where}"), message)
    assert re.search(r"ranks 0, 2 \([\w.-]+\) are at ", message)
    assert report.startswith(message.partition(". Stacks of all")[0])
    assert f'hang.py", line {line_of(comment)}' in report


def test_a_rank_that_holds_the_interpreter_is_described_by_its_neighbour(hang: Any) -> None:
    message, report = hang("lock")
    where = f"hang.py:{line_of('backtracks')} in hold_the_lock, where its interpreter is blocked"
    assert re.search(r"rank 1 \([\w.-]+\) is at " + where, message)
    assert "rank 1 has not come to " in message
    assert "after_step" in report


def test_a_stopped_process_is_named(hang: Any) -> None:
    """Also if it is the one that reports as a rule, and has the store."""
    message, _ = hang("stop")
    assert re.search(r"rank 0 \([\w.-]+\) is stopped \(SIGSTOP", message)
    assert "rank 0 has not come to " in message


def test_ranks_in_different_collectives_are_named(hang: Any) -> None:
    message, _ = hang("other")
    assert "rank 1 has not come to all_reduce number" in message
    assert f"hang.py:{line_of('other')} in after_step" in message
    assert "waiting in all_reduce of float32 [77] of another group" in message


def test_a_wait_in_mpi_is_named(hang: Any) -> None:
    """DDP averages the gradients of CPUs over MPI, of which torch knows nothing."""
    message, report = hang("loop", under="mpiexec")
    assert re.search(r"rank 1 has not come to MPI_Allreduce number \d+ of float32 \[3872\] of 3 ranks; ", message)
    assert f"hang.py:{line_of('endless')} in loop_forever" in message
    assert "waits for MPI_Allreduce" in report


SHAPES = """
import torch
import torch.distributed
from wordrun import dist

with dist.session(hang_s=60) as world:
    torch.distributed.all_reduce(torch.ones(8 + world.rank))  # shapes
"""


def test_ranks_with_different_shapes_end_with_their_line(ranks: Any, tmp_path: Path) -> None:
    """gloo aborts the process from a thread of its own instead of waiting, and does not say where."""
    (tmp_path / "shapes.py").write_text(SHAPES)
    done = ranks(2, "shapes.py", timeout=60)
    assert done.returncode != 0
    assert "collective mismatch" in done.stdout + done.stderr
    aborted = rf'shapes\.py", line {hanging.line_of("shapes", SHAPES)} in <module>'  # a traceback would have a comma
    assert re.search(aborted, done.stdout + done.stderr), done.stdout + done.stderr


NETWORK = """
import os, sys
import torch
import torch.distributed
from wordrun import dist

with dist.session(hang_s=2) as world:
    for step in range(100_000):
        torch.distributed.all_reduce(torch.ones(8))  # network
        if step == 3:
            print("ready", flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[Callable[..., list[str]]]:
    """Return a function that runs a command in one of two network namespaces, which a cable connects."""
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
        yield on
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_host_that_is_cut_off(hosts: Any, start: Start, tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    told = {
        "WORDRUN_LAUNCHER": "local", "MASTER_ADDR": "10.99.77.1", "MASTER_PORT": "23456", "WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORDRUN_HOSTS": "one,two", "GLOO_SOCKET_IFNAME": "cable",
    }  # fmt: skip
    jobs = [
        start(*hosts(n, sys.executable, "network.py"), env={**os.environ, **told, "RANK": str(n), "NODE_RANK": str(n)})
        for n in range(2)
    ]  # fmt: skip
    assert jobs[0].stdout is not None
    assert jobs[0].stdout.readline() == "ready\n", jobs[0].communicate()[1]
    subprocess.run(hosts(1, "ip", "link", "set", "cable", "down"), check=True)
    deadline = time.monotonic() + 90
    while not (found := list(tmp_path.glob("failures/*/hang-*.txt"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    text = found[0].read_text()
    assert re.search(
        r"(all ranks have|rank \d has not) come to all_reduce number \d+ of float32 \[8\] of 2 ranks", text
    )
    assert f"network.py:{hanging.line_of('network', NETWORK)} in <module>" in text
    assert ("(one)" in text and "(two)" in text) or "(one, two)" in text
