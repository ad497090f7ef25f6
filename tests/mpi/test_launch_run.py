"""``launch`` with real ranks: exit statuses, signals, orphans, the record, and what it costs."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stand_in

from forked import without_gloo
from wordrun.launch.supervisor import STOP_PATIENCE_S

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = pytest.mark.mpi

BIN = Path(sys.prefix) / "bin"
LAUNCH = str(BIN / "launch")
REPO = Path(__file__).parents[2]

# A rank that tells what signals it gets, needs a moment to finish after each, and says when it has.
POLITE = """
import os, signal, sys, time
asked = []
def note(number, frame):
    # In one write: print makes two of it, and another rank's words come between.
    sys.stdout.write(f"rank {os.environ['RANK']} got {signal.Signals(number).name}\\n")
    asked.append(number)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), note)
print(f"rank {os.environ['RANK']} ready", flush=True)
end = time.time() + 100
while time.time() < end and not set(asked) & {signal.SIGINT, signal.SIGTERM}:
    time.sleep(0.02)
time.sleep(0.5)
print(f"rank {os.environ['RANK']} finished", flush=True)
"""
MPI = "import time; from mpi4py import MPI; time.sleep(1)"
APART = "launch: the 2 ranks never connected to each other, so COMMAND ran 2 times, separately"
BY_MPI = (
    "launch: the 2 ranks never connected to each other: unless COMMAND exchanges data by MPI itself, it ran 2 times"
)


@pytest.mark.parametrize(
    ("launcher", "words", "line"),
    [
        ("hydra", ["hostname"], ""),
        ("hydra", [sys.executable, "-c", "import torch, time; time.sleep(1)"], f"{APART}. To work together"),
        ("hydra", [sys.executable, "-c", MPI], ""),
        ("hydra", [sys.executable, "-c", f"import torch; {MPI}"], BY_MPI),
        ("torchrun", [sys.executable, "-c", MPI], f"{APART}: each was rank 0 of 1 for its MPI library"),
    ],
    ids=["no library", "torch apart", "MPI", "torch and MPI", "MPI under torchrun"],
)
def test_separate_runs_that_look_like_one_are_named(
    command: Command, launcher: str, words: list[str], line: str
) -> None:
    done = command(LAUNCH, "-n", "2", "--launcher", launcher, *words)
    assert done.returncode == 0, done.stderr
    assert ("never connected" in done.stderr) == bool(line)
    assert line in done.stderr
    warned = "with torchrun (each rank of an MPI program is rank 0 of 1)\n" in done.stderr
    assert warned == (launcher == "torchrun")


# Lightning finds its ranks through MPI, and on CPUs uses one device if nobody says how many.
LIGHTNING = """
import sys, time
import lightning
found = getattr(lightning, sys.argv[1])(accelerator="cpu")
found.strategy.setup_environment()
found.strategy.barrier()
time.sleep(1)
sys.stdout.write(f"{found.global_rank} of {found.world_size}\\n")
"""


@pytest.mark.parametrize(("given", "joined"), [("Fabric", False), ("Trainer", True)])
def test_lightning_without_devices(tmp_path: Path, given: str, joined: bool) -> None:
    pytest.importorskip("lightning")
    run = launch(tmp_path, "-n", "2", "python", script(tmp_path, LIGHTNING), given)
    assert run.returncode == 0, run.stderr
    found = sorted(re.findall(r"^\d of \d$", run.stdout, re.MULTILINE))
    assert found == (["0 of 2", "1 of 2"] if joined else ["0 of 1"] * 2)
    assert (BY_MPI in run.stderr) != joined


def test_a_dry_run_with_torchrun_says_that_mpi_programs_see_one_rank(command: Command) -> None:
    shown = command(LAUNCH, "--dry-run", "-n", "2", "--launcher", "torchrun", "true").stdout
    assert "# launcher: torchrun" in shown
    assert "(--launcher torchrun; each rank of an MPI program is rank 0 of 1)" in shown


# Ranks that have met, and print where they listen, except at sockets that they have inherited from mpiexec.
LISTEN = """
import os, sys
import torch
from wordrun.dist import session
from wordrun.launch.connection_watch import LISTENING, connections, sockets

with session():
    torch.distributed.barrier()
    own = {*sockets(os.getpid())} - {*sockets(os.getppid())}
    found = {here.rpartition(":")[0] for state, here, _, inode in connections() if state == LISTENING and inode in own}
    sys.stdout.write(f"{os.environ['RANK']} listens at {sorted(found)}\\n")
    torch.distributed.barrier()
"""


def test_on_one_machine_wordruns_ranks_listen_on_loopback_only(command: Command, tmp_path: Path) -> None:
    (tmp_path / "listen.py").write_text(LISTEN)
    done = command(LAUNCH, "-n", "2", "--launcher", "hydra", sys.executable, "listen.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} listens at ['0100007F']" for rank in range(2)]


# A rank that nothing but SIGKILL ends, with a child that is the same, in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


def environment(cwd: Path) -> dict[str, str]:
    names = ("HOME", "LANG", "PYTHONPATH", "TMPDIR", stand_in.VARIABLE)
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_STATE_HOME": str(cwd / "state"),
        **{n: os.environ[n] for n in names if n in os.environ},
    }


def launch(cwd: Path, *words: str, timeout: float = 60, **extra: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LAUNCH, *words], cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=timeout, **extra
    )


@pytest.fixture
def start(start: Start) -> Iterator[Start]:
    """Start launch without waiting for it; what still runs at the end of the test is ended."""
    jobs: list[subprocess.Popen[str]] = []

    def begin(cwd: Path, *words: str, **env: str) -> subprocess.Popen[str]:
        jobs.append(start(LAUNCH, *words, cwd=cwd, env={**environment(cwd), **env}, stdin=subprocess.DEVNULL))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.wait()
        for status_dir in status_dirs(job):
            shutil.rmtree(status_dir)  # a killed launch cannot


def status_dirs(job: subprocess.Popen[str]) -> list[Path]:
    return list(Path(os.environ.get("TMPDIR") or "/tmp").glob(f"wordrun-launch-{job.pid}-*"))


def stop(job: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to stop and wait until launch has passed it on: two at once would be one."""
    (mark,) = (status_dir / "stopped" for status_dir in status_dirs(job))
    mark.unlink(missing_ok=True)
    job.send_signal(number)
    end = time.monotonic() + 60
    while not mark.exists():
        assert job.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for(job: subprocess.Popen[str], text: str, times: int) -> str:
    assert job.stdout is not None
    seen = ""
    while seen.count(text) < times:
        line = job.stdout.readline()
        assert line, f"the job ended after {seen!r}: {job.communicate()[1]}"
        seen += line
    return seen


def finish(job: subprocess.Popen[str], timeout: float = 90) -> tuple[str, str]:
    return job.communicate(timeout=timeout)


def left_over(mark: str) -> list[str]:
    """Return the command lines of living processes that contain the argument ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if mark.encode() in words:
            found.append(b" ".join(words).decode())
    return found


def gone(mark: str, within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while left_over(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return not left_over(mark)


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def read_record(directory: Path) -> dict[str, Any]:
    (path,) = (directory / "state/wordrun/launches").iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    return content


LAUNCHERS = [("hydra", []), ("torchrun", ["--launcher", "torchrun"])]
by_launcher = pytest.mark.parametrize("words", [w for _, w in LAUNCHERS], ids=[name for name, _ in LAUNCHERS])


@pytest.mark.forked_programs
@by_launcher
def test_plain_ddp_runs_unmodified(tmp_path: Path, words: Sequence[str]) -> None:
    for _ in range(3):
        run = launch(tmp_path, *words, "-n", "2", "python", str(REPO / "benchmarks/plain_ddp.py"))
        # gloo's own, rare, where a group is destroyed right after a collective (wordrun.dist.cleanup avoids it).
        if "terminate called without an active exception" not in run.stderr:
            break
    assert run.returncode == 0, run.stderr
    # mpiexec reads the ranks' pipes in any order
    lines = without_gloo(run.stdout).splitlines()
    assert sorted(line.split(" on ")[0] for line in lines) == ["ok", "rank 0 of 2", "rank 1 of 2"]
    assert "never connected" not in run.stderr


SIZE = "sh -c 'sleep 0.2; echo $RANK $(wc -c)'"
ELSEWHERE = "--launcher hydra --hostfile hosts --env MASTER_ADDR=127.0.0.1 --launcher-args '-launcher fork'"


@pytest.mark.parametrize("by", ["--launcher hydra", "--launcher torchrun", "--elastic", ELSEWHERE])
def test_rank_0_has_all_of_stdin_and_the_others_have_none(tmp_path: Path, by: str) -> None:
    """At any size and speed, from pipes, files and nothing; whoever reads on after launch begins where it should."""
    (tmp_path / "hosts").write_text("a:1\nb:1\n")
    (tmp_path / "file").write_text("line 1\nline 2\n")
    run = f"{LAUNCH} -n 2 {by}"
    cases = {
        f"head -c 20000000 /dev/zero | {run} {SIZE}": ["0 20000000", "1 0"],
        f"(echo 1; sleep 0.7; printf 2) | {run} {SIZE}": ["0 3", "1 0"],
        f"{run} {SIZE} < file": ["0 14", "1 0"],
        f"(read x; {run} {SIZE}) < file": ["0 7", "1 0"],
        f"{run} {SIZE} < /dev/null": ["0 0", "1 0"],
        f"{run} {SIZE} <&-": ["0 0", "1 0"],
        f"yes | {run} head -c 2": ["y"],
        f"yes | {run} sh -c 'exec <&-; sleep 0.3; exit 3'; echo $?": ["3"],
    }
    for line, expected in [*cases.items()][: 3 if "torchrun" in by else None]:  # which is slow
        env = {**environment(tmp_path), "PATH": f"{BIN}:/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert sorted(done.stdout.splitlines()) == expected, (line, done.stderr)


def test_launch_ends_with_its_ranks_if_others_read_its_stdin(tmp_path: Path) -> None:
    """Of two that wait for the same pipe, one may find it empty, and stays in read() until there is more."""
    waiting = "touch ready$WORDRUN_LAUNCH_ID.$RANK; while [ ! -e go ]; do sleep 0.1; done"
    words = [LAUNCH, "-n", "2", "--launcher", "hydra", "sh", "-c", waiting]
    reader, writer = os.pipe()
    jobs = [subprocess.Popen(words, cwd=tmp_path, env=environment(tmp_path), stdin=reader) for _ in range(2)]
    try:
        end, in_read = time.monotonic() + 30, False
        while not in_read and time.monotonic() < end:
            time.sleep(0.05)
            if len([*tmp_path.glob("ready*")]) == 4:
                os.write(writer, b"x")
                time.sleep(0.2)
                threads = [path for job in jobs for path in Path(f"/proc/{job.pid}/task").glob("*/wchan")]
                in_read = any("pipe_read" in path.read_text() for path in threads)  # not where /proc does not say it
        (tmp_path / "go").touch()
        assert [job.wait(30) for job in jobs] == [0, 0]
    finally:
        os.close(writer)
        os.close(reader)
        for job in jobs:
            job.wait(30)


def test_a_rank_0_that_is_not_where_its_input_is(tmp_path: Path) -> None:
    """It has none, and launch says so if there was some."""
    (tmp_path / "uname").write_text("#!/bin/sh\necho elsewhere\n")
    (tmp_path / "uname").chmod(0o755)
    env = {**environment(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for given, told in (("input", True), ("", False)):
        words = [LAUNCH, "-n", "2", "--launcher", "hydra", "sh", "-c", "wc -c"]
        done = subprocess.run(words, cwd=tmp_path, env=env, input=given, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
        assert ("rank 0 did not run on this host, so it had no input" in done.stderr) == told


def test_ranks_that_are_relaunched_read_a_file_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("line 1\nline 2\n")
    words = ["--retries", "1", "sh", "-c", "cat; [ -e again ] || { touch again; kill -9 $$; }"]
    with (tmp_path / "file").open() as file:
        done = launch(tmp_path, "-n", "1", "--launcher", "hydra", *words, stdin=file)
    assert (done.returncode, done.stdout) == (0, "line 1\nline 2\n" * 2), done.stderr


@pytest.mark.parametrize("by", ["--launcher hydra", "--launcher torchrun", "--elastic", "--elastic --hang 99"])
def test_every_variable_reaches_the_ranks(tmp_path: Path, by: str) -> None:
    """Also those that dash drops, and those that a shell or rank_env.sh has itself."""
    odd = {
        b"BASH_FUNC_module%%": b'() {  echo "module $@"\n}',
        b"BASH_FUNC_a-b%%": b"() { :; }; echo evil",
        b"a.b": b"1",
        b"x-y": b"two words",
        b"-z": b"",
        b"new\nline": b"v\nw",
        b"line\n": b"2",
        b"\xff": b"\x80",
        b"": b"no name",
        b"1st": b"`id` $x '\"",
        b"long.value": b"x" * 100_000,
        b"IFS": b":",
        b"OPTIND": b"7",
        b"PPID": b"9",
        b"RANDOM": b"4",
        b"item": b"i",
        b"rest": b"r",
        b"times": b"t",
        b"node": b"n",
        b"status": b"s",
    }
    code = "import os; open('rank' + os.environ['RANK'], 'w').write(repr(dict(os.environb)))"
    (tmp_path / "show.py").write_text(code)
    env = {**{os.fsencode(name): os.fsencode(value) for name, value in environment(tmp_path).items()}, **odd}
    done = subprocess.run(
        [LAUNCH, "-n", "2", *by.split(), str(BIN / "python"), "show.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
        assert {name: found.get(name) for name in odd} == odd


# What wordrun.test_dist compares, without torch on each rank.
AS_MPI_SEES = """
import os, sys
from wordrun import dist
world = dist.identify()
from mpi4py.MPI import COMM_WORLD as comm
assert (world.rank, world.size) == (comm.rank, comm.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
sys.stdout.write(f"{comm.rank} of {comm.size}\\n")
"""


@pytest.mark.parametrize("counts", [(2, 1), (1, 3), (2, 1, 3)], ids=str)
def test_hosts_with_different_numbers_of_ranks(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Hydra takes different names for different hosts. Each rank compares what it is told with what MPI sees."""
    hosts = "abc"[: len(counts)]
    (tmp_path / "hosts").write_text("".join(f"{host}:{count}\n" for host, count in zip(hosts, counts, strict=True)))
    words = ["--hostfile", "hosts", "--env", "MASTER_ADDR=127.0.0.1", "--oversubscribe"]
    words += ["--launcher", "hydra", "--launcher-args", "-launcher fork"]
    show = ["sh", "-c", "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK $GROUP_RANK $PMI_HOSTNAME"]
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    expected = [f"{rank} {local} {counts[node]} {node} {node}" for rank, (node, local) in enumerate(places)]
    done = launch(tmp_path, *words, *show)
    assert sorted(done.stdout.splitlines()) == [
        f"{line} {hosts[node]}" for line, (node, _) in zip(expected, places, strict=True)
    ]
    assert sorted(launch(tmp_path, *words, "--elastic", *show).stdout.splitlines()) == expected
    if counts == (2, 1):
        done = launch(tmp_path, *words, str(BIN / "python"), "-m", "wordrun.test_dist", timeout=100)
        assert done.returncode == 0, done.stderr
        assert f"passed on {sum(counts)} ranks" in done.stdout + done.stderr
    else:
        done = launch(tmp_path, *words, str(BIN / "python"), script(tmp_path, AS_MPI_SEES))
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"{rank} of {sum(counts)}" for rank in range(sum(counts))]


def test_command_words_reach_ranks_unchanged(tmp_path: Path) -> None:
    words = ["", "a b", '"', "*", "two\nlines", "--help", "-n", "3", "$HOME", "--", "\\"]
    show = "import json, os, sys; sys.stdout.write(json.dumps([os.environ['RANK'], sys.argv[1:]]) + '\\n')"
    run = launch(tmp_path, "-n", "2", "python", "-c", show, *words)
    assert run.returncode == 0, run.stderr
    assert sorted(json.loads(line) for line in run.stdout.splitlines()) == [["0", words], ["1", words]]


@pytest.mark.parametrize(
    ("words", "command", "status"),
    [
        (["-n", "2"], "exit $((RANK * 3))", 3),
        (["-n", "3"], "exit $((RANK > 0 ? RANK + 4 : 0))", (5, 6)),  # Hydra by itself says 5 | 6 = 7
        (["-n", "2", "--launcher", "torchrun"], "exit $((RANK * 3))", 3),  # torchrun by itself says 1
        (["-n", "2"], "[ $RANK = 0 ] || kill -SEGV $$", 139),
        ([], "exit 7", 7),
        ([], "kill -KILL $$", 137),
    ],
)
def test_exit_status_is_the_failing_ranks(tmp_path: Path, words: list[str], command: str, status: Any) -> None:
    run = launch(tmp_path, *words, "sh", "-c", command)
    assert run.returncode in (status if isinstance(status, tuple) else (status,)), run.stderr
    assert read_record(tmp_path)["exit_status"] == run.returncode
    if words:
        assert re.search(r"^launch: rank [12] (ended with|was killed by)", run.stderr, re.MULTILINE)


# Rank 1 ends while the others wait for it in a collective.
ENDS = """
import sys, threading
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    {}
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("raise RuntimeError('my mistake')", 1, "RuntimeError: my mistake"),
        ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); sys.exit(4)", 4, "ZeroDivisionError"),
    ],
)
def test_a_rank_that_fails_does_not_wait_in_mpi_finalize(tmp_path: Path, how: str, status: int, says: str) -> None:
    done = launch(tmp_path, "-n", "2", "--launcher", "hydra", sys.executable, "-c", ENDS.format(how), timeout=30)
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr


EARLY = """
import time
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.barrier()
if comm.rank == 0:
    for number in range(100):
        comm.Send(bytearray([number]) * 2000, dest=1)
else:
    time.sleep(1)
    for number in range(100):
        comm.Recv(found := bytearray(2000), source=0)
        assert found == bytearray([number]) * 2000
    print("all has arrived")
"""


@pytest.mark.parametrize(
    "words", [(), ("--hostfile", "hosts", "--launcher-args", "-launcher fork")], ids=["one", "two"]
)
def test_what_a_rank_has_sent_arrives_after_its_end(tmp_path: Path, words: tuple[str, ...]) -> None:
    """On one host and on two, which communicate by a network: nobody kills those that have not ended yet."""
    (tmp_path / "hosts").write_text("a:1\nb:1\n")
    words = ("--launcher", "hydra", "--env", "MASTER_ADDR=127.0.0.1", *words)
    done = launch(tmp_path, "-n", "2", *words, sys.executable, "-c", EARLY, timeout=30)
    assert (done.returncode, done.stdout) == (0, "all has arrived\n"), done.stderr


@pytest.mark.parametrize(("how", "status"), [("os._exit(3)", 3), ("MPI.COMM_WORLD.Abort(5)", 5)])
def test_rank_lost_inside_mpi(tmp_path: Path, how: str, status: int) -> None:
    """Hydra kills the other ranks itself and then returns 9, or 9 | 3; launch reports the first failure."""
    text = f"import os, time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: {how}\ntime.sleep(30)"
    assert launch(tmp_path, "-n", "2", "python", script(tmp_path, text)).returncode == status


@by_launcher
def test_one_failed_rank_ends_the_others_and_its_last_lines_come_last(tmp_path: Path, words: Sequence[str]) -> None:
    """However much the other ranks say about it. Without MPI in the ranks Hydra would let the other one sleep on."""
    text = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"):
        time.sleep(0.02)
    sys.exit("boom\\nno such thing")
signal.signal(signal.SIGTERM, lambda *_: sys.exit("lost contact\\n" * 200))
open("ready", "w").close()
time.sleep(61.5)
"""
    path, began = script(tmp_path, text), time.monotonic()
    run = launch(tmp_path, *words, "-n", "2", "python", path)
    assert run.returncode == 1
    assert time.monotonic() - began < 20
    assert "launch: rank 1 ended with exit status 1\n" in run.stderr
    assert gone(path)
    last = run.stderr[run.stderr.rindex("lost contact") :].splitlines()
    said = [line for line in last if line.startswith("launch: ")]
    assert "launch: the last lines of rank 1:" in said, run.stderr
    assert "launch:   no such thing" in said


def test_another_program_may_be_told_of_wordrun(tmp_path: Path) -> None:
    """It is no training: SIGUSR1 has its usual effect on it, and its exit status 2 is none of wordrun's."""
    path = script(tmp_path, "import os, signal, sys\nsys.exit(2 if signal.getsignal(signal.SIGUSR1) == 0 else 3)")
    run = launch(tmp_path, "-n", "2", "python", path, "--project", "wordrun", "lr=1")
    assert run.returncode == 2
    assert re.search(r"^launch: rank \d ended with exit status 2$", run.stderr, re.MULTILINE), run.stderr


def test_wordrun_behind_a_script_says_itself_what_is_wrong(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys\nos.execvp(sys.argv[1], sys.argv[1:])")
    run = launch(tmp_path, "-n", "2", "python", path, "wordrun", "data=sample", "train.nope=1")
    assert run.returncode == 2
    start, message = run.stderr.splitlines()
    assert start.startswith("launch: starting 2 ranks"), run.stderr
    assert message.startswith("unknown option 'train.nope'"), run.stderr


def test_last_lines_are_not_repeated_where_nothing_covers_them(tmp_path: Path) -> None:
    run = launch(tmp_path, "-n", "2", "sh", "-c", "[ $RANK = 0 ] || { echo boom >&2; exit 3; }")
    assert run.returncode == 3
    # In either order: mpiexec may pass the rank's line on after launch has heard of its end.
    first, *rest = run.stderr.splitlines()
    assert first == "launch: starting 2 ranks on 1 host with hydra"
    rest = [line for line in rest if line != "launch: rank 0 had ended with exit status 0"]
    assert sorted(rest) == ["boom", "launch: rank 1 ended with exit status 3"]


@by_launcher
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_user_signals_end_nothing_and_stopping_lets_ranks_finish(
    tmp_path: Path, start: Start, words: Sequence[str], number: signal.Signals
) -> None:
    path = script(tmp_path, POLITE)
    job = start(tmp_path, *words, "-n", "2", "python", path)
    wait_for(job, "ready", 2)
    for other in (signal.SIGUSR1, signal.SIGUSR2):
        job.send_signal(other)
        wait_for(job, f"got {other.name}", 2)
    job.send_signal(number)
    out, err = finish(job)
    assert job.returncode == 128 + number, err
    # "once": the second copy would arrive while the first rank still finishes
    told = sorted(re.findall(r"rank (\d) got (\w+)", out))
    assert [rank for rank, _ in told] == ["0", "1"], out
    assert out.count("finished") == 2, out
    assert gone(path)
    assert read_record(tmp_path)["exit_status"] == 128 + number


# Ranks as wordrun's: all end when one is asked to, and the first one's status tells that they have saved.
SAVING = """
import os, signal, sys, time
def saved(number, frame):
    time.sleep(0.5)
    os._exit(75 if os.environ["RANK"] == "0" else 0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, saved)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["-n", "2"], signal.SIGTERM),
        (["-n", "2", "--launcher", "torchrun"], signal.SIGUSR1),
        (["--launcher", "hydra"], signal.SIGHUP),
        ([], signal.SIGTERM),
    ],
    ids=["hydra", "torchrun", "one rank", "local"],
)
def test_a_run_that_has_saved_can_be_continued(
    tmp_path: Path, start: Start, words: list[str], number: signal.Signals
) -> None:
    job = start(tmp_path, *words, "python", script(tmp_path, SAVING))
    wait_for(job, "ready", 2 if "-n" in words else 1)
    job.send_signal(number)
    _, err = finish(job)
    assert job.returncode == 75, err
    record = read_record(tmp_path)
    assert record["exit_status"] == 75
    # That line, and nothing of a rank that failed.
    again = shlex.join(["launch", *words, "python", str(tmp_path / "script.py")])
    said = "launch: stopped early, with its state saved (exit status 75); to continue:\n"
    said += f"  WORDRUN_RUN_ID={record['run_id']} WORDRUN_RESUME=auto {again}\n"
    said += "launch: more: docs/jobs.md#exit-status-75\n"
    assert re.sub(r"launch: starting .*\n", "", err) == said


def test_a_second_signal_does_not_wait_for_the_save(tmp_path: Path, start: Start) -> None:
    path = script(tmp_path, SAVING.replace("sleep(0.5)", "sleep(50)"))
    job = start(tmp_path, "-n", "2", "python", path)
    wait_for(job, "ready", 2)
    stop(job, signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    _, err = finish(job, STOP_PATIENCE_S - 1)  # then launch would kill them anyway
    assert job.returncode == 143, err
    assert gone(path)


def test_a_second_ctrl_c_is_not_followed_by_what_shells_say(tmp_path: Path, start: Start) -> None:
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print('ready', flush=True); time.sleep(50)"
    job = start(tmp_path, "-n", "2", "python", "-c", deaf)
    wait_for(job, "ready", 2)
    stop(job, signal.SIGINT)
    job.send_signal(signal.SIGINT)
    _, err = finish(job, STOP_PATIENCE_S - 1)
    assert job.returncode == 130, err
    assert "Terminated" not in err


def test_third_ctrl_c_kills(tmp_path: Path, start: Start) -> None:
    path = script(tmp_path, STUBBORN)
    job = start(tmp_path, "-n", "2", "python", path, "root")
    wait_for(job, "ready", 4)
    stop(job, signal.SIGINT)
    stop(job, signal.SIGINT)
    job.send_signal(signal.SIGINT)
    finish(job)
    assert job.returncode == 130
    assert gone(path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
@pytest.mark.parametrize("words", [["-n", "2"], []], ids=["hydra", "local"])
def test_killed_launch_takes_its_ranks_along(tmp_path: Path, start: Start, words: list[str]) -> None:
    path = script(tmp_path, STUBBORN)
    job = start(tmp_path, *words, "python", path, "leaf", "x")  # no child of its own
    wait_for(job, "ready", 2 if words else 1)
    job.kill()
    finish(job)
    assert gone(path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to launch")
def test_no_orphans_after_a_normal_end(tmp_path: Path) -> None:
    """Also not one that has left the session of its rank."""
    text = "import subprocess\nsubprocess.Popen(['sleep', '62.5'], start_new_session=True)\n"
    for words in (["-n", "2"], []):
        assert launch(tmp_path, *words, "python", script(tmp_path, text)).returncode == 0
        assert not left_over("62.5")


# On a busy machine, processes may need longer to start than the ranks may be silent.
WAITS_FOR_ALL = """
from pathlib import Path
Path(f"ready-{os.getpid()}").touch()
while len(list(Path().glob("ready-*"))) < 4:
    print("waiting", flush=True)
    time.sleep(0.1)
time.sleep(60)
"""


def test_idle_timeout(tmp_path: Path, start: Start) -> None:
    path = script(tmp_path, STUBBORN.replace("time.sleep(60)", WAITS_FOR_ALL))
    job = start(tmp_path, "--idle-timeout", "1.5", "-n", "2", "python", path, "root")
    out, err = finish(job)
    assert job.returncode == 124
    assert "launch: no output for 1.5 seconds (--idle-timeout)" in err
    assert out.count("ready") == 4
    assert gone(path)


STUCK = """
import threading, time
def waits_for_ever():
    time.sleep(60.5)
print("stuck", flush=True)
waits_for_ever()
"""


def idle(folder: Path, py_spy: str) -> subprocess.CompletedProcess[str]:
    """Launch two ranks that get stuck, with ``py_spy`` as the first program of that name in PATH."""
    (folder / "py-spy").write_text(f"#!/bin/sh\n{py_spy}\n")
    (folder / "py-spy").chmod(0o755)
    env = environment(folder)
    env["PATH"] = f"{folder}:{env['PATH']}"
    command = [LAUNCH, "--idle-timeout", "6", "-n", "2", "python", script(folder, STUCK)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_idle_ranks_show_their_stacks(tmp_path: Path) -> None:
    """Where py-spy may not look, as on most clusters."""
    run = idle(tmp_path, "exit 1")
    assert run.returncode == 124, run.stderr
    assert run.stderr.count("in waits_for_ever") == 2, run.stderr
    ranks = run.stderr.split("Fatal Python error: Aborted\n")[1:]
    assert [each.count("in waits_for_ever") for each in ranks] == [1, 1], "one rank's stacks after the other's"
    assert "(SIGABRT)" in run.stderr
    assert gone(str(tmp_path / "script.py"))


def test_idle_ranks_are_looked_at_by_py_spy(tmp_path: Path) -> None:
    run = idle(tmp_path, 'echo "stacks of $3: $(tr "\\0" " " < /proc/$3/cmdline)"')
    assert run.returncode == 124
    assert len(re.findall(rf"stacks of \d+: \S*python\S* {tmp_path}/script.py", run.stderr)) == 2, run.stderr


def test_on_sigquit_py_spy_shows_programs_that_do_not_use_wordrun(start: Start, tmp_path: Path) -> None:
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "stacks of $3: $(tr "\\0" " " < /proc/$3/cmdline)"\n')
    (tmp_path / "py-spy").chmod(0o755)
    job = start(tmp_path, "-n", "2", "python", script(tmp_path, STUCK), PATH=f"{tmp_path}:/usr/bin:/bin")
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["stuck\n"] * 2
    job.send_signal(signal.SIGQUIT)
    time.sleep(3)
    job.terminate()
    _, err = job.communicate(timeout=60)
    assert len(re.findall(rf"stacks of \d+: \S*python\S* {tmp_path}/script.py", err)) == 2, err
    assert "launch: asked the ranks where they are\n" in err


def test_idle_timeout_counts_from_the_last_output_and_changes_none(tmp_path: Path) -> None:
    text = (
        "import os, sys, time\nfor i in range(12):\n    os.write(1 + i % 2, b'\\xff\\x00' * 50_000); time.sleep(0.4)\n"
    )
    run = subprocess.run(
        [LAUNCH, "--idle-timeout", "4", "python", script(tmp_path, text)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        timeout=90,
    )
    assert run.returncode == 0
    assert run.stdout == run.stderr == b"\xff\x00" * 300_000


def test_command_not_found_starts_nothing(tmp_path: Path) -> None:
    run = launch(tmp_path, "-n", "2", "no-such-command", "x")
    assert (run.returncode, run.stdout) == (127, "")
    assert run.stderr == "launch: no-such-command: command not found: not in PATH\n"
    (tmp_path / "train.py").write_text("print('hello')")
    run = launch(tmp_path, "-n", "2", "train.py")
    assert run.returncode == 126
    assert "did you mean: launch python train.py" in run.stderr
    assert not (tmp_path / "outputs").exists()


def test_what_cannot_be_executed(tmp_path: Path) -> None:
    path = tmp_path / "tool"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    run = launch(tmp_path, str(path))
    assert run.returncode == 126
    assert run.stderr == f"launch: cannot start {path}: No such file or directory\n"
    assert read_record(tmp_path)["exit_status"] == 126


def test_two_launches_at_once(tmp_path: Path, start: Start) -> None:
    meet = (
        "import os, socket, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    with socket.create_server(('', int(os.environ['MASTER_PORT']))): time.sleep(1); print('ok')\n"
    )
    jobs = [start(tmp_path, "-n", "2", "python", "-c", meet) for _ in range(2)]
    for job in jobs:
        out, err = finish(job, 60)
        assert (job.returncode, out) == (0, "ok\n"), err
    records = [json.loads(path.read_text()) for path in (tmp_path / "state/wordrun/launches").iterdir()]
    assert len(records) == 2
    for name in ("MASTER_PORT", "WORDRUN_RUN_ID", "WORDRUN_LAUNCH_ID"):
        assert len({record["env_set"][name] for record in records}) == 2


def test_nested_launch_strips_the_outer_ranks(tmp_path: Path) -> None:
    show = 'echo "$RANK $WORLD_SIZE $WORDRUN_LAUNCHER ${PMI_RANK-none} $WORDRUN_RUN_ID"'
    run = launch(tmp_path, "-n", "2", LAUNCH, "sh", "-c", show)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[:4] for line in lines] == [["0", "1", "local", "none"]] * 2
    assert len({line[4] for line in lines}) == 2


def test_record_is_rewritten_through_the_link(tmp_path: Path) -> None:
    """wordrun's rank 0 moves the record into its run directory and leaves a link."""
    move = """
        test -s "$WORDRUN_LAUNCH_RECORD" || exit 9
        grep -q '"exit_status": null' "$WORDRUN_LAUNCH_RECORD" || exit 8
        if [ "$RANK" = 0 ]; then
            mkdir run && mv "$WORDRUN_LAUNCH_RECORD" run/launch.json
            ln -s "$PWD/run/launch.json" "$WORDRUN_LAUNCH_RECORD"
        fi"""
    run = launch(tmp_path, "--launcher", "hydra", "--env", "MY_API_KEY=hush", "sh", "-c", move, "x", "wandb.token=hush")
    assert run.returncode == 0, run.stderr
    (link,) = (tmp_path / "state/wordrun/launches").iterdir()
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["launch.json"]
    text = (tmp_path / "run/launch.json").read_text()
    assert "hush" not in text
    record = json.loads(text)
    assert record["exit_status"] == 0
    assert record["start"] <= record["end"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", record["end"])
    assert record["run_id"] == link.stem
    assert record["env_set"]["MY_API_KEY"] == "***"
    assert (record["np"], record["launcher"], record["site"]) == (1, "hydra", None)
    assert record["command"][-1] == "wandb.token=***"


@pytest.mark.parametrize(("said", "reads"), [("running", "died"), ("finished", "finished")])
def test_the_record_of_a_killed_run_does_not_say_that_it_runs(tmp_path: Path, said: str, reads: str) -> None:
    die = f"""
        mkdir run && mv "$WORDRUN_LAUNCH_RECORD" run/launch.json && touch run/.lock
        ln -s "$PWD/run/launch.json" "$WORDRUN_LAUNCH_RECORD"
        echo '{{"steps": 7, "exit_reason": "{said}"}}' > run/run.json
        kill -ABRT $$"""
    run = launch(tmp_path, "-n", "1", "sh", "-c", die)
    assert run.returncode == 134, run.stderr
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["steps"], record["exit_reason"]) == (7, reads)
    assert record.get("end") == (
        json.loads((tmp_path / "run/launch.json").read_text())["end"] if reads == "died" else None
    )


def test_no_record_where_none_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    run = launch(tmp_path, "-n", "2", "sh", "-c", "echo ${WORDRUN_LAUNCH_RECORD-none}")
    assert (run.returncode, run.stdout) == (0, "none\nnone\n")
    assert run.stderr.count("launch: no record of this launch") == 1


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = launch(tmp_path, "-n", "2", "--env", f"MASTER_PORT={port}", "true")
    assert run.returncode == 2
    assert f"port {port} (--env MASTER_PORT) is in use" in run.stderr
    assert not (tmp_path / "outputs").exists()


def in_terminal(cwd: Path, words: Sequence[str], steps: Sequence[tuple[str, int, bytes]]) -> tuple[int, str]:
    """Run launch with a terminal; type each answer when its text has appeared so often. Return status and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(LAUNCH, [LAUNCH, *words], environment(Path.cwd()))
    output, todo = b"", list(steps)
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other side has closed
            break
        if not chunk:
            break
        output += chunk
        if todo and output.count(todo[0][0].encode()) >= todo[0][1]:
            os.write(terminal, todo.pop(0)[2])
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), output.decode()


def test_ctrl_c_in_a_terminal_reaches_ranks_once(tmp_path: Path) -> None:
    path = script(tmp_path, POLITE)
    status, output = in_terminal(tmp_path, ["-n", "2", "python", path], [("ready", 2, b"\x03")])
    assert status == 130, output
    assert sorted(re.findall(r"rank (\d) got SIGINT", output)) == ["0", "1"]
    assert output.count("finished") == 2
    assert gone(path)


def test_single_process_keeps_the_terminal(tmp_path: Path) -> None:
    text = """
import sys, time
assert sys.stdin.isatty() and sys.stdout.isatty()
try:
    print('said', input('say: ').upper(), flush=True)
    time.sleep(20)
except KeyboardInterrupt:
    print('interrupted once', flush=True)
time.sleep(0.5)
sys.exit(4)
"""
    steps = [("say: ", 1, b"hello\n"), ("said HELLO", 1, b"\x03")]
    status, output = in_terminal(tmp_path, ["python", script(tmp_path, text)], steps)
    assert status == 4, output
    assert output.count("interrupted once") == 1


def test_ranks_know_the_terminals_size(tmp_path: Path) -> None:
    status, output = in_terminal(tmp_path, ["-n", "2", "sh", "-c", "echo [$WORDRUN_TERMINAL]"], [])
    assert status == 0
    assert len(re.findall(r"\[\d+x\d+@[\w.-]+:/dev/pts/\d+\]", output)) == 2


@pytest.mark.parametrize("status", [0, 3])
def test_an_mpiexec_that_dies_of_its_input_after_the_ranks(status: int, tmp_path: Path) -> None:
    """Hydra's does when it passes on the end of its input to a proxy that has just ended: here every time."""
    mpiexec = tmp_path / "mpiexec"
    real = BIN / "mpiexec"
    mpiexec.write_text(f'#!/bin/sh\n[ "$1" = -n ] || exec {real} "$@"\n{real} "$@"\nkill -PIPE $$\n')
    mpiexec.chmod(0o755)
    imports = "import sys; from wordrun.launch import cli; from wordrun.launch.launchers import base"
    instead = f"base.own_bin = lambda: {str(tmp_path)!r}; sys.exit(cli.main())"
    command = [sys.executable, "-c", f"{imports}; {instead}", "-n", "2", "sh", "-c", f"exit {status}"]
    run = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert run.returncode == status, run.stderr


def test_overhead_over_mpiexec(tmp_path: Path) -> None:
    """The figure is measured in benchmarks/figures.py; this is for something heavy, such as an import of torch."""

    def cpu_s(call: Callable[[], Any]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = [str(BIN / "mpiexec"), "-n", "2", "true"]
    theirs = cpu_s(lambda: subprocess.run(bare, env=environment(tmp_path), check=True, cwd=tmp_path))
    ours = min(cpu_s(lambda: launch(tmp_path, "-n", "2", "true", check=True)) for _ in range(2))
    assert ours - theirs < 1


def test_doctor(tmp_path: Path) -> None:
    run = launch(tmp_path, "--doctor", "-n", "2", "--json", timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    states = {finding["check"]: finding["state"] for finding in json.loads(run.stdout)}
    assert set(states.values()) == {"ok"}, run.stdout
    assert {"launcher", "MPI", "address", "cores", "import torch", "W&B"} <= set(states)


FAILS_ONCE = """
import os, sys
if os.environ["RANK"] == "1":
    with open("tries", "a") as file:
        file.write("x")
    if os.path.getsize("tries") < 2:
        sys.exit(sys.argv[1])
"""


def test_a_fault_of_the_fabric_is_tried_again(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS_ONCE)
    run = launch(tmp_path, "--retries", "2", "-n", "2", "python", path, "mpiexec: No VNIs available")
    assert run.returncode == 0, run.stderr
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "state/wordrun/launches").iterdir())]
    first, second = sorted(records, key=lambda record: str(record["exit_status"]), reverse=True)
    assert first["run_id"] == second["run_id"]
    assert ("WORDRUN_RESUME" in first["env_set"], second["env_set"]["WORDRUN_RESUME"]) == (False, "auto")
    assert (tmp_path / "tries").read_text() == "xx"
    assert "launch: the fabric has no free network identifier (mpiexec: No VNIs available): relaunching" in run.stderr


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    run = launch(tmp_path, "--retries", "2", "-n", "2", "python", script(tmp_path, FAILS_ONCE), "a mistake")
    assert run.returncode == 1
    assert (tmp_path / "tries").read_text() == "x"


# Rank 1 is killed, as often as the argument says.
KILLED = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    with open("tries", "a") as file:
        file.write("x")
    if len(open("tries").read()) <= int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("times", "status", "tries"), [(1, 0, 2), (9, 137, 2)])
def test_a_rank_that_was_killed_is_started_again_once(tmp_path: Path, times: int, status: int, tries: int) -> None:
    run = launch(tmp_path, "--retries", "3", "-n", "2", "python", script(tmp_path, KILLED), str(times))
    assert (run.returncode, len((tmp_path / "tries").read_text())) == (status, tries), run.stderr
    assert "launch: rank 1 was killed (SIGKILL, not for lack of memory on this host): relaunching\n" in run.stderr
    assert ("rank 1 was killed twice, so relaunching would not help\n" in run.stderr) == (status == 137)


# Rank 0 finds the port taken that was free when launch chose it; torch says so.
TAKEN_ONCE = """
import os, socket, sys
import torch.distributed
if os.environ["RANK"] == "0" and not os.path.exists("tried"):
    open("tried", "w").close()
    server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
sys.stdout.write(f"met at {os.environ['MASTER_PORT']}\\n")
"""


@pytest.mark.forked_programs
def test_a_port_that_was_taken_in_the_meantime_is_survived(tmp_path: Path) -> None:
    run = launch(tmp_path, "-n", "2", "python", script(tmp_path, TAKEN_ONCE))
    assert run.returncode == 0, run.stderr
    (taken,) = re.findall(r"^launch: port (\d+) was taken in the meantime", run.stderr, re.MULTILINE)
    met = re.findall(r"met at (\d+)", run.stdout)
    assert len(met) == 2
    assert taken not in met


def test_a_port_that_the_user_named_is_not_changed(tmp_path: Path) -> None:
    from wordrun.launch.address import free_port

    says = script(tmp_path, "import os, sys; sys.exit(f'EADDRINUSE, port: {os.environ[\"MASTER_PORT\"]}')")
    for words, again in (["--env", f"MASTER_PORT={free_port()}"], False), ([], True):
        run = launch(tmp_path, *words, "-n", "2", "python", says)
        assert run.returncode == 1
        assert "EADDRINUSE" in run.stderr
        assert ("relaunching" in run.stderr) == again


def test_a_hostfile_of_one_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    run = launch(tmp_path, "--hostfile", "hosts", "-n", "2", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_relaunch_that_cannot_be_planned_keeps_the_first_status(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys\nos.rename(__file__, 'gone.py')\nsys.exit('No VNIs available')")
    Path(path).chmod(0o755)
    Path(path).write_text(f"#!{sys.executable}\n{Path(path).read_text()}")
    run = launch(tmp_path, "--retries", "1", path)
    assert run.returncode == 1, run.stderr
    assert "launch: cannot relaunch: " in run.stderr
