"""Whether launch sees that ranks have met: real processes and sockets, looked at when they are known to exist."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from test_world import AURORA, POLARIS

from wordrun.dist import World
from wordrun.dist.rendezvous import _host_store
from wordrun.launch import loopback
from wordrun.launch.loopback import close_to_others
from wordrun.launch.meeting import LISTENING, Meeting, connections

if TYPE_CHECKING:
    from conftest import Start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A rank that loads a library, listens or connects as it is told, and answers when it has done so.
RANK = """
import json, mmap, socket, sys
kept = []
for line in sys.stdin:
    verb, value = json.loads(line)
    if verb == "load":
        file = open(value, "rb")
        kept += [file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)]
    elif verb == "listen":
        kept.append(socket.create_server(("127.0.0.1", 0)))
    elif verb == "listen to all":
        kept.append(socket.create_server(("", 0)))
    elif verb == "connect":
        kept.append(socket.create_connection(("127.0.0.1", value)))
    elif verb == "accept":
        kept.append(kept[-1].accept()[0])
    elif verb == "leave":
        kept.pop().close()
    answer = kept[-1].getsockname()[1] if kept and isinstance(kept[-1], socket.socket) else 0
    if verb == "bound":
        answer = int(bool(kept[-1].getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)))
    print(answer, flush=True)
"""
Tell = Callable[..., int]


@pytest.fixture
def tell(start: Start) -> Iterator[Tell]:
    """Start two ranks, and tell one of them to do something; return a port that it then has."""
    ranks: list[subprocess.Popen[str]] = []

    def do(rank: int, verb: str, value: Any = None, **env: str) -> int:
        while len(ranks) <= rank:
            number = {"RANK": str(len(ranks)), "WORDRUN_LAUNCH_ID": f"test-{os.getpid()}"}
            environment = {**os.environ, **env, **number}
            ranks.append(start(sys.executable, "-c", RANK, stdin=subprocess.PIPE, env=environment))
        stdin, stdout = ranks[rank].stdin, ranks[rank].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps([verb, value])}\n")
        stdin.flush()
        return int(stdout.readline())

    yield do
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()


def watching(launcher: str = "pals", *, local: bool = False) -> Meeting:
    """Return the watch of a launch whose ranks are this process's, or found by their launch ID, as in a job."""
    plan = SimpleNamespace(
        ranks=SimpleNamespace(np=2), launcher=SimpleNamespace(name=launcher), env={"MASTER_PORT": "1"},
        hosts=("n1",), decided=SimpleNamespace(launch_id=f"test-{os.getpid()}"), job=SimpleNamespace(is_local=local),
        options=SimpleNamespace(hostfile=None, launcher_args=()),
    )  # fmt: skip
    return Meeting(plan, os.getpid())  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [True, False], ids=["below launch", "started by daemons"])
def test_ranks_that_connect_at_a_port_of_their_own_have_met(tell: Tell, local: bool, tmp_path: Path) -> None:
    port = tell(0, "listen")
    tell(1, "load", library(tmp_path, "libtorch_python.so"))
    meeting = watching(local=local)
    meeting.sample()
    assert not meeting.met
    tell(1, "connect", port)
    tell(0, "accept")
    meeting.sample()
    assert meeting.met


def library(folder: Path, name: str) -> str:
    (folder / name).write_bytes(b"x")
    return str(folder / name)


def test_a_short_meeting_is_not_denied(tell: Tell, tmp_path: Path) -> None:
    """Between two samples nobody sees it; but then a rank has been seen to listen."""
    for rank in (0, 1):
        tell(rank, "load", library(tmp_path, "libtorch_python.so"))
    meeting = watching()
    port = tell(0, "listen")
    meeting.sample()
    for rank, verb in ((1, "connect"), (0, "accept"), (0, "leave"), (1, "leave")):
        tell(rank, verb, port)
    meeting.begin()
    assert meeting.end() == ""


@pytest.mark.parametrize(
    ("env", "loaded", "apart"),
    [
        (POLARIS, "libmpi_gnu_123.so.12", False),
        (AURORA, "libmpi.so.12", False),
        (AURORA, "libmpi.so.40", False),  # PMIx serves Open MPI, too
        (POLARIS, "libmpi.so.40", True),
        ({}, "libmpi.so.12", True),
        (POLARIS, "libtorch_python.so", True),
    ],
    ids=["Cray MPICH", "Aurora's MPICH", "Open MPI with PMIx", "Open MPI with PMI", "no PMI", "torch"],
)
def test_under_pals_an_mpi_library_that_it_serves_has_met_without_tcp(
    tell: Tell, tmp_path: Path, env: dict[str, str], loaded: str, apart: bool
) -> None:
    """MPI's own network leaves no trace in /proc/net/tcp. The variables were recorded."""
    for rank in (0, 1):
        tell(rank, "load", library(tmp_path, loaded), **env)
    meeting = watching()
    meeting.sample()
    assert meeting.libraries == {loaded}
    meeting.begin()
    said = meeting.end()
    assert said.startswith("the 2 ranks never connected to each other") == apart, said
    assert ("which pals does not start" in said) == (apart and "mpi" in loaded)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_numeric_master_addr_is_where_the_store_listens(nodes: int) -> None:
    """Not on all interfaces, also over several hosts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address besides loopback")
        address = probe.getsockname()[0]
    world = World(size=2, nodes=nodes, hosts=tuple("ab"[:nodes]))
    store = _host_store(address, 0, world, timedelta(seconds=10), wait=False)
    listening = [here for state, here, _, _ in connections() if state == LISTENING]
    at = [int(end.split(":")[0], 16) for end in listening if int(end.split(":")[1], 16) == store.port]
    assert at == [int.from_bytes(socket.inet_aton(address), sys.byteorder)]


def here_alone(port: int, **changed: Any) -> Meeting:
    """Return the watch of a launch on this machine, whose ranks meet at ``port``."""
    meeting = watching(local=True)
    vars(meeting.plan).update({"env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, **changed})
    return meeting


@pytest.mark.usefixtures("pidfd_getfd")
def test_where_ranks_of_one_machine_meet_is_closed_to_other_hosts(tell: Tell) -> None:
    """Whatever else a rank listens for stays open, and a launcher's daemons connect to it before there are ranks."""
    with socket.create_server(("", 0)) as launchers, socket.create_server(("127.0.0.1", 0)) as local:
        before = here_alone(1)
        before.sample()
        assert not bound(launchers)
        port = tell(0, "listen to all")
        tell(1, "listen to all")
        meeting = here_alone(port)
        meeting.sample()
        meeting.sample()
        assert (bound(launchers), bound(local)) == (True, False)
        assert (tell(0, "bound"), tell(1, "bound")) == (1, 0)
        socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.usefixtures("pidfd_getfd")
@pytest.mark.parametrize(
    "changed",
    [
        {"job": SimpleNamespace(is_local=False)},
        {"options": SimpleNamespace(hostfile="hosts", launcher_args=())},
        {"options": SimpleNamespace(hostfile=None, launcher_args=("-hosts", "other"))},
        {"env": {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}},
    ],
    ids=["in a job", "host file", "arguments of the launcher", "address of the user's"],
)
def test_ranks_that_other_hosts_may_have_to_reach_are_not_closed_to_them(tell: Tell, changed: dict[str, Any]) -> None:
    with socket.create_server(("", 0)) as launchers:
        tell(0, "listen to all")
        here_alone(1, **changed).sample()
        assert not bound(launchers)


@pytest.mark.usefixtures("pidfd_getfd")
def test_a_socket_is_closed_to_other_hosts_although_files_before_it_have_just_been_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = os.listdir

    def before_it_closed_two(folder: str) -> list[str]:
        return ["998", "999", *listed(folder)]

    monkeypatch.setattr(os, "listdir", before_it_closed_two)
    with socket.create_server(("", 0)) as server:
        assert close_to_others(os.getpid(), str(os.fstat(server.fileno()).st_ino))
        assert bound(server)


@pytest.mark.usefixtures("pidfd_getfd")
def test_a_socket_that_was_looked_for_in_a_process_that_ended_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        assert not close_to_others(ended.pid, "1")
    assert not close_to_others(os.getpid(), "1")  # has no such socket
    with socket.create_server(("", 0)) as launchers:
        meeting = here_alone(tell(0, "listen to all"))
        monkeypatch.setattr(loopback, "close_to_others", lambda pid, inode: False)
        meeting.sample()
        monkeypatch.undo()
        for _ in range(10):  # one of which reads the table of connections
            meeting.sample()
        assert (bound(launchers), tell(0, "bound")) == (True, 1)


def bound(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16))
