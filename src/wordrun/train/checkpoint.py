"""A run's checkpoints are written while training goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from wordrun.backend.base import Save
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import Draft
from wordrun.checkpoint.shards import Group
from wordrun.config import Config
from wordrun.dist import World
from wordrun.errors import UserError
from wordrun.files import point
from wordrun.log import FIRST_RANK, LOGGER

FAILURES = (Exception, CheckpointException)  # the latter is none of the former
# A file system with fewer bytes left is taken for full: torch's writer does not say why it could not go on.
FULL = 2**20


class SaveError(UserError):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
    """Writes the checkpoints of one run, one after the other; every rank has one and makes the same calls."""

    def __init__(self, cfg: Config, world: World, tokenizer_json: str) -> None:
        self.run_dir, self.world = Path(cfg.run_dir).resolve(), world
        self.train, self.tokenizer_json = cfg.train, tokenizer_json
        self.written = -1
        """The step of the last checkpoint that is on the disk, or gone on from."""
        self._group: Group = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, copy: Callable[[], Save], manifest: Callable[[], dict[str, Any]], *, best: bool) -> None:
        """Make the checkpoint of ``step``, in the background where that is possible.

        Args:
            step: optimizer steps done.
            copy: takes a copy of the state of training.
            manifest: what the checkpoint says of itself, besides its files.
            best: whether it is the best one so far.

        Raises:
            SaveError: the one before could not be written, and train.on_save_error=stop.
        """
        self.wait()
        save = copy()
        facts = {**manifest(), "backend": save.facts}
        if self._group is None:  # of its own: two threads must not mingle their collectives
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.train.timeout_s))
        if save.in_background and self.train.async_save:
            # A daemon: a run that fails must not wait for ranks that no longer answer.
            self._thread = threading.Thread(
                target=self._write, args=(step, save, facts, best), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(step, save, facts, best)
            self.look()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        self.give_time(None)
        self.look()

    def give_time(self, seconds: float | None) -> None:
        """Wait at most ``seconds`` for the checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(seconds)

    def look(self) -> None:
        """Say so, or stop, if a checkpoint could not be written since the last look."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, SaveError):  # the ranks have lost each other, and would at the next save
            raise error
        if self.train.on_save_error == "stop":
            raise SaveError(f"{error}; train.on_save_error=continue would train on") from error
        LOGGER.warning("%s; training goes on, and the next save is tried as usual", error, extra=FIRST_RANK)

    def _write(self, step: int, save: Save, facts: dict[str, Any], best: bool) -> None:
        draft = Draft(self.run_dir, step)
        first = self.world.rank == 0
        try:
            self._together((lambda: draft.begin(self.tokenizer_json)) if first else None, draft)
            self._together(lambda: save.write(draft.path, self._group), draft)
            files: list[Any] = [None] * self.world.size if first else []
            mine: dict[str, Any] = {}
            self._together(lambda: mine.update(self._describe(draft.path)), draft)
            dist.gather_object(mine, files if first else None, group=self._group)
            self._together((lambda: self._publish(draft, facts, files, best)) if first else None, draft)
            self.written = step
        except FAILURES as error:
            self._error = error

    def _describe(self, folder: Path) -> dict[str, Any]:
        """Return sizes and checksums of this rank's files, and of its share of those that nobody signs."""
        rank, size = self.world.rank, self.world.size
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        signed = {name for name in files if name.startswith("__")}
        mine = [name for name in signed if name.startswith(f"__{rank}_")]
        mine += [name for i, name in enumerate(sorted(set(files) - signed)) if i % size == rank]
        return folders.describe(folder, mine)

    def _publish(self, draft: Draft, facts: dict[str, Any], files: list[dict[str, Any]], best: bool) -> None:
        folder = draft.publish({**facts, "files": {name: f for each in files for name, f in sorted(each.items())}})
        if best:
            point(folder.path.parent / "best", folder.path.name)
        folders.prune(self.run_dir, folder.step, self.train.keep_checkpoints)
        LOGGER.info("checkpoint after %d steps%s: %s", folder.step, " (best)" if best else "", folder.path.name)

    def _together(self, action: Callable[[], Any] | None, draft: Draft) -> None:
        """Do ``action`` on this rank, and raise on all of them what went wrong on one."""
        problem = None
        if action is not None:
            try:
                action()
            except FAILURES as error:
                # Who could not write is known to torch, which raises on every rank.
                failures = getattr(error, "failures", None) or {self.world.rank: (error, None)}
                rank, (cause, _) = next(iter(failures.items()))
                problem = f"rank {rank}: {_reason(cause, draft.path.parent)}"
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem, group=self._group)
        for each in problems:
            if each:
                if self.world.rank == 0:
                    with contextlib.suppress(OSError):
                        draft.discard()
                raise SaveError(
                    f"the checkpoint after {draft.step} steps could not be written ({each}); "
                    f"those before it in {draft.path.parent} are as they were"
                )


def _reason(error: BaseException, folder: Path) -> str:
    """Return what is behind an error in one line: torch wraps what the disk says, and may lose it."""
    with contextlib.suppress(OSError):
        if not isinstance(error, OSError) and shutil.disk_usage(folder).free < FULL:
            return f"no space is left on the disk of {folder}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
