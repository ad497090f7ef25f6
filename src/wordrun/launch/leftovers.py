"""Removes what killed launches and their ranks have left behind on this host.

Nothing is removed that is another user's, or whose owner may be alive. Two launches may do this at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from wordrun.common import owner, shm
from wordrun.common.files import read_json, read_proc
from wordrun.launch import processes

OWNER = "owner.json"
"""The file in a launch's folder that says which process is the launch."""
FOLDER = re.compile(r"\.?wordrun-launch-\d+-[0-9a-f]+")
UNFINISHED = re.compile(r"\.?wordrun-(?:launch-)?((\d+)-[0-9a-f]+)-\d+-\d+")
"""Files of processes that have not finished: ``exit_reports.unfinished``."""
OLD_S = 3600.0
"""MPI's shared memory [s] counts as left behind if no process has mapped it so long after it was created."""
ABANDONED_S = 86400.0
"""Checkpoints in memory [s]: for so long, a run that was killed may resume from them."""


def claim(folder: str) -> None:
    """Note in the folder of a launch that it is this process's."""
    with contextlib.suppress(OSError), open(os.path.join(folder, OWNER), "w") as file:
        json.dump(owner.this_process(), file)


def clear(folder: str, this: str = "") -> list[int]:
    """Remove the folders and files of dead launches in ``folder`` and in TMPDIR, and shared memory of their MPI.

    Returns:
        The process IDs of other launches that run on this host: of all folders but ``this``.
    """
    running = []
    for parent in {folder, os.environ.get("TMPDIR") or "/tmp"}:
        for entry in _own_entries(parent, "wordrun-"):
            if FOLDER.fullmatch(entry.name):
                launch = read_json(Path(entry.path, OWNER))
                if owner.is_dead(launch):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif owner.is_dead(launch) is False and entry.path != this:
                    running.append(int(launch["pid"]))
            elif (found := UNFINISHED.fullmatch(entry.name)) and owner.is_dead(read_json(Path(entry.path))):
                _remove_unless_watched(entry.path, found[1], int(found[2]))
    segments = [entry.path for entry in _own_entries("/dev/shm", "mpich_shm_") if _age(entry) > OLD_S]
    if segments and sys.platform == "linux":
        # Other users' processes have not mapped them, as they may not read them.
        maps = "".join(read_proc(f"/proc/{pid}/maps") for pid in filter(str.isdigit, os.listdir("/proc")))
        for path in segments:
            if path not in maps:
                _remove(path)
    return running


def clear_memory() -> None:
    """Remove old checkpoints in this host's memory, at the end of a launch: its own run may have resumed from one."""
    with contextlib.suppress(OSError):
        for path in shm.home().iterdir() if shm.is_own(shm.home()) else ():
            if time.time() - shm.last_change(path) > ABANDONED_S:
                shm.remove_abandoned(path)


def _own_entries(parent: str, prefix: str) -> Iterator[os.DirEntry[str]]:
    """Yield this user's entries of a folder whose names begin with ``prefix``, perhaps after a dot."""
    with contextlib.suppress(OSError):
        for entry in [each for each in os.scandir(parent) if each.name.lstrip(".").startswith(prefix)]:
            with contextlib.suppress(OSError):  # another launch has removed it
                if entry.stat(follow_symlinks=False).st_uid == os.getuid() and not entry.is_symlink():
                    yield entry


def _age(entry: os.DirEntry[str]) -> float:
    return time.time() - entry.stat(follow_symlinks=False).st_mtime


def _remove_unless_watched(path: str, launch_id: str, launch: int) -> None:
    """Remove the file of a process that died before it had finished, unless somebody is yet to report that."""
    if not processes.is_running(launch) and processes.of_launch(launch, launch_id, is_step=True) <= {launch}:
        _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
