"""Ctrl-C while a command starts: there is nothing to save yet, and a traceback out of an import helps nobody."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def end_at_once() -> None:
    """Let SIGINT end this process without a word, even in the midst of an import or of waiting for other ranks.

    Only Python's own handler is replaced: whoever ignores SIGINT or handles it has a reason.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


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
def raising() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in a ``with`` block that has something to clean up."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
