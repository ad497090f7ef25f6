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
from wordrun.launch.connection_watch import LISTENING, ConnectionWatch, connections

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
    elif verb == "connect":
        kept.append(socket.create_connection(("127.0.0.1", value)))
    elif verb == "accept":
        kept.append(kept[-1].accept()[0])
    elif verb == "leave":
        kept.pop().close()
    answer = kept[-1].getsockname()[1] if kept and isinstance(kept[-1], socket.socket) else 0
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


def watching(launcher: str = "pals", *, local: bool = False) -> ConnectionWatch:
    """Return the watch of a launch whose ranks are this process's, or found by their launch ID, as in a job."""
    plan = SimpleNamespace(
        ranks=SimpleNamespace(np=2),
        launcher=SimpleNamespace(name=launcher),
        env={"MASTER_PORT": "1"},
        hosts=("n1",),
        decided=SimpleNamespace(launch_id=f"test-{os.getpid()}"),
        job=SimpleNamespace(is_local=local),
    )
    return ConnectionWatch(plan, os.getpid())  # type: ignore[arg-type]


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
