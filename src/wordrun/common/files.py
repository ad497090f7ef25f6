"""Atomic writes of files, and reads of files that may be missing or broken."""

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any


def why(error: OSError) -> str:
    """Return what went wrong with a file, as text."""
    text = error.strerror or str(error)
    return f"{text} (the disk, or your quota of it, is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else text


def absolute(path: str) -> Path:
    """Return ``path`` as an absolute path, with a leading ~ expanded."""
    return Path(os.path.expanduser(path)).absolute()


def read_proc(path: str) -> str:
    """Return the content of a file of the kernel, such as one in /proc; empty if it has gone or belongs to others."""
    try:
        with open(path, errors="surrogateescape", newline="") as file:
            return file.read()
    except OSError:
        return ""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``; empty if there is none that can be read."""
    try:
        # json.loads detects the encoding of bytes (UTF-16, byte order marks). Reading a pipe would never end.
        content = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_bytes(file: Path, last: int | None = None) -> bytes:
    """Return what is in a file, or its ``last`` bytes; empty if there is none that can be read, or it is a pipe."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as stream:
            if last is not None:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - last))
            return stream.read()
    except OSError:
        return b""


def write(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Write a file and sync it to disk; a new one has the permissions ``mode``, less those in the umask."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # not supported by some parallel file systems
        pass
    finally:
        os.close(descriptor)


def replace(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Write ``text`` to ``path`` atomically: a reader finds the old text or the new one, also after a power failure.

    Writes a temporary file beside it, syncs that, and renames it, so that a killed process leaves no partial file.
    The new file has the permissions ``mode``, less those in the umask.
    """
    new = path.with_name(f".{path.name}.{_writer()}")
    try:
        write(new, text, mode)
        new.replace(path)
    except OSError:  # an incomplete file would keep a full disk full
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


def set_aside(path: Path, hidden: str = "") -> Path:
    """Rename ``path`` to the first of NAME.broken, NAME.broken-2, ... that is free, and return that.

    Args:
        path: a file, a link or a folder.
        hidden: the ending of a hidden name, .NAME.ENDING, to use instead.
    """
    name = f".{path.name.lstrip('.')}.{hidden}" if hidden else f"{path.name}.broken"
    number, new = 1, path.with_name(name)
    while os.path.lexists(new):
        number += 1
        new = path.with_name(f"{name}-{number}")
    path.rename(new)
    return new


def point(link: Path, target: Path | str) -> None:
    """Atomically make ``link`` a symbolic link to ``target``, replacing any existing link."""
    new = link.with_name(f".{link.name}.{_writer()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _writer() -> str:
    """Return a suffix for temporary files that no other process uses, on any host that shares the folder."""
    return f"{os.uname().nodename}-{os.getpid()}"
