"""Writes the checkpoints of a run, in the background while training continues."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wordrun.backend.base import Save
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import Draft, Folder
from wordrun.common.errors import UserError, first_line
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.common.run_dir import CHECKPOINTS, gone
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.coordination import Agreement
from wordrun.train.options import TrainConfig

# Beginning of messages about a disk's errors, the operating system's and wordrun's.
OF_DISKS = re.compile(r"rank \d+: (\[Errno \d+\]|no space left)")
# A file system with fewer bytes left counts as full: not every writer reports why it failed.
FULL = 2**20


class SaveError(UserError):
    """A checkpoint could not be written; earlier ones are intact."""

    page = "checkpoints.md#when-checkpoints-are-written"


class BackgroundSaves:
    """Saves in another thread, one at a time, and reports failures in the main thread.

    Args:
        train: the options.
        world: the ranks, each of which has one and makes the same calls.
    """

    def __init__(self, train: TrainConfig, world: World) -> None:
        self.train, self.world = train, world
        self._last = False
        self._agreement = Agreement(world, train.timeout_s)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _start(self, name: str, write: Callable[..., None], *args: Any) -> None:
        # A daemon: a failing run must not wait for ranks that no longer respond.
        self._thread = threading.Thread(target=write, args=args, name=name, daemon=True)
        self._thread.start()

    def join(self, seconds: float | None) -> None:
        """Wait at most ``seconds`` (None: no limit) for the checkpoint being written."""
        if self._thread is not None:
            self._thread.join(seconds)

    def raise_failure(self) -> None:
        """Warn, or raise SaveError, if a checkpoint could not be written since the last call."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, SaveError):  # the ranks have lost contact, and the next save would fail as well
            raise error
        if self.train.on_save_error == "stop":
            raise SaveError(f"{error}; to continue without it, use train.on_save_error=continue") from error
        self._warn(error)

    def _warn(self, error: SaveError) -> None:
        if self._last:
            LOGGER.error("%s", error, extra=FIRST_RANK)
        else:
            text = "%s; training continues, and later checkpoints will still be attempted"
            LOGGER.warning(text, error, extra=FIRST_RANK)


class Checkpoints(BackgroundSaves):
    """Writes the checkpoints of one run, one at a time; every rank has one and makes the same calls.

    Args:
        cfg: the config.
        world: the ranks.
        tokenizer_json: the tokenizer, which each checkpoint contains; None: there is none.
        written: the step of the checkpoint in this run directory from which the run was resumed; -1: none.
    """

    def __init__(self, cfg: Config, world: World, tokenizer_json: str | None, written: int = -1) -> None:
        super().__init__(cfg.train, world)
        self.run_dir, self.tokenizer_json = Path(cfg.run_dir).resolve(), tokenizer_json
        self.written = written
        """The step of the newest checkpoint on disk."""
        self.problem = ""
        """Why the last checkpoint could not be written; empty: it was written."""
        self._said = set[str]()
        """Problems in tidying up after complete checkpoints that have been logged already."""

    def save(self, step: int, save: Save, manifest: dict[str, Any], *, best: bool, last: bool) -> None:
        """Write the checkpoint of ``step``, in the background where possible; ``wait`` for the previous one first.

        Args:
            step: optimizer steps so far.
            save: a copy of the training state.
            manifest: what the manifest contains besides the files.
            best: whether it is the best one so far.
            last: whether the run is about to end, so that no later checkpoint will be attempted.

        Raises:
            SaveError: writing failed in the foreground, and train.on_save_error=stop.
        """
        self._last = last
        facts = {**manifest, "backend": save.facts}
        if save.in_background and self.train.async_save:
            self._start("checkpoint", self._write, step, save, facts, best)
        else:
            self._write(step, save, facts, best)
            self.raise_failure()

    def wait(self) -> int:
        """Wait for the checkpoint being written; return the step of the newest one on disk."""
        self.join(None)
        self.raise_failure()
        return self.written

    def _write(self, step: int, save: Save, facts: dict[str, Any], best: bool) -> None:
        draft = Draft(self.run_dir, step)
        first = self.world.rank == 0
        try:
            self._together((lambda: draft.begin(self.tokenizer_json)) if first else None, draft)
            self._together(lambda: save.write(draft.path), draft)
            # Shards contain their own checksums.
            others = [] if save.shards else self._together(lambda: self._describe(draft.path), draft)
            self._together((lambda: self._publish(draft, save, facts, others)) if first else None, draft)
            self.written, self.problem = step, ""
            if first:
                self._tidy(step, best)
        except Exception as error:
            self._error = error

    def _describe(self, folder: Path) -> dict[str, Any]:
        """Return sizes and checksums of files that an engine has written; the ranks divide the files."""
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return folders.describe(folder, files[self.world.rank :: self.world.size])

    def _publish(self, draft: Draft, save: Save, facts: dict[str, Any], others: list[Any]) -> None:
        added = save.finish(draft.path)
        if save.shards and self.tokenizer_json is not None:
            added.append(folders.TOKENIZER)
        files = [*others, folders.describe(draft.path, added)]
        listed = {name: file for each in files for name, file in sorted(each.items())}
        draft.publish({**facts, "files": listed, "shards": save.shards})

    def _tidy(self, step: int, best: bool) -> None:
        """Update the links and remove earlier checkpoints; the one of ``step`` is complete, whatever happens here."""
        name = folders.folder_name(step)
        newest = Folder(self.run_dir / CHECKPOINTS / name, step)
        problems = folders.tidy(newest, self.train.keep_checkpoints, best=best)
        with contextlib.suppress(OSError):  # log.txt cannot be written: the main thread's next line says so
            for problem in problems:
                if problem not in self._said:
                    LOGGER.warning("the checkpoint of step %d is complete, but: %s", step, problem)
            LOGGER.info("checkpoint at step %d%s: %s", step, " (best)" if best else "", name)
        self._said.update(problems)

    def _together(self, action: Callable[[], Any] | None, draft: Draft) -> list[Any]:
        """Run ``action``, and raise on all ranks if it fails on one; return, on rank 0, the results of all."""
        result, problem = None, ""
        if action is not None:
            try:
                result = action()
            except Exception as error:
                problem = f"rank {self.world.rank}: {reason(error, draft.path.parent)}"
        problem, results = self._agreement.meet(problem, result)
        if problem:
            self.problem = problem
            if self.world.rank == 0:
                with contextlib.suppress(OSError):
                    draft.discard()
            if lost := gone(self.run_dir):  # no later one can be written either
                raise UserError(lost)
            raise SaveError(
                f"the checkpoint of step {draft.step} could not be written ({problem}); "
                f"earlier ones in {draft.path.parent} are intact"
            )
        return results


def reason(error: BaseException, folder: Path) -> str:
    """Return the cause of an error in one line: some libraries lose the operating system's error."""
    with contextlib.suppress(OSError):
        if not isinstance(error, OSError) and shutil.disk_usage(folder).free < FULL:
            return f"no space left on the disk of {folder}"
    return first_line(error, 300)
