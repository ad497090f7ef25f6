"""One preparation at a time: a lock file with a heartbeat, for file systems on which the kernel's own are no help."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BEAT_S = 2.0
"""Seconds between signs of life."""
SILENCE_S = 15.0
"""Seconds without one after which the holder is taken for dead. Only durations count, so that clocks may differ."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Try to hold the lock at ``path`` for a ``with`` block; yield whether it was free."""
    if not _take(path):
        yield False
        return
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, done), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        done.set()
        beat.join()
        with contextlib.suppress(OSError):
            path.unlink()


def holder(path: Path) -> str:
    """Return who holds the lock, for people."""
    try:
        content = json.loads(path.read_text())
        return f"process {content['pid']} on {content['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def wait(path: Path, until: Callable[[], bool], tell: Callable[[float], None]) -> bool:
    """Wait until ``until`` says so; return False if the lock's holder has died or left before.

    Args:
        path: the lock.
        until: asked twice a second.
        tell: called with the seconds waited, as often.
    """
    begin = last_sign = time.monotonic()
    sign = _sign(path)
    while not until():
        now = time.monotonic()
        if (new := _sign(path)) != sign:
            sign, last_sign = new, now
        if new is None or now - last_sign > SILENCE_S or _lives_here(path) is False:
            return until()
        tell(now - begin)
        time.sleep(0.5)
    return True


def _take(path: Path) -> bool:
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
    for _ in range(2):
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(content)
            return True
        except FileExistsError:
            lives = _lives_here(path)
            if lives or (lives is None and not _is_silent(path)):
                return False
            with contextlib.suppress(OSError):  # of several who see this, one succeeds in renaming it
                os.rename(path, path.with_name(f"{path.name}.{os.getpid()}"))
                os.unlink(path.with_name(f"{path.name}.{os.getpid()}"))
    return False


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(path)


def _sign(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _is_silent(path: Path) -> bool:
    """Watch the lock for a few beats; its holder is on another host, where nobody can look whether it lives."""
    sign, end = _sign(path), time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        if _sign(path) != sign:
            return False
        time.sleep(0.2)
    return True


def _lives_here(path: Path) -> bool | None:
    """Say whether the holder is a process of this host that runs; None: it is on another one."""
    try:
        content = json.loads(path.read_text())
        if content["host"] != socket.gethostname():
            return None
        os.kill(int(content["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError):
        return None
    return True
