"""How the ranks of a launch end, where a launcher's exit status does not say it.

Whoever starts a rank (``rank_env.sh``, a guardian) reports its end into the folder WORDRUN_STATUS_DIR: of a rank that
has ended with status 0, the number, as a line of a file for all ranks of the host; of any other, the status and the
host, in a file with the rank's number as its name. Status 0 in such a file means that a process of wordrun had not
finished: such a process has a file of its own meanwhile, on its host, whose name begins with WORDRUN_UNFINISHED.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator

PREFIX = "ended-"
"""Begins the name of a file with the numbers of a host's ranks that have ended with status 0."""
UNFINISHED = "WORDRUN_UNFINISHED"


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """Within the ``with`` block, let an end of this process count as a failure for ``launch``, whatever its status."""
    path = f"{os.environ.get(UNFINISHED, '')}-{os.getpid()}"
    try:
        if os.path.isabs(path):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:  # another block has made it, or nobody can
        path = ""
    try:
        yield
    finally:
        if path.endswith(f"-{os.getpid()}"):  # not in a forked process
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def without_exit() -> Iterator[None]:
    """Within the ``with`` block, which calls code of others, let sys.exit(0) be an error.

    Raises:
        RuntimeError: it was called. The process would have ended as if it had finished.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise RuntimeError("sys.exit(0) before the end").with_traceback(error.__traceback__) from error.__cause__


def unfinished_prefix(launch_id: str, rank: int | str) -> str:
    """Return WORDRUN_UNFINISHED for a rank, or its beginning for all ranks of a host, as ``rank_env.sh`` does."""
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-{launch_id}-{rank}")


def take_unfinished(prefix: str) -> bool:
    """Remove the files of processes that have ended without having finished; return whether there were any.

    Their names begin with ``prefix``, and none of the processes runs any more.
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
