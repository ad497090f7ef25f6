"""What ``launch`` shows of its ranks and their launcher: whole lines, the failed rank's own, and no noise."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wordrun.launch.elastic.starter import LOST_STORE
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.output import MIXED_S, PARTIAL_S, Output, Pipe
from wordrun.launch.output_tail import Tail

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
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to the other ranks
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"):
        time.sleep(0.02)
    sys.exit("no such thing")
pathlib.Path("ready").touch()
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


def test_lines_do_not_mix_in_a_job_of_one_host(command: Command, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\n")
    job = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    done = command("launch", "--ppn", "2", "--oversubscribe", "python", "-c", HALVES, **job)
    assert sorted(done.stdout.splitlines()) == sorted(f"rank {rank} line {i}" for rank in range(2) for i in range(40))


def test_a_line_in_two_halves_is_not_split_while_others_print(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank may pause within a line for longer than a prompt waits, where other processes have its core."""
    output, pipes = Output(), [os.pipe() for _ in range(2)]
    for rank, (reader, _) in enumerate(pipes):
        output.add(Pipe(reader, 1, rank))
    (_, slow), (_, busy) = pipes

    def lines_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            os.write(busy, b"a line\n")
            for key in output.select(0):
                output.pump(key.data)
            output.forward_partial()
            time.sleep(PARTIAL_S / 10)

    os.write(slow, b"one ")
    lines_for(3 * PARTIAL_S)
    os.write(slow, b"line\nname? ")
    lines_for(MIXED_S + 2 * PARTIAL_S)
    shown = capfd.readouterr().out
    assert "\none line\n" in shown
    assert "\nname? a line\n" in shown  # a prompt does not wait forever
    output.close()


@pytest.mark.parametrize("late_s", [2 * PARTIAL_S, MIXED_S + PARTIAL_S])
def test_a_line_whose_end_has_arrived_is_not_split(late_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    """Launch itself may not get a core for longer than a prompt waits."""
    output, (reader, writer) = Output(), os.pipe()
    pipe = Pipe(reader, 1, 0)
    output.add(pipe)
    os.write(writer, b"one ")
    output.pump(pipe)
    os.write(writer, b"line\n")
    time.sleep(late_s)
    assert output.forward_partial()
    assert capfd.readouterr().out == ""
    output.pump(pipe)
    assert capfd.readouterr().out == "one line\n"
    output.close()


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
    assert job.communicate(timeout=90)[0].count("done") == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["--hostfile", "hosts"], ["0", "1"]), (["--launcher-args", "-prepend-rank"], ["[0] 0", "[1] 1"])],
)
def test_what_the_launcher_does_with_output_is_left_to_it(
    words: Sequence[str], shown: list[str], command: Command, tmp_path: Path
) -> None:
    """The hosts of a file may be others, which do not have the pipes."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    done = command("launch", *words, "-n", "2", "sh", "-c", "[ -p $WORDRUN_STATUS_DIR/0.err ] || echo $RANK")
    assert sorted(done.stdout.splitlines()) == shown


@pytest.mark.parametrize("after", [0, 3])
def test_without_named_pipes_there_are_none(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = os.mkfifo, []

    def fails(path: str, mode: int) -> None:
        if len(made) == after:
            raise OSError(1, "Operation not permitted")
        made.append(path)
        make(path, mode)

    monkeypatch.setattr(os, "mkfifo", fails)
    output = Output(pipes=str(tmp_path))
    output.open_pipes(2)
    assert (output.pipes, output.tails, os.listdir(tmp_path)) == ("", {}, [])
    output.close()


def test_a_process_that_keeps_printing_does_not_hold_launch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    output, (reader, writer) = Output(), os.pipe()
    output.add(Pipe(reader, 1))
    pump, pumped = output.pump, 0

    def again(pipe: Pipe) -> None:
        nonlocal pumped
        pumped += 1
        assert pumped < 1000
        pump(pipe)
        os.write(writer, b"more\n")

    monkeypatch.setattr(output, "pump", again)
    os.write(writer, b"some\n")
    output.drain()
    output.close()
    os.close(writer)


@pytest.mark.parametrize("launcher", [["--launcher", "hydra"], ["--launcher", "torchrun"], ["--elastic"]])
@pytest.mark.parametrize(
    ("stream", "to", "error"),
    [
        (1, ">/dev/full", "No space left on device"),
        (1, ">&-", "Bad file descriptor"),
        (2, "2>/dev/full", "No space left on device"),
        (2, "2>&-", "Bad file descriptor"),
    ],
)
def test_output_that_cannot_be_written(
    launcher: list[str], stream: int, to: str, error: str, command: Command, tmp_path: Path
) -> None:
    words = " ".join(["launch", *launcher, "-n", "2"])
    done = command("sh", "-c", f"{words} sh -c 'echo much >&{stream}' {to}")
    assert done.returncode == 1
    assert record(tmp_path)["exit_status"] == 1
    if stream == 1:
        assert f"launch: cannot write to stdout: {error}\n" in done.stderr


@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
def test_a_single_process_writes_itself(to: str, command: Command) -> None:
    done = command("sh", "-c", f"launch sh -c 'echo much' {to}")
    assert done.returncode == 1
    assert "sh: 1: echo: echo: I/O error" in done.stderr or "write error" in done.stderr


def test_nobody_reads_stderr(start: Start) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    job = start("launch", "-n", "2", "sh", "-c", "exit 3", stderr=writer)
    os.close(writer)
    assert job.wait(timeout=90) == 3


def test_a_non_blocking_stdout_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = "import os; from wordrun.launch.output import Output; o = Output(); o._write(1, b'x' * 300_000); o.close()"
    job = subprocess.Popen([sys.executable, "-c", code], stdout=writer)
    os.close(writer)
    time.sleep(0.5)
    with os.fdopen(reader, "rb") as file:
        assert len(file.read()) == 300_000
    assert job.wait(timeout=90) == 0


def wait_until_full(pipe: int) -> None:
    """Wait until a pipe that nobody reads takes no more."""
    writer = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY)
    while select.select([], [writer], [], 0)[1]:
        time.sleep(0.02)
    os.close(writer)


def test_a_reader_that_pauses_does_not_hold_signals_up(start: Start) -> None:
    """As ``less`` does, or tee on a file system that hangs."""
    reader, writer = os.pipe()
    job = start("launch", "-n", "2", "sh", "-c", "yes", stdout=writer)
    os.close(writer)
    wait_until_full(reader)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=90) == 128 + signal.SIGTERM
    os.close(reader)


def test_a_slow_reader_gets_everything(start: Start) -> None:
    job = start("launch", "-n", "2", "sh", "-c", "seq 100000")
    assert job.stdout
    wait_until_full(job.stdout.fileno())
    assert len(job.stdout.read().splitlines()) == 200_000
    assert job.wait(timeout=90) == 0


@by_launcher
def test_the_last_lines_are_the_failed_ranks_own(launcher: str, command: Command) -> None:
    done = command("launch", "--launcher", launcher, "-n", "2", "python", "-c", FAILS)
    assert done.returncode == 1
    assert done.stderr.count("my peer is gone") == 20
    end = ["launch: the last lines of rank 1:", "launch:   no such thing"]
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
    assert (done.returncode, done.stdout) == (5, "")
    assert [line for line in done.stderr.splitlines() if not line.startswith("launch: starting ")] == [
        "launch: rank 1 ended with exit status 5"
    ]
    assert any(line.startswith("Abort(5) on node 1") for line in record(tmp_path)["not_shown"])


def test_what_only_the_launcher_knows_is_shown(command: Command) -> None:
    """No rank can report if its whole process group is killed."""
    done = command("launch", "-n", "2", "sh", "-c", "[ $RANK = 0 ] || kill -KILL 0; sleep 30")
    assert done.returncode == 9
    assert "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES" in done.stdout


def test_under_guardians_a_lost_store_is_left_out_with_its_stack_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lost = [
        "[rank1]:[W1123 17:33:30.4 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=9): reset by peer",
        "Exception raised from recvBytes at torch/csrc/distributed/c10d/Utils.hpp:784 (most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f66cfd54b8d in libc10.so)",
        "<omitting python frames>",
        "frame #19: <unknown function> + 0x891f5 (0x7f66d0ea71f5 in libc.so.6)",
    ]
    others = ["[rank1]:[W1123 17:33:31.3 ProcessGroup.cpp:9] [c10d] recvValue", *lost[1:]]
    output, (reader, writer) = Output(LOST_STORE), os.pipe()
    output.add(Pipe(reader, 2, 1))
    output.tails[1] = Tail()
    os.write(writer, "".join(f"{line}\n" for line in [*lost, "", "a line", *lost, *others]).encode())
    os.close(writer)
    output.drain()
    assert capfd.readouterr().err.splitlines() == ["a line", *others]
    assert output.folded == [*lost, *lost]
    output.close()


def test_noise_among_the_ranks_lines_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """As over several hosts, where all output comes through mpiexec."""
    hydra = LAUNCHERS["hydra"]
    output = Output(hydra.noise, hydra.own_lines)
    lines = ["a rank's line", "[proxy:0@n1] HYDU_sock_write (lib/utils/sock.c:250): write error (Bad file descriptor)"]
    block = ["=" * 83, "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   PID 1 RUNNING AT n1", "=" * 83]
    for quiet, show in ((False, [lines[0], *block]), (True, [lines[0]])):
        output.quiet = quiet
        reader, writer = os.pipe()
        output.add(Pipe(reader, 2))
        os.write(writer, "".join(f"{line}\n" for line in [*lines, *block]).encode())
        os.close(writer)
        output.drain()
        assert capfd.readouterr().err.splitlines() == show
    assert output.folded == [lines[1], lines[1], *block]
    output.close()
