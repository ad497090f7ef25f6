"""Handles Ctrl-C while a command starts: nothing needs to be saved yet, and a traceback from an import is noise."""

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
LATE_S = 1.0
"""The watching thread may see a signal this long after its handler, on a busy machine."""


class EndAtOnce:
    """A handler of SIGINT that ends this process with one line, even in the midst of an import or of waiting for ranks.

    It is installed from ``end_at_once`` on, and at the latest until the process ends. Other handlers may take its place
    for a while.
    """

    def __init__(self, message: str) -> None:
        self._endings: list[tuple[str, Callable[[], None]]] = [(message, lambda: None)]
        """What to say and to do before the end; the last entry counts."""
        self._ending = threading.Lock()
        self._taken_at = float("-inf")
        """When another handler took a SIGINT, by the monotonic clock [s]."""
        # Python calls handlers only between two Python instructions; a thread also reacts while C code runs.
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process."""
        if not self._ending.acquire(blocking=False):
            return
        message, clean_up = self._endings[-1]
        clean_up()
        # launch prints its own line.
        if "WORDRUN_LAUNCH_ID" not in os.environ and all(os.environ.get(name, "0") == "0" for name in RANKS):
            os.write(2, f"{message}\n".encode())
        os._exit(STATUS)

    @contextlib.contextmanager
    def with_ending(self, message: str, clean_up: Callable[[], None]) -> Iterator[None]:
        """In a ``with`` block, call ``clean_up`` in any thread, and print ``message``, before the end."""
        self._endings.append((message, clean_up))
        try:
            yield
        finally:
            self._endings.pop()

    def raise_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT as Python does, in place of this handler."""
        self.taken()
        raise KeyboardInterrupt

    def taken(self) -> None:
        """Note that another handler has taken a SIGINT, and may restore this one before the thread sees the signal."""
        self._taken_at = time.monotonic()

    def close(self) -> None:
        """Stop watching, once another handler has been installed for good."""
        if (fd := signal.set_wakeup_fd(-1)) != self._writer:  # somebody else's
            signal.set_wakeup_fd(fd)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                is_installed = signal.getsignal(signal.SIGINT) is self
                if signal.SIGINT in numbers and is_installed and time.monotonic() - self._taken_at > LATE_S:
                    self(signal.SIGINT, None)


def _installed() -> EndAtOnce | None:
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, EndAtOnce) else None


def end_at_once(message: str = "interrupted; nothing to save") -> EndAtOnce | None:
    """Let SIGINT end this process with one line from now on; return the handler, or None if there is another one.

    Only Python's own handler is replaced: a program that ignores or handles SIGINT has a reason.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    handler = EndAtOnce(message)
    signal.signal(signal.SIGINT, handler)
    return handler


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Do the same for a ``with`` block, in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = end_at_once() if is_main else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            handler.close()


@contextlib.contextmanager
def killing() -> Iterator[None]:
    """In a ``with`` block of C code that keeps the interpreter's lock, so that no handler could run, let SIGINT kill.

    A handler that is not wordrun's stays.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = isinstance(before, EndAtOnce) or before is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not is_ours:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ending_with(message: str, clean_up: Callable[[], None]) -> Iterator[None]:
    """In a ``with`` block, if SIGINT ends this process, let it call ``clean_up`` and print ``message`` before."""
    handler = _installed()
    with contextlib.nullcontext() if handler is None else handler.with_ending(message, clean_up):
        yield


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """In a ``with`` block that cleans up, let SIGINT raise KeyboardInterrupt if it would end this process."""
    handler = _installed()
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler.raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def taken(before: object) -> None:
    """Note that a handler that has replaced the handler ``before`` has taken a SIGINT, and may restore that one."""
    if isinstance(before, EndAtOnce):
        before.taken()
