"""What the guardians of ``launch --elastic`` were last told to do, and which of them have done it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

# A guardian that has not done what it was told to, such as kill its ranks, within this time [s] counts as lost.
ANSWER_S = 60.0
# Before they are ready, they import what the ranks need, for at most this long [s] after the first one is ready. They
# connect before that, so one that has not connected after ANSWER_S has died: not every launcher says so.
READY_S = 300.0


class Answers:
    """The answers of the nodes that were asked; the first question is whether all of them are ready.

    Args:
        nodes: the number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self.asked = {*range(nodes)}
        self._given: dict[int, Any] = {}
        self._since = self._limit_s = float("inf")

    def ask(self, nodes: Iterable[int]) -> None:
        """Expect an answer of each of ``nodes``, and forget the last ones."""
        self.asked, self._given = {*nodes}, {}
        self._since, self._limit_s = time.monotonic(), ANSWER_S

    def wait_for_ready(self) -> None:
        """Begin to wait for nodes that are not ready, unless that has begun."""
        self._since, self._limit_s = min(self._since, time.monotonic()), READY_S

    def stop_waiting(self) -> None:
        """Consider no answer late from now on."""
        self._since = self._limit_s = float("inf")

    def add(self, node: int, answer: Any) -> dict[int, Any] | None:
        """Keep the answer of a node, and return all of them if it is the last one to arrive."""
        self._given[node] = answer
        if not self.asked <= {*self._given}:
            return None
        found, self._given = self._given, {}
        self.stop_waiting()
        return found

    def late(self, connected: Collection[int]) -> tuple[int, float] | None:
        """Return a node whose answer is late, and how long it was waited for [s]; None: there is none."""
        waited = time.monotonic() - self._since
        for node in sorted(self.asked - {*self._given}):
            limit_s = self._limit_s if node in connected else min(self._limit_s, ANSWER_S)
            if waited > limit_s:
                return node, limit_s
        return None
