"""Requests for the stacks of a job's ranks: files in a folder through which ranks and ``launch`` ask each other."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from wordrun.common.files import read_json

REQUEST = "asked.json"
# A request older than this [s] is a leftover of ranks that have died.
STALE_S = 120.0


def folder_of(record: str) -> Path:
    """Return where the ranks of a launch with this ``launch.json`` report: in the run directory, if they have one."""
    if os.path.islink(record):  # a run has moved it into its directory
        return Path(os.path.realpath(record)).parent / "failures"
    return Path(record.removesuffix(".json") + ".failures")


def request(folder: Path, seconds: float = 0.0) -> str:
    """Ask the ranks that watch ``folder`` where they are; return the name of the request, or of an existing one.

    Args:
        folder: is created if it does not exist.
        seconds: for how long there has been no progress; 0: the question is not about a hang.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / REQUEST
    if asked := read_json(path):
        if time.time() - path.stat().st_mtime < STALE_S:
            return str(asked["id"])
        withdraw(folder, asked["id"])
    name = f"answers-{time.time_ns():x}-{os.getpid()}"
    (folder / name).mkdir(parents=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"id": name, "seconds": seconds}))
    except FileExistsError:  # another one was first
        (folder / name).rmdir()
        return str(read_json(path).get("id", ""))
    return name


def withdraw(folder: Path, name: str) -> None:
    """Remove a request and its answers."""
    (folder / REQUEST).unlink(missing_ok=True)
    shutil.rmtree(folder / name, ignore_errors=True)
