"""Ranks wait for each other, and learn whether one has failed, in any thread and at any number of ranks.

They do so through the store rather than in a process group, because collectives of two threads must not interleave, and
because each rank of gloo keeps a connection to every other one. A rank sends two short messages and polls for the
answer.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from wordrun.common.errors import WorldError
from wordrun.dist.rendezvous import shared_store
from wordrun.dist.world import World

# Polls per second by all ranks together.
LOOKS_PER_S = 20_000
SHORTEST_S = 0.005  # shortest pause between two polls of a rank
_numbers = itertools.count()


class Agreement:
    """A series of meetings of all ranks, who must create it, and call ``meet``, in the same order."""

    def __init__(self, world: World, timeout_s: int) -> None:
        self.world, self.timeout_s, self._meetings = world, timeout_s, itertools.count()
        self._sent = itertools.count()
        self._name = f"wordrun/agreement/{next(_numbers)}"
        self._store = shared_store(world, timeout_s) if world.size > 1 else None

    def meet(self, problem: str = "", value: Any = None) -> tuple[str, list[Any]]:
        """Wait until every rank has called this.

        Args:
            problem: what has failed on this rank; empty: nothing.
            value: for rank 0, JSON-serializable. Its cost grows with the number of ranks that send one; None: nothing.

        Returns:
            The first problem of any rank, or an empty string; and, on rank 0, the ranks' values, in any order.

        Raises:
            WorldError: other ranks have not called this within ``timeout_s`` seconds.
        """
        if self._store is None:
            return problem, [] if value is None else [value]
        store, key = self._store, f"{self._name}/{next(self._meetings)}"
        if problem:
            store.compare_set(f"{key}/problem", "", problem)
        if value is not None:
            store.set(f"{key}/value/{store.add(f'{key}/values', 1)}", json.dumps(value))
        if store.add(f"{key}/here", 1) == self.world.size:
            store.set(f"{key}/end", store.get(f"{key}/problem") if store.check([f"{key}/problem"]) else b"")
        self._wait(lambda: store.check([f"{key}/end"]))
        found = store.get(f"{key}/end").decode()
        if self.world.rank:
            store.add(f"{key}/gone", 1)
            return found, []
        # Rank 0 hosts the store, and must not leave while others look for the answer.
        self._wait(lambda: store.add(f"{key}/gone", 0) == self.world.size - 1)
        count = store.add(f"{key}/values", 0)
        values = [json.loads(store.get(f"{key}/value/{number}")) for number in range(1, count + 1)]
        for name in ("problem", "here", "end", "gone", "values", *(f"value/{i}" for i in range(1, count + 1))):
            store.delete_key(f"{key}/{name}")
        return found, values

    def send(self, text: str | None, *, receives: bool) -> str:
        """Return rank 0's ``text``, which other ranks ignore, on the ranks that receive it; every rank must call this.

        All must ``meet`` before the next call.
        """
        store = self._store
        if store is None:
            return text or ""
        number = next(self._sent)
        key = f"{self._name}/sent/{number}"
        if self.world.rank == 0:
            store.set(key, text)
            store.delete_key(f"{self._name}/sent/{number - 1}")  # all have met since
            return text or ""
        if not receives:
            return ""
        self._wait(lambda: store.check([key]))
        return str(store.get(key).decode())

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait by asking: a client that waits inside the store would block the main thread's calls."""
        end, pause = time.monotonic() + self.timeout_s, SHORTEST_S
        while not done():
            if time.monotonic() > end:
                raise WorldError(
                    f"not all of {self.world.size} ranks reached the same point within {self.timeout_s} s: look for an "
                    "error or a slow rank in the log, or allow more time with train.timeout_s",
                    page="jobs.md#a-hang",
                )
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, self.world.size / LOOKS_PER_S))
