"""Folders in a node's memory that survive the processes that use them; each of these processes holds a shared lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

ROOT = "WORDRUN_SHM"
"""Variable that names another file system in memory than /dev/shm, the same on all ranks of a node."""


def root() -> Path:
    """Return the file system in memory."""
    return Path(os.environ.get(ROOT) or "/dev/shm")


def home() -> Path:
    """Return this user's folder, which has a folder for each run."""
    return root() / f"wordrun-memory-{os.getuid()}"


def is_own(folder: Path) -> bool:
    """Return whether a folder exists, and is this user's: anybody may create one in a file system in memory."""
    return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()


def open_shared(path: Path) -> int:
    """Create the folder ``path`` if necessary, and lock it together with this node's other ranks; return the lock."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):  # another run has just removed it
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def last_change(path: Path) -> float:
    """Return when something was last written below ``path``, as seconds since the epoch."""
    times = [0.0]
    for each in (path, *path.glob("*")):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return max(times)


def remove_abandoned(path: Path) -> None:
    """Remove the folder ``path``, unless a process holds its lock."""
    with contextlib.suppress(OSError):  # another run has removed it, or holds the lock
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
