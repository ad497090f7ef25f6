"""The checkpoints of a run in a node's memory: one folder, shared by the node's ranks, in /dev/shm.

It survives the ranks, so that those of a relaunch find it. Each checkpoint is a folder with the manifest, the index and
the files of shards that this node holds; other nodes hold the rest. Nothing here needs torch or another rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from wordrun.checkpoint import checksums
from wordrun.checkpoint.folder import DamagedError, Folder, file_of, folder_name
from wordrun.common import cgroup, shm
from wordrun.common.errors import UserError
from wordrun.common.files import read_proc

NAME = re.compile(r"step-(\d{8,})-[0-9a-f]+-\d+")
SHARDS = re.compile(re.escape(file_of(0)).replace("00000", r"(\d{5,})"))
ABANDONED_S = 3600
"""Leftover checkpoints of other runs are removed this long [s] after the run's end."""


class NodeMemory:
    """The folder of the run in ``run_dir``. Each rank of the node opens it, and ``close`` leaves it as it is.

    Raises:
        UserError: it cannot be used.
    """

    def __init__(self, run_dir: Path) -> None:
        self.root, self.home = shm.root(), shm.home()
        self.path = self.home / f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}"
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
            if not shm.is_own(self.home):
                raise UserError(f"{self.home} belongs to another user")
            self._lock = shm.open_shared(self.path)
            there = self.path.stat()
        except OSError as error:
            raise UserError(f"cannot write to {error.filename or self.root}: {error.strerror}") from None
        boot = read_proc("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
        self.node = f"{boot}-{there.st_dev}-{there.st_ino}"
        """Identifies the node: the same on all ranks that share this folder."""

    def draft(self, name: str) -> Path:
        """Return the folder in which a checkpoint is written until ``publish``; it may exist."""
        path = self.path / f".{name}.new"
        path.mkdir(exist_ok=True)
        return path

    def publish(self, name: str) -> None:
        """Make the draft of ``name`` one of the checkpoints."""
        (self.path / f".{name}.new").rename(self.path / name)

    def discard(self, name: str) -> None:
        """Remove the checkpoint ``name``, or its draft."""
        for path in (self.path / f".{name}.new", self.path / name):
            shutil.rmtree(path, ignore_errors=True)

    def keep_only(self, name: str = "") -> None:
        """Remove all checkpoints except ``name``, and all drafts."""
        for entry in self.path.iterdir():
            if entry.name != name:
                shutil.rmtree(entry, ignore_errors=True)

    def remove(self) -> None:
        """Remove the run's folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock, so that others may remove the folder when it has been abandoned."""
        os.close(self._lock)

    def offers(self) -> dict[str, dict[str, Any]]:
        """Return which ranks' files this node has, by checkpoint, with what their manifests say of the run."""
        found = {}
        for path in self.path.iterdir():
            with contextlib.suppress(DamagedError, UserError, OSError):
                if match := NAME.fullmatch(path.name):
                    folder = Folder(path, int(match[1]))
                    manifest = folder.manifest()
                    if any(folder.problem(name, facts) for name, facts in manifest["files"].items()):
                        continue
                    found[path.name] = {
                        "step": manifest["step"],
                        "shards": manifest["shards"],
                        "run": manifest["run"],
                        "ranks": sorted(self.ranks(path.name)),
                    }
        return found

    def ranks(self, name: str) -> set[int]:
        """Return the ranks whose files the checkpoint ``name`` has here."""
        with contextlib.suppress(OSError):
            return {int(match[1]) for file in os.listdir(self.path / name) if (match := SHARDS.fullmatch(file))}
        return set()

    def verify(self, name: str, index: int, count: int) -> list[int]:
        """Remove damaged files of a checkpoint, and return their ranks; each of ``count`` ranks looks at some."""
        damaged = []
        for rank in sorted(self.ranks(name))[index::count]:
            file = self.path / name / file_of(rank)
            if checksums.problem(file):
                file.unlink(missing_ok=True)
                damaged.append(rank)
        return damaged

    def free(self) -> int:
        """Return the bytes that can still be written here."""
        return min(shutil.disk_usage(self.root).free, cgroup.memory() or 2**60)

    def room(self) -> int:
        """Return the bytes that the run's checkpoints can take here, including what they take already."""
        return self.free() + sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def clean(self, needed: int) -> None:
        """Remove unfinished checkpoints, and old leftovers of runs that have ended.

        If there is room for fewer bytes than ``needed``, all leftovers are removed, however old they are.
        """
        for draft in self.path.glob(".*"):
            shutil.rmtree(draft, ignore_errors=True)
        others = [path for path in self.home.iterdir() if path != self.path]
        for path in sorted(others, key=shm.last_change):
            if time.time() - shm.last_change(path) > ABANDONED_S or self.room() < needed:
                shm.remove_abandoned(path)


def name_of(step: int, launch: str, number: int) -> str:
    """Return the name of a checkpoint, which no other launch of the run uses, even after the same step."""
    return f"{folder_name(step)}-{launch}-{number}"
