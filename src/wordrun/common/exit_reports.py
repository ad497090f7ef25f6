"""Reports of how the ranks of a launch end, because a launcher's exit status does not say it reliably.

What starts a rank (``rank_env.sh``, a guardian) writes a report of its end into the folder WORDRUN_STATUS_DIR:

- A rank that ended with status 0 is a line with its number, in one file for all ranks of the host.
- Any other rank has a file of its own. Its name is the rank's number, and it contains the exit status and the host.

While a process of wordrun has not finished, it has a file on its host whose name begins with WORDRUN_UNFINISHED. A rank
that leaves such a file behind and ends with status 0 has a file of its own, too, and counts as failed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator

from wordrun.common import owner

PREFIX = "ended-"
"""The name of a file with a host's ranks that have ended with status 0 begins with this."""
UNFINISHED = "WORDRUN_UNFINISHED"


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """If this process ends within the ``with`` block, let it count as a failure for ``launch``, whatever its status."""
    path = f"{os.environ.get(UNFINISHED, '')}-{os.getpid()}"
    try:
        if os.path.isabs(path):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with contextlib.suppress(OSError), open(descriptor, "wb", buffering=0) as file:
                file.write(json.dumps(owner.this_process()).encode())  # with which a later launch may remove it
    except OSError:  # an enclosing block has made the file, or it cannot be made
        path = ""
    try:
        yield
    finally:
        if path.endswith(f"-{os.getpid()}"):  # not in a forked process
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def without_exit() -> Iterator[None]:
    """Within the ``with`` block, which calls code of others, turn sys.exit(0) into an error.

    Raises:
        RuntimeError: sys.exit(0) was called. The process would have ended as if it had finished.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise RuntimeError("sys.exit(0) before the end").with_traceback(error.__traceback__) from error.__cause__


def unfinished_prefix(launch_id: str, rank: int | str) -> str:
    """Return WORDRUN_UNFINISHED of a rank, as in ``rank_env.sh``; with an empty ``rank``, its beginning for all."""
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-{launch_id}-{rank}")


def take_unfinished(prefix: str) -> bool:
    """Remove the files of unfinished processes, which have ended; return whether there were any.

    The names of the files begin with ``prefix``.
    """
    paths = glob.glob(f"{glob.escape(prefix)}*")
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return bool(paths)


def add(folder: str, rank: int, host: str) -> None:
    """Report that a rank has ended with status 0."""
    with contextlib.suppress(OSError), open(os.path.join(folder, f"{PREFIX}{host}"), "a") as file:
        file.write(f"{rank}\n")


def forget(folder: str) -> None:
    """Remove the reports of ranks that have ended with status 0: all ranks start again."""
    for path in _files(folder):
        with contextlib.suppress(OSError):
            os.unlink(path)


def ended(folder: str) -> set[int]:
    """Return the ranks that have ended with status 0, as reported in ``folder``."""
    found: set[int] = set()
    for path in _files(folder):
        with contextlib.suppress(OSError), open(path) as file:
            found.update(int(line) for line in file if line.strip().isdigit())
    return found


def _files(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), f"{PREFIX}*")) if folder else []
