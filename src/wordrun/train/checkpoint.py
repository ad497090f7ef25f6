"""A run's checkpoints: written while training goes on, and read back when it is continued."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wordrun.backend.base import Save
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import DamagedError, Draft, Folder
from wordrun.checkpoint.pieces import Group
from wordrun.config import Config, to_plain
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError
from wordrun.log import LOGGER

FREE = {
    "model": {"name", "batch_size"},
    "data": {"path", "url", "offline"},
    "optimizer": {"gas"},
    "train": {
        "backend", "max_iters", "global_batch_size", "eval_interval", "eval_iters", "log_interval", "sample_interval",
        "sample_tokens", "sample_prompt", "temperature", "top_k", "compile", "activation_checkpointing", "device",
        "timeout_s", "checkpoint_interval", "keep_checkpoints", "save_best", "async_save", "on_save_error",
        "on_nonfinite", "resume", "init_from",
    },
    "backend": None, "tracker": None, "profiler": None,
}  # fmt: skip
"""Options that may change when a run is continued (None: all of a section): steps, intervals, layout, outputs."""


class SaveError(UserError):
    """A checkpoint could not be written; those before it are as they were."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run goes on."""

    folder: Folder
    manifest: dict[str, Any]
    run_dir: Path
    """Of the run that wrote it."""


class Checkpoints:
    """Writes the checkpoints of one run, one after the other; every rank has one and makes the same calls."""

    def __init__(self, cfg: Config, world: World, tokenizer_json: str) -> None:
        self.run_dir, self.world = Path(cfg.run_dir).absolute(), world
        self.train, self.tokenizer_json = cfg.train, tokenizer_json
        self._group: Group = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

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
        if self._thread is not None:
            self._thread.join()
        self.look()

    def look(self) -> None:
        """Say so, or stop, if a checkpoint could not be written since the last look."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        if self.train.on_save_error == "stop":
            raise SaveError(f"{error}; train.on_save_error=continue would train on") from error
        if self.world.rank == 0:
            LOGGER.warning("%s; training goes on, and the next save is tried as usual", error)

    def _write(self, step: int, save: Save, facts: dict[str, Any], best: bool) -> None:
        draft = Draft(self.run_dir, step)
        first = self.world.rank == 0
        try:
            self._together(draft.begin if first else None, draft)
            self._together(lambda: save.write(draft.path, self._group), draft)
            files: list[Any] = [None] * self.world.size if first else []
            mine: dict[str, Any] = {}
            self._together(lambda: mine.update(self._describe(draft.path)), draft)
            dist.gather_object(mine, files if first else None, group=self._group)
            self._together((lambda: self._publish(draft, facts, files, best)) if first else None, draft)
        except Exception as error:
            self._error = error

    def _describe(self, folder: Path) -> dict[str, Any]:
        """Return sizes and checksums of this rank's files, and of its share of those that nobody signs."""
        rank, size = self.world.rank, self.world.size
        if rank == 0:
            folders.write_text(folder / folders.TOKENIZER, self.tokenizer_json)
        dist.barrier(group=self._group)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        signed = {name for name in files if name.startswith("__")}
        mine = [name for name in signed if name.startswith(f"__{rank}_")]
        mine += [name for i, name in enumerate(sorted(set(files) - signed)) if i % size == rank]
        return folders.describe(folder, mine)

    def _publish(self, draft: Draft, facts: dict[str, Any], files: list[dict[str, Any]], best: bool) -> None:
        folder = draft.publish({**facts, "files": {name: f for each in files for name, f in sorted(each.items())}})
        if best:
            folders.point(folder.path.parent / "best", folder.path)
        folders.prune(self.run_dir, self.train.keep_checkpoints)
        LOGGER.info("checkpoint after %d steps%s: %s", folder.step, " (best)" if best else "", folder.path.name)

    def _together(self, action: Callable[[], Any] | None, draft: Draft) -> None:
        """Do ``action`` on this rank, and raise on all of them what went wrong on one."""
        problem = ""
        if action is not None:
            try:
                action()
            except Exception as error:
                problem = _reason(error)
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem, group=self._group)
        for rank, each in enumerate(problems):
            if each:
                if self.world.rank == 0:
                    with contextlib.suppress(OSError):
                        draft.discard()
                raise SaveError(
                    f"the checkpoint after {draft.step} steps could not be written (rank {rank}: {each}); "
                    f"those before it in {draft.path.parent} are as they were"
                )


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line: torch wraps what the disk says several times."""
    if isinstance(error, SaveError):
        return str(error)
    failures = getattr(error, "failures", None)  # CheckpointException: rank to (exception, traceback)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def candidates(cfg: Config, requested: bool) -> tuple[Path, list[Folder]] | None:
    """Return the run to continue and its checkpoints that may be meant, the oldest first; None: a fresh start.

    Args:
        cfg: the config.
        requested: whether a scheduler or ``launch`` has begun this run anew, which makes train.resume=auto the default.

    Raises:
        UserError: train.resume names no checkpoint, or one that is not the newest of the run that it would continue.
    """
    wish = cfg.train.resume or ("auto" if requested else None)
    if wish is None:
        return None
    here = Path(cfg.run_dir).absolute()
    if wish == "auto":
        found = folders.all_in(here)
        return (here, found) if found else None
    run_dir, found = folders.locate(Path(wish))
    newest = folders.all_in(run_dir)[-1:]
    if run_dir == here and newest and newest[0].step > found[-1].step:
        raise ConfigError(
            f"train.resume={wish} is after {found[-1].step} steps, but the run has come to {newest[0].step}: add "
            f"hydra.run.dir=DIR to branch off there, or remove the later checkpoints"
        )
    return run_dir, found


def open_newest(found: list[Folder], world: World) -> Resumed:
    """Return the newest of the checkpoints ``found`` that is whole; all ranks check the files together.

    Raises:
        DamagedError: none is.
    """
    problem = ""
    for folder in reversed(found):
        manifest: dict[str, Any] = {}
        with _caught() as caught:
            manifest = folder.check_sizes()
        problems = [str(caught[0])] if caught else [""]
        if not caught:
            names = sorted(manifest["files"])[world.rank :: world.size]
            problems = [folder.check_content(names, manifest)]
        gathered: list[Any] = [None] * world.size
        dist.all_gather_object(gathered, problems[0])
        problem = next((each for each in gathered if each), "")
        if not problem:
            return Resumed(folder, manifest, folder.path.parent.parent)
        if world.rank == 0:
            LOGGER.warning("%s%s", problem, "; taking the one before it" if folder is not found[0] else "")
    raise DamagedError(f"{problem}: no checkpoint of this run is whole; start anew in another hydra.run.dir=DIR")


@contextlib.contextmanager
def _caught() -> Iterator[list[DamagedError]]:
    caught: list[DamagedError] = []
    try:
        yield caught
    except DamagedError as error:
        caught.append(error)


def fixed(cfg: Config) -> dict[str, Any]:
    """Return the options that a continued run must share with its checkpoint, by their names."""
    return {
        f"{section}.{name}": value
        for section, values in to_plain(cfg).items()
        if FREE.get(section, set()) is not None
        for name, value in values.items()
        if name not in (FREE.get(section) or set())
    }


def config_hash(cfg: Config) -> str:
    """Return a hash of the options that a continued run must share."""
    return hashlib.sha256(json.dumps(fixed(cfg), sort_keys=True).encode()).hexdigest()[:16]


def check_same(cfg: Config, facts: Mapping[str, Any], resumed: Resumed) -> None:
    """Refuse to continue a run with options that contradict its checkpoint.

    Args:
        cfg: the options.
        facts: what else has to be the same, by the names that people know it by.
        resumed: the checkpoint.

    Raises:
        ConfigError: names each option with both values.
    """
    theirs = {**resumed.manifest["fixed"], **resumed.manifest["facts"]}
    # An option that has come since then has its default in both.
    different = [
        f"  {name} is {theirs[name]} in the checkpoint and {value} here"
        for name, value in {**fixed(cfg), **facts}.items()
        if name in theirs and theirs[name] != value
    ]
    if different:
        raise ConfigError(
            "\n".join([
                f"the options contradict the checkpoint {resumed.folder.path}:", *different,
                f"use the checkpoint's, or its weights alone: train.init_from={resumed.folder.path}",
            ])
        )  # fmt: skip
