"""A rank that outlives the death of another one, under ``launch --elastic``.

Its guardian says when the generation is over. Then this process leaves its groups, says so, and waits for the guardian
to say where the ranks meet again. A guardian kills a rank that has not offered to stay, or does not leave in time, and
forks it anew: nothing here has to succeed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

VARIABLE = "WORDRUN_STAY"
"""A rank's process ID, and the file descriptor that connects it with its guardian."""
# A rank that fails because another one was killed learns of that within this time [s].
GUARDIAN_S = 1.0
# A thread of the generation that is over has this long [s] to end.
THREADS_S = 0.3
KEPT_THREADS = ("InductorSubproc", "matplotlib", "tqdm", "wandb-")
"""Beginnings of the names of threads that belong to the process: compilers, an import, W&B's connection."""


class Restart(BaseException):
    """Another rank has died, and this process will take part in the next generation; only ``staying`` handles it."""


@dataclass
class _Rank:
    """This process's part in the generations of its job."""

    line: socket.socket | None = None
    """The connection to the guardian; None: there is none."""
    threads: frozenset[threading.Thread] = frozenset()
    """Those that were there before the first generation."""
    since: float = 0.0
    """When the generation began in this process."""
    offered: bool = False
    over: bool = False
    waited: bool = False
    """The guardian has had the time to say that another rank is the cause of a failure here."""
    sockets: set[tuple[int, str]] = field(default_factory=set)
    """The file descriptors of process groups, and what each refers to."""


_rank = _Rank()


def begin() -> None:
    """Take over the connection to the guardian, if there is one: the caller handles ``Restart``."""
    pid, _, number = os.environ.pop(VARIABLE, "").partition(" ")
    if pid == str(os.getpid()) and _rank.line is None:  # not in a process that another program's rank has started
        _rank.line = socket.socket(fileno=int(number))
        _rank.threads, _rank.since = frozenset(threading.enumerate()), time.monotonic()


def offer(device: str) -> None:
    """Offer to stay, once a generation has taken a step; the guardian waits no longer than a restart would take.

    Only on CPUs: aborting a device's collectives and using it again is untested.
    """
    if _rank.line is None or _rank.offered or device != "cpu":
        return
    _rank.offered = True
    _say(event="offer", seconds=round(time.monotonic() - _rank.since, 3))


def is_over(patience_s: float = 0.0) -> bool:
    """Return whether the guardian has said, or says within ``patience_s``, that the generation is over."""
    if _rank.over or _rank.line is None or not _rank.offered:
        return _rank.over  # a rank that has not offered to stay is killed instead
    ready, _, _ = select.select([_rank.line], [], [], patience_s)
    with contextlib.suppress(BlockingIOError):  # another thread has read it
        if ready and _rank.line.recv(64, socket.MSG_DONTWAIT):  # it says nothing else
            _rank.over = True
    return _rank.over


@contextlib.contextmanager
def noticing() -> Iterator[None]:
    """Within the ``with`` block, turn an error that another rank's death has caused into ``Restart``."""
    try:
        yield
    except Exception as error:
        if not is_over(0.0 if _rank.waited else GUARDIAN_S):
            _rank.waited = _rank.offered
            raise
        _shut_sockets()
        raise Restart from error


def wait_for_guardian() -> None:
    """After an error, wait for the time in which a guardian ends this process if another one is the cause."""
    if "WORDRUN_GENERATION" in os.environ and not _rank.waited:
        time.sleep(GUARDIAN_S)


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """Note which sockets are opened in a ``with`` block that creates process groups (Linux)."""
    before = _open_sockets() if _rank.line is not None else set()
    yield
    if _rank.line is not None:
        _rank.sockets |= _open_sockets() - before


def rejoin() -> None:
    """Tell the guardian that this process has left, and wait for the variables of the next generation.

    If a thread of the last one does not end, end this process.
    """
    assert _rank.line is not None
    gc.collect()
    end = time.monotonic() + THREADS_S
    while left := [each for each in threading.enumerate() if each not in _rank.threads and not _is_kept(each)]:
        if time.monotonic() > end:
            os._exit(1)
        left[0].join(0.01)
    _say(event="left")
    text = b""
    while not text.endswith(b"\n"):
        if not (chunk := _rank.line.recv(65536)):
            os._exit(1)
        text += chunk
    os.environ.update(json.loads(text)["env"])
    _rank.since, _rank.sockets = time.monotonic(), set()
    _rank.offered = _rank.over = _rank.waited = False


def _say(**message: object) -> None:
    assert _rank.line is not None
    with contextlib.suppress(OSError):  # the guardian has ended, and so will this process
        _rank.line.sendall(json.dumps(message).encode() + b"\n")


def _is_kept(thread: threading.Thread) -> bool:
    return thread.name.startswith(KEPT_THREADS)


def _open_sockets() -> set[tuple[int, str]]:
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder's own
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found.add((int(name), target))
    return found


def _shut_sockets() -> None:
    """Close the connections of all process groups, here and for the ranks at their other ends.

    Collectives that wait for a living rank fail as well, so that no thread is left in one; gloo has no call for it.
    """
    for number, _ in _rank.sockets & _open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
            if not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # to shut a listening one ends the process
                same.shutdown(socket.SHUT_RDWR)
