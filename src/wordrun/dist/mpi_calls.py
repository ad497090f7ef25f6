"""Counts calls that wait for other ranks and that torch does not know of: mpi4py's, so that a hang in one is named."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from wordrun.dist.imported import when_imported

GROUP = "MPI"
"""Calls of all ranks together, which have numbers."""
UNNUMBERED = "MPI, some ranks"
"""Other calls: point-to-point, and those of communicators of some ranks."""
COLLECTIVES = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier", "Bcast", "Create", "Dup",
    "Exscan", "Gather", "Gatherv", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Scatter", "Scatterv",
    "Split", "Split_type", "allgather", "allreduce", "alltoall", "barrier", "bcast", "exscan", "gather", "reduce",
    "scan", "scatter",
)  # fmt: skip
POINT_TO_POINT = (
    "Mprobe", "Probe", "Recv", "Send", "Sendrecv", "Sendrecv_replace", "Ssend", "mprobe", "probe", "recv", "send",
    "sendrecv", "ssend",
)  # fmt: skip


class Calls:
    """How many calls the main thread has made, and the one that it is in."""

    def __init__(self) -> None:
        self.count = 0
        """Calls of all ranks together."""
        self.pending: tuple[str, str, str] | None = None
        """Group, name and size of the call."""
        self._since = 0.0

    @contextlib.contextmanager
    def __call__(self, op: str, size: str, group: str = GROUP) -> Iterator[None]:
        """Note that the process is in the call ``op`` of the given ``size`` within a ``with`` block."""
        if self.pending or threading.current_thread() is not threading.main_thread():  # such as a call within a call
            yield
            return
        self.count += group == GROUP
        self._since = time.monotonic()
        self.pending = group, op, size
        try:
            yield
        finally:
            self.pending = None

    def waited(self) -> float:
        """Return for how many seconds the process has been in a call; 0: it is in none."""
        return time.monotonic() - self._since if self.pending else 0.0


CALLS = Calls()


def watch() -> None:
    """Count mpi4py's calls: of COMM_WORLD and of the communicators that are made of it, once mpi4py is imported."""
    when_imported("mpi4py.MPI", _replace_world)


def _replace_world(module: Any) -> None:
    """Make COMM_WORLD an object of a class whose blocking methods are counted."""
    plain = module.Intracomm
    if type(module.COMM_WORLD) is not plain:
        return

    class Counted(plain):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> Any:
            return (_world, ()) if self is module.COMM_WORLD else super().__reduce__()

    def counted(name: str, *, collective: bool) -> Callable[..., Any]:
        method = getattr(plain, name)
        op = f"{'MPI_' if name[0].isupper() else 'comm.'}{name}"

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            everyone = collective and self.size == module.COMM_WORLD.size
            with CALLS(op, _size(args), GROUP if everyone else UNNUMBERED):
                found = method(self, *args, **options)
            return Counted(found) if type(found) is plain else found

        return call

    for names, collective in ((COLLECTIVES, True), (POINT_TO_POINT, False)):
        for name in names:
            if hasattr(plain, name):
                setattr(Counted, name, counted(name, collective=collective))
    module.COMM_WORLD = Counted(module.COMM_WORLD)


def _world() -> Any:
    """Return COMM_WORLD of the process that unpickles it."""
    return sys.modules["mpi4py.MPI"].COMM_WORLD


def _size(args: Sequence[Any]) -> str:
    """Return the type and the shape of the buffer that comes first in ``args``; empty: there is none."""
    first = args[0] if args else None
    buffer = first[0] if isinstance(first, list | tuple) and first else first
    kind, shape = getattr(buffer, "dtype", None), getattr(buffer, "shape", None)
    return "" if kind is None or shape is None else f"{kind} {list(shape)}".removeprefix("torch.")
