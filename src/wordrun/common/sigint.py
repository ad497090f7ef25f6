"""Ctrl-C while a command starts: there is nothing to save yet, and a traceback from an import is noise."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

STATUS = 130
"""The exit status that shells give to commands killed by SIGINT."""
RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables with a rank's number; only the first rank reports."""

_last: list[tuple[str, Callable[[], None]]] = [("", lambda: None)]
"""What to say and to do before the end; the last entry counts."""
_ending = threading.Lock()
_watching = False
_taken = float("-inf")
"""When a handler of somebody else's took a SIGINT, by the monotonic clock [s]."""
LATE_S = 1.0
"""The watching thread may see a signal this long after its handler, on a busy machine."""


def end_at_once(message: str = "interrupted; nothing to save") -> None:
    """Let SIGINT end this process with one line, even in the midst of an import or of waiting for other ranks.

    Only Python's own handler is replaced: whoever ignores SIGINT or handles it has a reason.
    """
    global _watching
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    _last[0] = message, _last[0][1]
    if not _watching:
        # Python calls handlers between two of its own instructions, a thread reacts in the midst of C code as well.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), daemon=True).start()
        _watching = True
    signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Do the same for a ``with`` block, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def killing() -> Iterator[None]:
    """In a ``with`` block of C code that keeps the interpreter's lock, so that no handler could run, let SIGINT kill.

    A handler of somebody else's stays.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in (_end, signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ending_with(message: str, clean_up: Callable[[], None]) -> Iterator[None]:
    """In a ``with`` block, let SIGINT first call ``clean_up``, in any thread, and print ``message``."""
    _last.append((message, clean_up))
    try:
        yield
    finally:
        _last.pop()


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in a ``with`` block that has something to clean up."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def taken() -> None:
    """Note that a handler has taken a SIGINT, so that it does not end the process if it then restores ours."""
    global _taken
    _taken = time.monotonic()


def _watch(reader: int) -> None:
    while numbers := os.read(reader, 64):
        is_ours = signal.getsignal(signal.SIGINT) is _end and time.monotonic() - _taken > LATE_S
        if signal.SIGINT in numbers and is_ours:
            _end(signal.SIGINT, None)


def _raise(number: int, frame: FrameType | None) -> None:
    taken()
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    if not _ending.acquire(blocking=False):
        return
    message, clean_up = _last[-1]
    clean_up()
    # launch has its own line.
    if "WORDRUN_LAUNCH_ID" not in os.environ and all(os.environ.get(name, "0") == "0" for name in RANKS):
        os.write(2, f"{message}\n".encode())
    os._exit(STATUS)
