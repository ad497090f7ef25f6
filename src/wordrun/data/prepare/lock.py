"""Lock files with a heartbeat, for file systems where kernel locks do not work across hosts."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from wordrun.common import owner, sigint
from wordrun.common.files import read_json
from wordrun.common.log import LOGGER
from wordrun.data.prepare.writer import make_folder
from wordrun.dist import World

BEAT_S = 2.0
"""Seconds between heartbeats."""
SILENCE_S = 15.0
"""Seconds without a heartbeat until the holder counts as dead. Hosts' clocks may differ and are not compared."""
POLL_S = 0.2
"""Seconds between polls of a lock or of the folder it protects."""
CONTINUES = "interrupted: run the same command again to continue preparing the data"
LOG_S = 5.0
"""Seconds between log lines of a waiting rank."""


def once_per_file_system(
    folder: Path, world: World, is_done: Callable[[], bool], action: Callable[[], None], what: str
) -> None:
    """Run ``action`` in one process per file system and return once ``is_done``; every rank must call this.

    The first rank of each node tries to take the lock next to ``folder``. On a shared file system only one gets it.
    The other ranks poll files, so no collective can time out, and log that they are waiting for ``what``.
    """
    path = beside(folder)
    started = logged = time.monotonic()
    while not is_done():
        if world.local_rank == 0:
            make_folder(folder.parent)
            with held(path) as mine:
                if mine and not is_done():
                    action()
                    continue
        if time.monotonic() - logged > LOG_S:
            logged = time.monotonic()
            LOGGER.info("waiting for %s by %s: %.0f s", what, holder(path), logged - started)
        time.sleep(POLL_S)


def beside(folder: Path) -> Path:
    """Return the path of the lock for ``folder``."""
    return folder.with_name(f".{folder.name}.lock")


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Try to hold the lock at ``path`` during a ``with`` block; yield whether it succeeded."""
    if not _take(path):
        yield False
        return
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, done), daemon=True)
    beat.start()

    def release() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    try:
        with sigint.ending_with(CONTINUES, release):
            yield True
    finally:
        done.set()
        beat.join()
        release()


def holder(path: Path) -> str:
    """Return a description of the lock's holder."""
    content = read_json(path)
    return f"process {content['pid']} on {content['host']}" if content else "another process"


def _take(path: Path) -> bool:
    content = json.dumps(owner.this_process())
    for _ in range(2):
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(content)
            return True
        except FileExistsError:
            dead = owner.is_dead(read_json(path))
            if dead is False or (dead is None and not _is_silent(path)):
                return False
            with contextlib.suppress(OSError):  # if several processes get here, only one rename succeeds
                os.rename(path, path.with_name(f"{path.name}.{os.getpid()}"))
                os.unlink(path.with_name(f"{path.name}.{os.getpid()}"))
    return False


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(path)


def _last_beat(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _is_silent(path: Path) -> bool:
    """Return whether no heartbeat arrives for a while; a process on another host cannot be examined directly."""
    beat, end = _last_beat(path), time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        if _last_beat(path) != beat:
            return False
        time.sleep(POLL_S)
    return True
