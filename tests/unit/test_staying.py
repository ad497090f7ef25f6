"""A rank that stays when another one dies, and its guardian's side; with real ranks, see tests/mpi."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from wordrun.dist import staying
from wordrun.dist.agreement import Agreement
from wordrun.dist.world import World
from wordrun.errors import WorldError
from wordrun.launch import survivors
from wordrun.launch.survivors import Survivors, those_that_stay

PID = 100


@pytest.fixture
def guardian(monkeypatch: pytest.MonkeyPatch) -> Iterator[Survivors]:
    """A guardian's connections, of which one leads to this process."""
    monkeypatch.setattr(staying, "_rank", staying._Rank())
    monkeypatch.setattr(staying, "GUARDIAN_S", 0.01)
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(survivors.VARIABLE, f"{os.getpid()} {theirs.detach()}")
    staying.begin()
    made = Survivors()
    made.connect(PID, ours)
    yield made
    made.close()
    assert staying._rank.line is not None
    staying._rank.line.close()


def test_both_sides_name_the_same_variable() -> None:
    assert survivors.VARIABLE == staying.VARIABLE


def test_a_rank_leaves_and_begins_anew(guardian: Survivors, monkeypatch: pytest.MonkeyPatch) -> None:
    assert staying.VARIABLE not in os.environ, "processes that a rank starts do not have the connection"
    assert guardian.offers() == set()
    staying.offer("cpu")
    assert guardian.offers() == {PID}
    found: list[set[int]] = []
    monkeypatch.setitem(guardian._worth, PID, 60.0)
    asking = threading.Thread(target=lambda: found.append(guardian.leave([PID], 60.0)))
    asking.start()
    monkeypatch.setattr(staying, "GUARDIAN_S", 60.0)
    with pytest.raises(staying.Restart), staying.noticing():
        raise RuntimeError("Connection closed by peer")
    assert staying.is_over()
    answer = threading.Thread(target=lambda: (asking.join(), guardian.start(PID, {"WORDRUN_TEST": "next"})))
    monkeypatch.setattr(staying._rank, "threads", frozenset([*threading.enumerate(), answer]))
    answer.start()
    monkeypatch.setenv("WORDRUN_TEST", "last")
    staying.rejoin()
    assert found == [{PID}]
    assert os.environ["WORDRUN_TEST"] == "next"
    assert not staying.is_over()
    assert guardian.offers() == set(), "it has not taken a step yet"


def test_a_process_that_a_rank_has_started_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "_rank", staying._Rank())
    monkeypatch.setenv(survivors.VARIABLE, f"{os.getppid()} 0")
    staying.begin()
    assert staying._rank.line is None


def test_an_error_of_its_own_stays_an_error(guardian: Survivors) -> None:
    staying.offer("cpu")
    with pytest.raises(RuntimeError, match="mine"), staying.noticing():
        raise RuntimeError("mine")


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0"])
def test_ranks_on_devices_do_not_offer_it(guardian: Survivors, device: str) -> None:
    staying.offer(device)
    assert guardian.offers() == set()


def test_who_does_not_leave_in_time_or_ends_does_not_stay(guardian: Survivors) -> None:
    """It gets as long as its own start has taken, which is no time here."""
    staying.offer("cpu")
    other, end = socket.socketpair()
    guardian.connect(PID + 1, other)
    end.sendall(b'{"event": "offer", "seconds": 60}\n')
    assert guardian.offers() == {PID, PID + 1}
    end.close()
    begun = time.monotonic()
    assert guardian.leave([PID, PID + 1], 60.0) == set()
    assert time.monotonic() - begun < 30


def test_the_sockets_of_groups_are_shut_except_those_that_listen(guardian: Survivors) -> None:
    staying.offer("cpu")
    with staying.noting_sockets():
        listening = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    other = socket.create_connection(listening.getsockname())
    guardian._links[PID].send(do="leave")
    with pytest.raises(staying.Restart), staying.noticing():
        raise RuntimeError("Connection closed by peer")
    assert (ours.recv(1), theirs.recv(1)) == (b"", b"")
    accepted, _ = listening.accept()
    accepted.sendall(b"x")
    assert other.recv(1) == b"x"
    for each in (listening, ours, theirs, other, accepted):
        each.close()


def test_ranks_that_agree_in_the_background_notice(guardian: Survivors, monkeypatch: pytest.MonkeyPatch) -> None:
    staying.offer("cpu")
    guardian._links[PID].send(do="leave")
    agreement = Agreement.__new__(Agreement)
    agreement.world, agreement.timeout_s = World(size=2), 60
    with pytest.raises(WorldError, match="another rank has died"):
        agreement._wait(lambda: False)


@pytest.mark.parametrize(
    ("before", "now", "stay"),
    [
        ((2, 2), (2, 2), [0, 3]),
        ((2, 2), (2, 0), [0]),
        ((2, 2, 0), (0, 2, 2), []),
        ((2, 2, 0), (2, 0, 2), [0]),
    ],
)  # fmt: skip
def test_a_rank_stays_if_its_place_does(before: tuple[int, ...], now: tuple[int, ...], stay: list[int]) -> None:
    answers = {0: {"stays": [0]}, 1: {"stays": [3]}, 2: {}}
    answers = {node: answers[node] for node in range(len(now)) if now[node]}
    assert those_that_stay(before, now, answers) == stay


def test_variables_are_json(guardian: Survivors) -> None:
    """What a guardian sends is one line, whatever a value contains."""
    guardian.start(PID, {"WORDRUN_FAULTS": '[{"cause": "SIGKILL\\n"}]'})
    assert staying._rank.line is not None
    text = staying._rank.line.recv(65536)
    assert text.count(b"\n") == 1
    assert json.loads(text)["env"] == {"WORDRUN_FAULTS": '[{"cause": "SIGKILL\\n"}]'}
