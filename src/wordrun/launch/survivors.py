"""The ranks of a node that stay: their processes survive the end of a generation, and take part in the next one.

The other side is ``wordrun.dist.staying``, in the rank.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from wordrun.launch.wire import Link

VARIABLE = "WORDRUN_STAY"
"""Tells a rank its process ID, so that no other process uses what follows: the file descriptor of its connection."""


class Survivors:
    """A guardian's connections to its ranks, by process ID."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}
        self._worth: dict[int, float] = {}
        """How long it would take to restart the ranks that have offered to stay [s]."""

    def connect(self, pid: int, connection: socket.socket) -> None:
        """Remember the connection to a new rank."""
        self._links[pid] = Link(connection)

    def close(self, pids: Iterable[int] | None = None) -> None:
        """Close the connections to the ranks ``pids``, or all of them."""
        for pid in list(self._links) if pids is None else [*pids]:
            if pid in self._links:
                self._links.pop(pid).close()
            self._worth.pop(pid, None)

    def offers(self) -> set[int]:
        """Return the ranks that have offered to stay since their generation began."""
        ready, _, _ = select.select([link.socket for link in self._links.values()], [], [], 0)
        for pid, link in self._links.items():
            for message in (link.receive() or ()) if link.socket in ready else ():
                if message["event"] == "offer":
                    self._worth[pid] = float(message["seconds"])
        return {*self._worth}

    def leave(self, pids: Iterable[int], patience_s: float) -> set[int]:
        """Let ranks that have offered it leave their generation; return those that do so in time.

        No rank gets more time than ``patience_s``, nor than restarting it would take.
        """
        begun, left = time.monotonic(), set[int]()
        asked = {pid: min(patience_s, self._worth[pid]) for pid in pids}
        for pid in asked:
            self._links[pid].send(do="leave")
        while asked := {pid: s for pid, s in asked.items() if begun + s > time.monotonic()}:
            until = min(asked.values()) + begun - time.monotonic()
            ready, _, _ = select.select([self._links[pid].socket for pid in asked], [], [], max(0.0, until))
            for pid in [pid for pid in asked if self._links[pid].socket in ready]:
                messages = self._links[pid].receive()
                if messages and messages[-1]["event"] == "left":
                    left.add(pid)
                if messages != []:
                    del asked[pid]
        self._worth.clear()
        return left

    def start(self, pid: int, variables: Mapping[str, str]) -> None:
        """Let a rank that has left take part in the generation with these ``variables``."""
        self._links[pid].send(env=dict(variables))


def those_that_stay(before: tuple[int, ...], now: tuple[int, ...], answers: Mapping[int, Any]) -> list[int]:
    """Return the ranks that have left the last generation and keep their rank and node in the next one.

    Args:
        before: the ranks on each node in the last generation.
        now: the same in the next one.
        answers: by node, what its guardian has answered, with the ranks that have left as ``stays``.
    """
    kept = [node for node in answers if before[node] == now[node] and sum(before[:node]) == sum(now[:node])]
    return sorted(rank for node in kept for rank in answers[node].get("stays", ()))
