"""A run directory: created, locked, and linked to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

from wordrun import files
from wordrun.errors import ConfigError
from wordrun.log import LOGGER


def now() -> str:
    """Return the time for people to read."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def make(path: Path, *, again: bool) -> None:
    if not again and (path / "run.json").exists():
        raise ConfigError(
            f"hydra.run.dir={path} already contains a run: resume it with train.resume=auto, choose another directory, "
            "or remove it"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {path}: {error.strerror}. Choose another with hydra.run.dir=DIR"
        ) from None


def lock(path: Path, patience_s: float) -> IO[str]:
    """Lock a run directory until the returned file is closed or this process ends."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        for _ in range(int(patience_s)):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(1)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
            LOGGER.warning("cannot lock %s (%s): make sure that no other run uses it", path, error.strerror)
            return (path / ".lock").open("a", encoding="utf-8")
        raise ConfigError(
            f"the run directory {path} is in use by {holder}: wait for it to end, or choose another with "
            "hydra.run.dir=DIR"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    file.flush()
    return file


def read_record(path: Path) -> dict[str, Any]:
    """Return the run.json of a run directory; empty: there is none."""
    try:
        record: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def adopt_launch_record(path: Path) -> None:
    """Move launch.json into the run directory, and leave a link through which ``launch`` completes it at the end."""
    record = Path(os.environ.get("WORDRUN_LAUNCH_RECORD", ""))
    if not record.is_file() or record.is_symlink():
        return
    try:
        if (path / "launch.json").exists():  # of the launch before
            number = 1 + len(list(path.glob("launch-*.json")))
            (path / "launch.json").rename(path / f"launch-{number}.json")
        shutil.move(record, path / "launch.json")
        record.symlink_to(path / "launch.json")
    except OSError as error:
        LOGGER.warning("could not move launch.json from %s: %s", record, error)


def point_latest_at(path: Path) -> None:
    """Point outputs/latest at this run, if it is below outputs/."""
    outputs = Path("outputs").absolute()
    if outputs not in path.parents:
        return
    try:
        files.point(outputs / "latest", os.path.relpath(path, outputs))
    except OSError as error:
        LOGGER.warning("cannot update the link %s: %s", outputs / "latest", error)
