"""The messages between ``launch --elastic`` and its guardians: a JSON object per line, over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

from wordrun.common.listener import UnfitError

VARIABLE = "WORDRUN_GUARDIAN_TOKEN"
"""Tells guardians where ``launch`` listens, and the secret that they must know: ADDRESS PORT SECRET."""
# A peer whose host has died is noticed after this long [s]: the first probe, the time between probes, and their number.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# Nobody sends longer lines: a command line has at most 2 MB.
LONGEST = 8_000_000
# Characters of a message that is not one, in an error.
SHOWN = 80
FACTS: Mapping[str, Mapping[str, type]] = {
    "ready": {"port": int},
    "started": {"pids": dict},
    "exit": {"rank": int, "pid": int, "status": int, "memory": str, "mpi": bool, "stopped": bool},
    "ended": {"port": int},
}
"""What a guardian reports, by event."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        with contextlib.suppress(OSError):  # not every system has all of these
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, ``receive`` will say so."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, after waiting for a part of one; None: the other end is gone.

        Raises:
            UnfitError: something else has arrived.
        """
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > LONGEST:
            raise UnfitError(f"a line of more than {LONGEST} bytes")
        return [message_in(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def message_in(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        UnfitError: there is none.
    """
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise UnfitError(f"{line[:SHOWN]!r}, which is not a JSON object")
    return message


def check(message: Mapping[str, Any], np: int) -> None:
    """Check that a guardian of ``np`` ranks in all may say this.

    Raises:
        UnfitError: an event that guardians do not report, or one with other facts.
    """
    event, ranks = message.get("event"), [message["rank"]] if "rank" in message else []
    facts = FACTS.get(event) if isinstance(event, str) else None
    fits = facts is not None and all(type(message.get(name)) is kind for name, kind in facts.items())
    if fits and event == "started":
        ranks = [int(rank) if rank.isdecimal() else -1 for rank in message["pids"]]
        fits = all(type(pid) is int for pid in message["pids"].values())
    if not fits or not all(rank in range(np) for rank in ranks) or not 0 < message.get("port", 1) < 65536:
        raise UnfitError(f"{json.dumps(message)[:SHOWN]}, which is none of its messages")
