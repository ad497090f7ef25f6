"""``launch --elastic``: guardians start the ranks, and start them again when one is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak_runs

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

BIN = Path(sys.prefix) / "bin"
# Without torch, which these ranks do not need.
ELASTIC = [str(BIN / "launch"), "--elastic", "--no-preimport"]
# Each rank leaves its variables in a file, waits for those of all ranks, and does what the argument says.
ACT = """
import json, os, signal, sys, time
from pathlib import Path

rank, generation = int(os.environ["RANK"]), len(json.loads(os.environ.get("WORDRUN_FAULTS", "[]")))
new = Path(f"{generation}-{rank}.new")
new.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
new.rename(f"{generation}-{rank}")
while len(list(Path().glob(f"{generation}-*[0-9]"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def wait():
    while True:
        time.sleep(60)

def follow(other):
    pid = json.loads(Path(f"{generation}-{other}").read_text())["pid"]
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)

exec(sys.argv[1])
"""
TWO_NODES = ["--hostfile", "hosts", "--launcher-args", "-launcher fork"]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "act.py").write_text(ACT)
    (tmp_path / "hosts").write_text(f"localhost\n{os.uname().nodename}\n")


def variables(generation: int, ranks: int) -> list[dict[str, str]]:
    return [json.loads(Path(f"{generation}-{rank}").read_text()) for rank in range(ranks)]


def record() -> dict[str, object]:
    (path,) = Path("state/wordrun/launches").glob("*.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def gone(pids: list[int]) -> bool:
    """Wait until these processes have ended."""
    end = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def pids(generation: int, ranks: int) -> list[int]:
    """Wait until all ranks of a generation have started, and return their process IDs."""
    end = time.monotonic() + 60
    while len(list(Path().glob(f"{generation}-*[0-9]"))) < ranks:
        assert time.monotonic() < end, "the ranks have not started"
        time.sleep(0.01)
    return [int(each["pid"]) for each in variables(generation, ranks)]


@pytest.mark.parametrize("where", [[], TWO_NODES], ids=["one node", "two nodes"])
def test_after_a_kill_all_ranks_start_again(command: Command, where: list[str]) -> None:
    act = "die([signal.SIGKILL, signal.SIGSEGV][generation]) if rank == 3 - generation and generation < 2 else None\n"
    act += "line = f'{sys.argv[0]} {__name__} {sys.path[0] == os.getcwd()}' + chr(10)\n"
    act += "wait() if generation < 2 else os.write(1, line.encode())"
    done = command(*ELASTIC, *where, "-n", "4", "python", "act.py", act, PMI_RANK="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "act.py __main__ True\n" * 4
    assert "rank 3 was killed (SIGKILL, not for lack of memory on this host): restarting the ranks" in done.stderr
    assert "rank 2 was killed (SIGSEGV): restarting the ranks" in done.stderr
    nodes = 2 if where else 1
    for rank, own in enumerate(variables(2, 4)):
        assert own["LOCAL_RANK"] == str(rank % (4 // nodes))
        assert own["NODE_RANK"] == str(rank * nodes // 4)
        assert (own["LOCAL_WORLD_SIZE"], own["WORLD_SIZE"]) == (str(4 // nodes), "4")
        assert own["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert own["WORDRUN_RESUME"] == "auto"
        assert [fault["rank"] for fault in json.loads(own["WORDRUN_FAULTS"])] == [3, 2]
        assert not any(name.startswith(("PMI_", "MPI_LOCAL", "WORDRUN_GUARDIAN")) for name in own)
    ports = {own["MASTER_PORT"] for generation in range(3) for own in variables(generation, 4)}
    assert len(ports) == 3
    assert record()["pids"] == [own["pid"] for own in variables(2, 4)]
    assert gone([pid for generation in range(3) for pid in pids(generation, 4)])


@pytest.mark.parametrize(
    ("act", "status", "message"),
    [
        ("raise ValueError('no such thing') if rank == 1 else follow(1)", 1, "rank 1 ended with exit status 1"),
        ("sys.exit(3) if rank == 1 else follow(1)", 3, "rank 1 ended with exit status 3"),
        ("sys.exit(75 if rank == 1 else 0)", 75, "stopped early, with its state saved (exit status 75)"),
        ("die() if rank == 1 else follow(1)", 137, "rank 1 was killed twice, so relaunching would not help"),
        ("die(signal.SIGABRT) if rank == 1 else follow(1)", 134, "rank 1 was killed by SIGABRT (exit status 134)"),
    ],
)
def test_what_a_restart_cannot_cure_ends_the_run(command: Command, act: str, status: int, message: str) -> None:
    done = command(*ELASTIC, "-n", "2", "python", "act.py", act)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    if "ValueError" in act:
        assert 'Traceback (most recent call last):\n  File "' in done.stderr
        assert "ValueError: no such thing" in done.stderr
        assert "guardian.py" not in done.stderr


def test_retries_bound_the_restarts(command: Command) -> None:
    act = "die() if rank == generation else follow(generation)"
    done = command(*ELASTIC, "--retries", "1", "-n", "2", "python", "act.py", act)
    assert done.returncode == 137
    assert done.stderr.count("restarting the ranks") == 1
    assert "rank 1 was killed by SIGKILL (exit status 137)" in done.stderr
    assert "twice" not in done.stderr


@pytest.mark.parametrize("where", [[], TWO_NODES], ids=["one node", "two nodes"])
def test_without_a_guardian_everything_is_launched_again(command: Command, where: list[str]) -> None:
    """It is the first process of its node."""
    act = "os.kill(os.getppid(), signal.SIGKILL) if rank == 1 and not generation else None\n"
    act += "print(os.environ['WORDRUN_RESUME'] + chr(10), end='') if generation else wait()"
    done = command(*ELASTIC, *where, "-n", "2", "sh", "-c", 'sleep 0; exec python act.py "$0"', act)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["auto", "auto"]
    assert "launch: the guardian on " in done.stderr
    assert "was lost (lost guardian): relaunching" in done.stderr


# Rank 0 kills its guardian, and again when the file "back" is there.
LOSE = """
import json, os, signal, sys, time
from pathlib import Path

rank, size, generation = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "WORDRUN_GENERATION"))
new = Path(f"{generation}-{rank}.new")
new.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
new.rename(f"{generation}-{rank}")
while len(list(Path().glob(f"{generation}-*[0-9]"))) < int(size):
    time.sleep(0.01)
while generation == "1" and not Path("back").exists():
    time.sleep(0.01)
if generation < "2" and rank == "0":
    os.kill(os.getppid(), signal.SIGKILL)
while generation < "2":
    time.sleep(0.01)
"""


def is_ready(guardian: int) -> bool:
    """Say whether a process catches the signals that a guardian has to catch."""
    status = Path(f"/proc/{guardian}/status").read_text()
    (caught,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> signal.SIGTERM - 1 & 1)


def test_without_a_node_the_run_continues_in_the_same_launch(start: Start) -> None:
    """On a spare one, and without another one on the first when it is back."""
    Path("lose.py").write_text(LOSE)
    Path("hosts").write_text(f"localhost\n{os.uname().nodename}\n127.0.0.1\n")
    process = start(*ELASTIC, "--spare-nodes", "1", *TWO_NODES, "-n", "2", "python", "lose.py")
    pids(1, 2)
    end = time.monotonic() + 60
    while [is_ready(pid) for pid in soak_runs.guardians_below(process.pid)] != [True] * 3:
        assert time.monotonic() < end, "the lost node's guardian is not started again"
        time.sleep(0.1)
    time.sleep(0.5)  # it says that it is ready
    Path("back").touch()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    found = [variables(generation, 2) for generation in range(3)]
    for ranks in found:
        assert [(each["RANK"], each["NODE_RANK"], each["LOCAL_RANK"]) for each in ranks] == [
            (str(rank), str(rank), "0") for rank in range(2)
        ]
        assert {(each["WORLD_SIZE"], each["WORDRUN_WORLD_SIZE"]) for each in ranks} == {("2", "2")}
        assert len({each["MASTER_ADDR"] for each in ranks}) == 1
    assert [fault["cause"] for fault in json.loads(found[-1][0]["WORDRUN_FAULTS"])] == ["lost guardian"] * 2
    assert errors.count("has ended: restarting 2 ranks") == 2
    assert "relaunching" not in errors
    assert "BAD TERMINATION" not in errors


def test_a_rank_that_is_stopped_is_killed_and_started_again(command: Command) -> None:
    done = command(*ELASTIC, "-n", "2", "python", "act.py", "generation or (die(signal.SIGSTOP) if rank else wait())")
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed (SIGSTOP): restarting the ranks" in done.stderr


def test_when_launch_is_killed_its_guardians_and_ranks_end(start: Start) -> None:
    process = start(*ELASTIC, *TWO_NODES, "-n", "4", "python", "act.py", "wait()")
    found = pids(0, 4)
    process.kill()
    assert gone(found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_each_rank_once(start: Start, number: signal.Signals) -> None:
    act = "def note(number, frame): print(f'{rank} got {number}', flush=True)\n"
    act += "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2): signal.signal(number, note)\n"
    act += "Path(f'ready-{rank}').touch()\nwhile not Path('end').exists(): time.sleep(0.01)"
    process = start(*ELASTIC, "-n", "2", "python", "act.py", act)
    assert process.stdout is not None
    while len(list(Path().glob("ready-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    for each in (signal.SIGUSR2, number):
        process.send_signal(each)
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == [f"{rank} got {int(each)}\n" for rank in range(2)]
    Path("end").touch()
    rest, errors = process.communicate(timeout=60)
    assert (rest, process.returncode) == ("", 128 + number), errors


def test_a_program_that_calls_mpi_is_left_to_the_launcher(command: Command) -> None:
    Path("mpi.py").write_text("from mpi4py import MPI\nprint(f'rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}')\n")
    done = command(*ELASTIC, "-n", "2", "python", "mpi.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert "COMMAND calls MPI, so only a launcher can start its ranks: relaunching without --elastic" in done.stderr


def test_a_port_that_another_process_has_taken(command: Command) -> None:
    act = """
with open("ports", "a") as ports:
    ports.write(f"{os.environ['MASTER_PORT']}\\n" * (rank == 0))
taken = Path("ports").read_text().split()
if rank == 0 and len(taken) == 1:
    sys.exit(f"cannot listen on port {taken[-1]}: Address already in use")
while len(Path("ports").read_text().split()) < 2:
    time.sleep(0.01)
"""
    done = command(*ELASTIC, "-n", "2", "python", "act.py", act)
    first, second = Path("ports").read_text().split()
    assert (done.returncode, first != second) == (0, True), done.stderr
    assert f"launch: port {first} was taken in the meantime: restarting the ranks with another port" in done.stderr


def test_nobody_else_can_connect(start: Start) -> None:
    """Whoever does not know the secret is turned away, and nothing changes for the ranks."""
    import socket

    act = "Path(f'ready-{rank}').touch()\nwhile not Path('end').exists(): time.sleep(0.01)"
    process = start(*ELASTIC, "-n", "1", "python", "act.py", act)
    (rank,) = pids(0, 1)
    inodes = {
        os.readlink(each)[8:-1] for each in Path(f"/proc/{process.pid}/fd").iterdir() if "socket" in os.readlink(each)
    }
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = [int(line[1].partition(":")[2], 16) for line in listening if line[9] in inodes and line[3] == "0A"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b'{"event": "hello", "node": 0, "secret": "guessed", "host": "here"}\n')
        assert stranger.recv(100) == b""
    assert os.path.exists(f"/proc/{rank}")
    Path("end").touch()
    assert process.wait(timeout=60) == 0


# What strangers do to the port at which launch waits for guardians, which rank 0 knows from its guardian's variables.
STRANGERS = r"""
import os, random, resource, socket, sys, time

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
found = open(f"/proc/{os.getppid()}/environ", "rb").read().split(b"WORDRUN_GUARDIAN_TOKEN=")[1].split(b"\0")[0]
address, port, secret = found.decode().split()
hello = '{"secret": "%s", "node": %s, "host": "x"}'
known = [
    '{"secret":"\\u00e9","node":0}', '{"secret":"\\ud800","node":0}', "[" * 60_000, '{"a":' * 60_000, "[1, 2]", "7",
    "null", '"text"', "9" * 10_000, "NaN", "1e999", "{}", '{"secret": ["x"], "node": {}}',
    hello % ("x", 0), hello % ("x", -1),
    hello % (secret, 2), hello % (secret, -1), hello % (secret, "9" * 4000),
    hello % (secret, "NaN"), hello % (secret, "0.0"),
    hello % (secret, "true"), hello % (secret, "[0]"), hello % (secret, 0),
    '{"secret": "%s", "node": 0}' % secret, '{"secret": "%s", "node": 0, "host": 1}' % secret,
    "GET / HTTP/1.1\r\nHost: x\r\n\r", hello % (secret, 0) + "\n" + hello % (secret, 0),
]
draw = random.Random(0)
messages = [each.encode() + end for each in known for end in (b"\n", b"")]
messages += [b"\0" * 100, b"\xff\xfe{\0}\0\n", b"\xed\xa0\x80\n", b"x" * 1_000_000]
held, failed = [], []

def connect():
    try:
        return socket.create_connection((address, int(port)), timeout=60)
    except OSError:
        failed.append(1)

def stranger(message, keep):
    peer = connect()
    try:
        if peer is not None:
            peer.sendall(message)
            if keep:
                return held.append(peer)
            if draw.random() < 0.1:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    except OSError:
        pass
    if peer is not None:
        peer.close()

if os.environ["RANK"] == "0":
    for count in range(10_000):
        if count < 2 * len(messages):
            stranger(messages[count // 2], count % 2)
        else:
            stranger(draw.randbytes(draw.randrange(200)) + draw.choice([b"", b"\n"]), draw.random() < 0.1)
    held += [connect() for _ in range(1000)]
    with open("new", "w") as file:
        file.write(str(11_000 - len(failed)))
    os.rename("new", "done")
while not os.path.exists("done"):
    time.sleep(0.05)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.parametrize(("status", "files"), [(0, 4096), (3, 60)], ids=["success", "failure, few files"])
def test_strangers_end_nothing(command: Command, tmp_path: Path, status: int, files: int) -> None:
    """Whatever arrives at the port for guardians; also if so many come that launch can open no more files."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    launch = f'ulimit -Sn {files}; exec "$@"'
    done = command("sh", "-c", launch, "sh", *ELASTIC, "-n", "2", "python", "strangers.py", str(status))
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "the guardian" not in done.stderr
    assert int((tmp_path / "done").read_text()) > 10_500
    if status:
        assert "rank 1 ended with exit status 3" in done.stderr
