"""The run directory: who, with what, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy
import torch

import wordrun
from wordrun import files
from wordrun.checkpoint import folder as folders
from wordrun.composer import as_yaml
from wordrun.config import Config
from wordrun.dist import World
from wordrun.errors import ConfigError
from wordrun.log import LOGGER
from wordrun.track import Kept, Tracker, build
from wordrun.track.jsonl import copy_until, finite, forget_steps, read
from wordrun.track.plots import draw

# A run that was killed a moment ago may still be on its way out when it is continued.
LOCK_PATIENCE_S = 30
LINK = ("start", "end", "exit_reason", "steps", "seconds", "world", "backend", "resumed_from")
"""What run.json keeps of each earlier part of a run that was continued."""


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int = 0
    source: Path | None = None
    """Run directory whose record up to ``step`` is this run's too; None: a fresh start."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """What the trackers need to go on."""
    named: str = ""
    """The checkpoint from which a branch begins."""
    known: int = -1
    """The step of the last checkpoint of that run when it was read."""


class Run:
    """What a run leaves behind. On rank 0 it writes; on the others the same calls do nothing."""

    def __init__(self, cfg: Config, world: World, facts: dict[str, Any], start: Start) -> None:
        self.path = Path(cfg.run_dir).resolve()
        self.trackers: list[Tracker] = []
        self.record: dict[str, Any] = {}
        self._lock: IO[str] | None = None
        if world.rank != 0:
            return
        if not cfg.run_dir:  # else it would be the current directory
            raise ConfigError("the config names no run directory: make it by wordrun.compose(...), or set cfg.run_dir")
        _make_directory(self.path, again=start.source is not None)
        self._lock = _lock(self.path, patience_s=LOCK_PATIENCE_S if start.source is not None else 0)
        newest = max((each.step for each in folders.all_in(self.path)), default=-1)
        if start.source == self.path and newest > start.known:
            self._lock.close()
            raise ConfigError(
                f"the run in {self.path} has gone on to step {newest} while this one was waiting for its end: "
                "start this one again"
            )
        before = read_record(self.path)
        kept = Kept()
        if start.source is not None:
            seen = copy_until(start.source, self.path, start.step)
            # A branch is a run of its own for the trackers, which are told what came before.
            if start.source == self.path:
                kept = Kept(start.trackers, seen)
                forget_steps(self.path / "log.txt", start.step)
        (self.path / "config.yaml").write_text(as_yaml(cfg), encoding="utf-8")
        _adopt_launch_record(self.path)
        _point_latest_at(self.path)
        self.record = {
            "versions": versions(), "git_commit": git_commit(), "start": _now(), "world": asdict(world),
            **facts, "exit_reason": "running",
        }  # fmt: skip
        if start.source is not None:
            links = before.pop("earlier", [])
            origin = {"run": str(start.source), "step": start.step}
            # What train.resume named when this run began: a branch that is begun again goes on instead.
            named = before.get("resumed_from", {}).get("named") if start.source == self.path else start.named
            self.record |= {"resumed_from": {**origin, **({"named": named} if named else {})}}
            self.record["earlier"] = [*links, {name: before.get(name) for name in LINK if name in before}]
        self._write_record()
        try:
            self.trackers = build(cfg, self.path, facts, kept)
            if start.source not in (None, self.path):
                for line in read(self.path):
                    for tracker in self.trackers[1:]:
                        tracker.log(line)
        except Exception as error:
            self.finish({}, f"{type(error).__name__}: {error}")
            raise

    def log(self, metrics: dict[str, Any]) -> None:
        """Hand a line of metrics to the trackers."""
        for tracker in self.trackers:
            tracker.log(metrics)

    def sample(self, step: int, text: str) -> None:
        """Hand a generated text to the trackers."""
        for tracker in self.trackers:
            tracker.sample(step, text)

    def rewind(self, step: int) -> None:
        """Go back to ``step`` in all records: the steps after it will be taken again."""
        if self.trackers:
            seen = max((line["step"] for line in read(self.path)), default=-1)
            for tracker in self.trackers:
                tracker.rewind(step, seen)

    def tracker_states(self) -> dict[str, Any]:
        """Return what the trackers need to be continued."""
        return {name: state for tracker in self.trackers for name, state in tracker.state().items()}

    def note_failure(self, rank: int, step: int, report: str) -> None:
        """Keep what went wrong on a rank, in a file of its own: that rank may be the only one to know."""
        with contextlib.suppress(OSError):
            folder = self.path / "failures"
            folder.mkdir(exist_ok=True)
            host = socket.gethostname()
            text = f"rank {rank} on {host}, after {step} steps, {_now()}\n{report}"
            (folder / f"rank-{rank}.txt").write_text(text, encoding="utf-8")

    def finish(self, summary: dict[str, Any], exit_reason: str) -> list[Path]:
        """Write how the run ended, close the trackers, draw the plots; return the plots' files."""
        if not self.record:
            return []
        try:
            self.record |= {**summary, "exit_reason": exit_reason, "end": _now()}
            self._write_record()
            for tracker in self.trackers:
                tracker.finish(summary, exit_status=0 if exit_reason == "finished" else 1)
            return draw(self.path, f"{self.path.parent.name}  {self.path.name}") if self.trackers else []
        finally:
            if self._lock is not None:
                self._lock.close()

    def _write_record(self) -> None:
        text = json.dumps(finite(self.record), indent=2, default=str)
        files.replace(self.path / "run.json", f"{text}\n")


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "wordrun": wordrun.__version__, "python": platform.python_version(), "torch": str(torch.__version__),
        "numpy": numpy.__version__, "platform": platform.platform(),
    }  # fmt: skip


def git_commit() -> str | None:
    """Return the commit that this code was checked out from, with ``-dirty`` if it was changed since."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # An installed wheel may lie in an environment inside somebody's repository, which is none of this code's.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        answer = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_directory(path: Path, *, again: bool) -> None:
    if not again and (path / "run.json").exists():
        raise ConfigError(
            f"hydra.run.dir={path} holds a run already: continue it by train.resume=auto, choose another directory, "
            "or remove it"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {path}: {error.strerror}. Choose another by hydra.run.dir=DIR"
        ) from None


def _lock(path: Path, patience_s: float) -> IO[str]:
    """Keep others out of a run directory as long as the returned file is open, and this process lives."""
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
            LOGGER.warning("%s cannot be locked (%s): see to it that no other run uses it", path, error.strerror)
            return (path / ".lock").open("a", encoding="utf-8")
        raise ConfigError(
            f"the run directory {path} is in use by {holder}: wait for its end, or choose another by hydra.run.dir=DIR"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n")
    file.flush()
    return file


def read_record(path: Path) -> dict[str, Any]:
    """Return the run.json of the run so far, as far as there is one."""
    try:
        record: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def _adopt_launch_record(path: Path) -> None:
    """Move launch.json from where ``launch`` put it into the run directory; ``launch`` follows the link at the end."""
    record = Path(os.environ.get("WORDRUN_LAUNCH_RECORD", ""))
    if not record.is_file() or record.is_symlink():
        return
    try:
        if (path / "launch.json").exists():  # of the launch that this one continues
            number = 1 + len(list(path.glob("launch-*.json")))
            (path / "launch.json").rename(path / f"launch-{number}.json")
        shutil.move(record, path / "launch.json")
        record.symlink_to(path / "launch.json")
    except OSError as error:
        LOGGER.warning("launch.json stays at %s: %s", record, error)


def _point_latest_at(path: Path) -> None:
    """Make outputs/latest a link to the newest run below outputs/."""
    outputs = Path("outputs").absolute()
    if outputs not in path.parents:
        return
    try:
        files.point(outputs / "latest", os.path.relpath(path, outputs))
    except OSError as error:
        LOGGER.warning("cannot point %s at this run: %s", outputs / "latest", error)
