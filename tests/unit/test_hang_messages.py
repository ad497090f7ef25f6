"""The message about a hang, from the answers of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from wordrun.common import files, stack_requests
from wordrun.dist import World
from wordrun.dist.hang import report as hang, stacks, watch
from wordrun.dist.hang.report import Answer
from wordrun.dist.mesh import Layout
from wordrun.train import failing

if TYPE_CHECKING:
    from conftest import Command

CALL = {"group": "0", "seq": 12, "op": "all_reduce", "size": "float32 [8]"}
WAITS: Any = {"pending": [CALL], "last": {"0": 12}, "line": "train.py:9 in step"}
WORLD = World(size=4, local_size=2, nodes=2, hosts=("a", "b"))


def waiting(rank: int) -> Answer:
    return Answer(rank, "ab"[rank // 2], 100 + rank, **WAITS)


def test_who_has_not_come_is_named_first() -> None:
    late = Answer(2, "b", 102, line="data.py:3 in read", last={"0": 11}, phase="training", step=5)
    text = hang.describe([waiting(0), waiting(1), late, waiting(3)], WORLD)
    assert text == (
        "rank 2 has not reached all_reduce number 12 of float32 [8] of 4 ranks; "
        "rank 2 (b) is at data.py:3 in read (training after 5 steps); ranks 0-1, 3 (a, b) are at train.py:9 in step"
    )


def test_silent_ranks_are_named_with_the_host_where_they_should_be() -> None:
    text = hang.describe([waiting(0), waiting(1)], WORLD)
    assert text.startswith("ranks 2-3 have not reached all_reduce number 12 of float32 [8] of 4 ranks; ")
    assert "ranks 2-3 (b) are silent" in text


def test_a_rank_that_has_ended_is_named_with_what_the_others_wait_in() -> None:
    """It is not silent; of those that have not answered, the others are."""
    text = hang.describe([waiting(0), waiting(1)], WORLD, ended={0, 2})
    assert text.startswith(
        "rank 2 (b) has ended with status 0; others wait for it at train.py:9 in step; ranks 2-3 have "
    )
    assert "; rank 3 (b) is silent; ranks 0-1 (a) are at train.py:9 in step" in text
    asked = hang.describe([waiting(0)], WORLD, ended={1, 2, 3}, hangs=False)
    assert asked.startswith("ranks 1-3 (a, b) have ended with status 0; ranks 1-3 have not reached")


def test_different_shapes_in_one_collective_are_named() -> None:
    other = replace(waiting(3), pending=[{**CALL, "size": "float32 [9]"}])
    text = hang.describe([waiting(0), waiting(1), waiting(2), other], WORLD)
    assert text.startswith(
        "the ranks have called different collectives: rank 3 all_reduce number 12 of float32 [9], "
        "ranks 0-2 all_reduce number 12 of float32 [8], of 4 ranks; "
    )
    ended = replace(other, pending=[], recent=other.pending, last={"0": 13}, line="train.py:10 in step")
    assert hang.describe([waiting(0), waiting(1), waiting(2), ended], WORLD).startswith(text.partition(";")[0])


def test_the_rank_that_waits_for_nobody_is_the_reason() -> None:
    """Rank 3 sleeps; rank 2, in a group with it, cannot reach the collective of all."""
    inner = {"group": "g", "seq": 3, "op": "all_gather", "size": "float32 [2]"}
    in_group = Answer(2, "b", 102, pending=[inner], last={"0": 11, "g": 3}, groups={"g": [(2, 3, 1)]}, line="tp.py:1")
    asleep = Answer(3, "b", 103, last={"0": 11, "g": 2}, line="user.py:7 in nap")
    text = hang.describe([waiting(0), waiting(1), in_group, asleep], WORLD)
    assert text.startswith("rank 3 has not reached all_gather number 3 of float32 [2] of 2 ranks in group g; rank 3 (")


def test_the_place_of_ranks_in_a_layout_is_named() -> None:
    """Rank 3, the second of two tensor-parallel ranks of the second stage, sleeps."""
    inner = {"group": "7", "seq": 3, "op": "all_gather", "size": "float32 [2]"}
    in_group = Answer(2, "b", 102, pending=[inner], last={"7": 3}, groups={"7": [(2, 3, 1)]}, line="tp.py:1 in f")
    asleep = Answer(3, "b", 103, last={"7": 2}, line="user.py:7 in nap")
    others = [Answer(rank, "a", rank, line="pipe.py:4 in receive") for rank in (0, 1)]
    text = hang.describe([*others, in_group, asleep], WORLD, Layout(pp=2, tp=2))
    assert text == (
        "rank 3 has not reached all_gather number 3 of float32 [2] of 2 ranks along tp; "
        "rank 3 (b; pp=1, tp=1) is at user.py:7 in nap; rank 2 (b; pp=1, tp=0) is at tp.py:1 in f; "
        "ranks 0-1 (a; pp=0) are at pipe.py:4 in receive"
    )
    assert hang.names([3], ["b"], Layout(replicate=4)) == "rank 3 (b)"
    assert hang.names([3], ["b"], Layout(pp=4)) == "rank 3 (b; pp=3)"


def test_ranks_that_are_asked_while_they_work_do_not_hang() -> None:
    everyone = [waiting(rank) for rank in range(4)]
    asked = hang.describe(everyone, WORLD, hangs=False)
    assert asked.startswith("all ranks have reached all_reduce number 12 of float32 [8] of 4 ranks; ranks 0-3 (")
    assert "check the network between them" in hang.describe(everyone, WORLD)


def test_files_of_wordrun_are_named_as_modules_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stacks.short(stacks.__file__) == "wordrun/dist/hang/stacks.py"


def test_without_collectives_the_lines_are_all_there_is() -> None:
    found = [Answer(rank, "a", 1, line=f"x.py:{rank // 3} in f") for rank in range(4)]
    assert hang.describe(found, WORLD) == "rank 3 (a) is at x.py:1 in f; ranks 0-2 (a) are at x.py:0 in f"


def test_ten_thousand_ranks_are_one_paragraph_and_one_stack() -> None:
    calls = {"MainThread": [["train.py", 9, "step"]]}
    found = [replace(waiting(0), rank=rank, host=f"n{rank // 8}", stacks=calls) for rank in range(10_000)]
    del found[77]
    begun = time.monotonic()
    text = hang.describe(found, World(size=10_000, local_size=8, nodes=1250))
    assert "rank 77 has not reached" in text
    assert len(text) < 400
    assert hang.all_stacks(found).count("train.py") == 1
    assert time.monotonic() - begun < 10


def test_members_of_a_group_are_few_ranges() -> None:
    assert hang.spans(range(8), 8) == []
    assert hang.spans(list(range(1, 8, 2)), 8) == [(1, 7, 2)]
    assert hang.spans([0, 1, 5], 8) == [(0, 0, 1), (1, 1, 1), (5, 5, 1)]


def test_ranges_are_short() -> None:
    assert hang.ranges([5, 0, 1, 2]) == "0-2, 5"
    assert hang.ranges(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 42 more"


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"])
def test_another_process_writes_its_stacks_while_it_holds_the_interpreters_lock(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was started in the background of a script, where SIGQUIT is ignored."""
    monkeypatch.setattr(stacks, "DUMP_S", 20.0)
    script, name = tmp_path / "busy.py", f"busy-{os.getpid()}-{before}"
    script.write_text(
        "import re, signal\nfrom wordrun.dist.hang import stacks\n"
        f"signal.signal(signal.SIGQUIT, signal.{before})\ndump = stacks.Dump('{name}', 7)\n"
        "print(flush=True); re.match('(a+)+$', 60 * 'a' + 'b')\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            (peer,) = stacks.peers(name)
            assert peer[:2] == (7, process.pid)
            found = stacks.ask(*peer[1:])
            assert stacks.user_line(found) == "busy.py:5 in <module>"
            assert os.stat(peer[2]).st_size == 0
            os.kill(process.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 90
            while stacks.state(process.pid) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stacks.ask(*peer[1:]) == {}
        finally:
            process.kill()


def test_a_request_is_there_once_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    first = stack_requests.request(tmp_path, 3.0)
    assert stack_requests.request(tmp_path) == first
    old = time.time() - 1000
    os.utime(tmp_path / stack_requests.REQUEST, (old, old))
    assert stack_requests.request(tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_sigquit_asks_and_progress_is_no_hang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGQUIT)
    one = watch.Watch(World(), tmp_path / "failures", 1.0)
    try:
        with one.phase("training"):
            pass  # the first time, the limit is longer
        with one.phase("training"):
            assert one.limit == 1.0
            for _ in range(30):
                one.mark(1)
                time.sleep(0.05)
        assert not (tmp_path / "failures").exists()
        os.kill(os.getpid(), signal.SIGQUIT)
        deadline = time.monotonic() + 90
        while not list(tmp_path.glob("failures/stacks-*.txt")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        one.close()
    (report,) = (tmp_path / "failures").iterdir()
    assert f"{Path(__file__).name}" in report.read_text()
    assert signal.getsignal(signal.SIGQUIT) == before


def test_a_hang_is_reported_before_the_collective_fails(tmp_path: Path) -> None:
    one = watch.Watch(World(), tmp_path, 120.0, timeout_s=300)
    try:
        with one.phase("start-up", watch.SLOW):
            assert one.limit == 240
        assert failing.reason(ValueError("late")) == "ValueError: late"
        one.reported = tmp_path / "hang-1.txt"
        assert failing.reason(ValueError("late")) == "ValueError: late; a hang was reported before: hang-1.txt"
        one.mark(1)
        assert watch.reported() is None
    finally:
        one.close()


@pytest.mark.parametrize("in_thread", [False, True])  # as autograd's are, for accelerators
def test_compiling_the_backward_pass_is_no_hang(
    in_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiles it when it is first called, and again for another shape."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def slow(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.append(stacks.compiles(stacks.own()))
        end = time.monotonic() + 1.6
        while time.monotonic() < end:
            time.sleep(0.01)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=slow)
    torch._dynamo.reset()
    model = torch.compile(lambda x: x.sin().cos(), backend=backend, dynamic=False)
    losses = [model(torch.ones(size, requires_grad=True)).sum() for size in (2, 3)]
    monkeypatch.setattr(watch, "SLOW", 100.0)
    one = watch.Watch(World(), tmp_path / "failures", 1.0)  # longer than torch takes before it compiles
    try:
        with one.phase("training"):
            pass  # the first time, the limit is longer
        for loss in losses:
            with one.phase("training"):
                if in_thread:
                    thread = threading.Thread(target=loss.backward)
                    thread.start()
                    thread.join()
                else:
                    loss.backward()
        assert not (tmp_path / "failures").exists()
        with one.phase("training"):
            deadline = time.monotonic() + 90
            while not one.reported and time.monotonic() < deadline:
                time.sleep(0.05)
        assert one.reported
    finally:
        one.close()
    assert len(seen) == 2


def test_ranks_that_wait_for_one_that_compiles_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SLOW", 100.0)
    compiling = {"MainThread": [("/x/torch/_dynamo/convert_frame.py", 1, "compile_inner")]}
    one = watch.Watch(World(rank=0, size=2), tmp_path, 0.3)
    requests = list[str]()
    try:
        with one.phase("training"):
            pass
        with one.phase("training"):
            deadline = time.monotonic() + 90
            while not one.reported and time.monotonic() < deadline:
                time.sleep(0.01)
                asked = files.read_json(tmp_path / stack_requests.REQUEST)
                if asked and asked["id"] not in requests:
                    requests.append(asked["id"])
                    answer = Answer(1, "b", 1, stacks=compiling if len(requests) < 3 else {})
                    files.replace(tmp_path / asked["id"] / "1.json", json.dumps(vars(answer)))
    finally:
        one.close()
    assert len(requests) == 3
    assert one.reported


def test_a_folder_that_cannot_be_written_leaves_the_own_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    one = watch.Watch(World(), tmp_path / "file" / "failures", 0.2)
    try:
        with watch.phase("asleep"), watch.phase("asleep"), caplog.at_level("ERROR", "wordrun"):
            deadline = time.monotonic() + 90
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        one.close()
    assert f"{Path(__file__).name}:" in caplog.messages[0]
    assert "no progress for 1 s: at " in caplog.messages[0]
    assert "cannot ask other ranks: " in caplog.messages[0]


RECORDS = """
import torch
from wordrun import dist
from wordrun.dist.hang import flight_recorder
with dist.session(device="cpu"):
    torch.distributed.all_reduce(torch.ones(3, 4))
    while (record := flight_recorder.flight_records()[-1])["pending"]:
        pass  # another thread of torch's takes note of the end
    ranks = flight_recorder.group_members()[record["group"]]
    print(record["op"], record["size"], record["seq"], record["pending"], ranks)
"""


def test_torch_still_records_collectives_and_names_groups(command: Command) -> None:
    assert command(sys.executable, "-c", RECORDS).stdout == "all_reduce float32 [3, 4] 1 False [0]\n"
