"""How ranks agree without a process group: ``broadcast``, ``monitored_barrier`` and ``Agreement``.

They use the store of the rendezvous, or MPI. So they work before ``setup``, if a rank is late or has failed, and in a
thread beside one that calls collectives. They also save connections: in a gloo group, all ranks are connected.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from wordrun.common.errors import WorldError
from wordrun.config.registry import packages
from wordrun.dist import mpi
from wordrun.dist.rendezvous import shared_store
from wordrun.dist.world import World

# Polls per second by all ranks together.
LOOKS_PER_S = 20_000
SHORTEST_S = 0.005  # shortest pause between two polls of a rank
_broadcasts, _agreements = itertools.count(), itertools.count()
"""Counters that make keys in the store unique, equal on all ranks; never reset: a store may outlive a group."""


def broadcast(value: Any, world: World, timeout_s: int = 1800) -> Any:
    """Return rank 0's ``value`` on every rank; all must call this, before or after ``setup``.

    For plain values, paths and dataclasses (see ``dumps``). Over MPI, if it is in use, in log(n) rounds; else
    through the rendezvous store, which every rank reads once.
    """
    if world.size == 1:
        return value
    data = dumps(value) if world.rank == 0 else b""
    if mpi.in_use(world):
        return loads(mpi.broadcast(data))
    store, key = shared_store(world, timeout_s), f"wordrun/broadcast/{next(_broadcasts)}"
    if world.rank == 0:
        store.set(key, data)
    return loads(store.get(key))


def monitored_barrier(name: str, world: World, timeout_s: float) -> bool:
    """Wait for the other ranks here, and return whether all have come within ``timeout_s`` seconds.

    All ranks pass the same ``name``, which must be new. This is not a collective: ranks that do not come may be in one.
    """
    if world.size == 1:
        return True
    store, key = shared_store(world), f"wordrun/arrived/{name}"
    if store.add(key, 1) == world.size:
        store.set(f"{key}/all", b"")
    try:
        store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
    except RuntimeError:  # DistStoreError: it timed out
        return False
    return True


class Agreement:
    """A series of meetings of all ranks. Every rank must create it, and call ``meet``, in the same order.

    It works in any thread: a rank sends two short messages, and polls for the answer.
    """

    def __init__(self, world: World, timeout_s: int) -> None:
        self.world, self.timeout_s, self._meetings = world, timeout_s, itertools.count()
        self._sent = itertools.count()
        self._name = f"wordrun/agreement/{next(_agreements)}"
        self._store = shared_store(world, timeout_s) if world.size > 1 else None

    def meet(self, problem: str = "", value: Any = None) -> tuple[str, list[Any]]:
        """Wait until every rank has called this.

        Args:
            problem: what has failed on this rank; empty: nothing.
            value: what this rank sends to rank 0, JSON-serializable; None: nothing. Each value that is sent costs
                time on rank 0.

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
        """Return rank 0's ``text`` on the ranks that receive it, else an empty string; every rank must call this.

        All ranks must ``meet`` before the next call.
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
        """Poll until ``done``. A client that waits inside the store would block the main thread's calls."""
        end, pause = time.monotonic() + self.timeout_s, SHORTEST_S
        while not done():
            if time.monotonic() > end:
                raise WorldError(
                    f"not all of {self.world.size} ranks reached the same point within {self.timeout_s} s: look for an "
                    "error or a slow rank in the log, or allow more time with train.timeout_s",
                    page="hangs.md#a-hang",
                )
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, self.world.size / LOOKS_PER_S))


RESTORE: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "dict": dict, "path": Path}


def dumps(value: Any) -> bytes:
    """Return ``value`` as JSON.

    Args:
        value: numbers, strings and None; lists, tuples and dicts of them; paths; and dataclasses.

    Raises:
        TypeError: it contains something else.
    """
    return json.dumps(_plain(value)).encode()


def loads(data: bytes) -> Any:
    """Return the value that ``dumps`` converted.

    Raises:
        ValueError: it is not such a value, or contains a dataclass that this process does not have.
    """
    return json.loads(data, object_hook=_restored)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_plain(each) for each in value]}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        content = [[field.name, _plain(getattr(value, field.name))] for field in fields(value) if field.init]
        return {f"{cls.__module__}:{cls.__qualname__}": content}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks: {value!r}")


def _restored(found: dict[str, Any]) -> Any:
    ((kind, content),) = found.items()
    if kind in RESTORE:
        return RESTORE[kind](content)
    module, _, name = kind.partition(":")
    if module not in sys.modules and module.partition(".")[0] in ("wordrun", *packages()):
        importlib.import_module(module)
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ValueError(f"{kind} is not a dataclass that this process has imported")
    return cls(**dict(content))
