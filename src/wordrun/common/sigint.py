"""Handles Ctrl-C while a command starts: nothing needs to be saved yet, and a traceback from an import is noise.

``watching`` ends a process on other signals while C code runs, during which Python calls no handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STATUS = 130
"""The exit status that shells give to commands killed by SIGINT."""
RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables with a rank's number; only the first rank reports."""
LATE_S = 1.0
"""The watching thread may see a signal this long after its handler, on a busy machine."""
PATIENCE_S = 2.0
"""After a signal whose handler raises an exception, the process has this long to clean up."""
_heard_by: list[Callable[[bytes], None]] = []
"""Functions that a thread calls with the numbers of signals that have arrived."""


class _Listener:
    """Calls ``_heard_by`` in a thread: Python calls handlers only between two Python instructions."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if (fd := signal.set_wakeup_fd(-1)) != self._writer:  # somebody else's
            signal.set_wakeup_fd(fd)
        os.close(self._writer)

    def _listen(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for hear in [*_heard_by]:
                    hear(numbers)


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
        _heard_by.append(self._hear)
        self._listener = _Listener()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process."""
        if not self._ending.acquire(blocking=False):
            return
        message = self._endings[-1][0]
        self.clean_up()
        # launch prints its own line.
        if "WORDRUN_LAUNCH_ID" not in os.environ and all(os.environ.get(name, "0") == "0" for name in RANKS):
            os.write(2, f"{message}\n".encode())
        os._exit(STATUS)

    def clean_up(self) -> None:
        """Do what should be done before the end."""
        self._endings[-1][1]()

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
        self._listener.close()
        _heard_by.remove(self._hear)

    def _hear(self, numbers: bytes) -> None:
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


class Raises:
    """A handler that raises SystemExit, after ``tell`` has been called with the signal's number."""

    def __init__(self, status: int, tell: Callable[[int], None]) -> None:
        self.status, self.tell = status, tell

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise SystemExit."""
        self.tell(number)
        raise SystemExit(self.status)


@contextlib.contextmanager
def exiting(numbers: Sequence[int], status: int, tell: Callable[[int], None]) -> Iterator[None]:
    """In a ``with`` block in the main thread, let the signals ``numbers`` raise SystemExit with ``status``.

    If the block has not ended a moment later, as in C code, the process ends with this status.

    Args:
        numbers: of the signals.
        status: the exit status.
        tell: called once with the number of the signal, before the end.
    """
    told, ended = threading.Lock(), threading.Event()

    def tell_once(number: int) -> None:
        if told.acquire(blocking=False):
            tell(number)

    def hear(found: bytes) -> None:
        if number := next((each for each in numbers if each in found), 0):
            threading.Thread(target=end, args=(number,), daemon=True).start()

    def end(number: int) -> None:
        if ended.wait(PATIENCE_S):
            return
        if (at_once := _installed()) is not None:
            at_once.clean_up()
        tell_once(number)
        os._exit(status)

    handler = Raises(status, tell_once)
    old = {number: signal.signal(number, handler) for number in numbers}
    _heard_by.append(hear)
    listener = None if _installed() else _Listener()
    try:
        yield
    finally:
        ended.set()
        if listener is not None:
            listener.close()
        _heard_by.remove(hear)
        for number, before in old.items():
            signal.signal(number, before)


@contextlib.contextmanager
def killing() -> Iterator[None]:
    """In a ``with`` block of C code that keeps the interpreter's lock, so that no handler could run, let signals kill.

    They are SIGINT and SIGTERM. A handler that is not wordrun's stays.
    """
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {
        number: before
        for number, before in found.items()
        if isinstance(before, EndAtOnce | Raises) or before is signal.default_int_handler
    }
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, before in ours.items():
            signal.signal(number, before)


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
