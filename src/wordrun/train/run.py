"""The run directory: its record of what ran, with which versions, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import Folder
from wordrun.common import files
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.log import LOGGER
from wordrun.common.run_dir import METRICS, RECORD, gone, has_run
from wordrun.common.validation import higher_is_better
from wordrun.config.compose import as_yaml
from wordrun.config.schema import Config
from wordrun.dist import World, broadcast
from wordrun.dist.collectives import first_text
from wordrun.track.base import RunInfo, Tracker, build
from wordrun.track.jsonl import copy_until, finite, forget_steps
from wordrun.track.metrics_jsonl import between, read
from wordrun.track.report import page
from wordrun.track.run_json import TYPES, read as read_record, typed
from wordrun.train.provenance import commits, versions
from wordrun.train.recoveries import Recoveries

# A run that was killed a moment ago may still be exiting when it is resumed.
LOCK_PATIENCE_S = 30
# A network file system may show a new file to other hosts late.
SEEN_S = 5
LINK = ("start", "end", "exit_reason", "steps", "seconds", "world", "backend", "resumed_from")
"""The entries that run.json keeps of each earlier launch of a resumed run."""
CHECKPOINTED = (*LINK, "earlier", "recoveries")
"""The entries of run.json that checkpoints contain, so that a run can be resumed without it."""
FILES = (RECORD, "config.yaml", METRICS, "samples.txt", "log.txt")
"""Files that a resumed run reads or continues."""
FOLDERS = ("plots", "failures", "profile", "tensorboard", "wandb")
"""Folders that a resumed run continues."""


class Elsewhere(Protocol):
    """A checkpoint of which this node may lack files. All ranks must make the same calls."""

    where: str
    """Where the checkpoint is kept, for messages, such as "memory"."""
    name: str
    """Name of the checkpoint there."""

    def fetch(self, files: Iterable[str]) -> None:
        """Bring the ``files``, which this rank needs, to its node, unless it has them.

        Raises:
            LostError: a node cannot get a file.
        """

    def release(self) -> None:
        """Remove what ``fetch`` has brought, once all ranks have read it."""


@dataclass(frozen=True)
class Start:
    """Where a run starts: at step 0, or at a checkpoint of its own or of another run."""

    source: Path | None = None
    """The run directory whose record up to ``step`` this run continues; None: it is a new run."""
    folder: Folder | None = None
    """The checkpoint from which the run resumes; None: start at step 0."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """The manifest of that checkpoint."""
    newest: int = -1
    """The step of the newest checkpoint of the run in ``source`` on disk, intact or not."""
    elsewhere: Elsewhere | None = None
    """Brings the files of the checkpoint in ``folder``; None: they are on disk."""
    why: str = ""
    """Why the run does not start from a newer checkpoint that a hook may have kept; empty: there is no such hook."""

    @property
    def step(self) -> int:
        """Optimizer steps before the start."""
        return int(self.manifest.get("step", 0))


class Run:
    """The record of a run in its directory. On rank 0 it writes; on other ranks the same calls do nothing."""

    def __init__(self, cfg: Config, world: World) -> None:
        self.cfg, self.world = cfg, world
        self.path = Path(cfg.run_dir).resolve()
        self.trackers: dict[str, Tracker] = {}
        """The trackers that record; one that fails is removed."""
        self._states: dict[str, Any] = {}
        """The last state of each tracker."""
        self.record: dict[str, Any] = {}
        """Contents of run.json."""
        self._lock: IO[str] | None = None
        self._recoveries: Recoveries | None = None

    def open(self, facts: dict[str, Any], start: Start) -> None:
        """Create the run directory, or take over an existing one to continue from ``start``.

        Args:
            facts: description of the run besides its config.
            start: where the run starts.

        Raises:
            ConfigError: the directory is not writable, contains another run, is in use, or is not seen by all hosts.
        """
        if self.world.rank != 0:
            self._require_shared()
            return
        if not self.cfg.run_dir:  # else it would be the current directory
            raise ConfigError("the config has no run directory: create it with wordrun.compose, or set cfg.run_dir")
        is_new, continues = start.source is None, start.source == self.path
        _make_folder(self.path, again=not is_new)
        self._lock = _lock_folder(self.path, patience_s=0 if is_new else LOCK_PATIENCE_S)
        self._require_shared()
        newest = max((each.step for each in folders.all_in(self.path)), default=-1)
        if continues and newest > start.newest:
            self._lock.close()
            raise ConfigError(
                f"the run in {self.path} has advanced to step {newest} while this one waited for it to end: "
                "run the command again"
            )
        before = self._before(start.step) if continues else {}
        lines = typed(start.manifest.get("trackers"), {"jsonl": {"lines": int}}).get("jsonl", {}).get("lines", 0)
        logged = copy_until(start.source, self.path, start.step, lines) if start.source else -1
        if continues:
            forget_steps(self.path / "log.txt", start.step)
        files.replace(self.path / "config.yaml", as_yaml(self.cfg))
        _adopt_launch_record(self.path)
        _point_latest_at(self.path)
        self.record = {
            "versions": versions(),
            **commits(),
            "start": now(),
            "world": asdict(self.world),
            **facts,
            **_compared_by(self.cfg),
            "exit_reason": "running",
        }
        if start.source is not None:
            # Starting a branch again, with the same train.resume, continues it.
            branch = str(start.folder.path) if start.folder else ""
            named = before.get("resumed_from", {}).get("named") if continues else branch
            origin = {"run": str(start.source), "step": start.step, **({"named": named} if named else {})}
            kept = start.elsewhere
            origin |= {"source": kept.where, kept.where: kept.name} if kept else {"source": "disk"}
            link = {name: before[name] for name in LINK if name in before}
            self.record |= {"resumed_from": origin, "earlier": [*before.get("earlier", []), link]}
        source = self.record.get("resumed_from", {}).get("source")
        self._recoveries = Recoveries(before.get("recoveries", []) if continues else [], start.step, source)
        self.record |= {"recoveries": self._recoveries.all} if self._recoveries.all else {}
        self._write_record()
        try:
            # For trackers, a branch is a run of its own, which begins with the history of its origin.
            info = RunInfo(self.cfg, self.path, facts, logged if continues else -1, start.step)
            self._states = dict(start.manifest.get("trackers", {})) if continues else {}
            for name, tracker in build(info, self._states):
                self.trackers[name] = tracker  # one by one, because ``finish`` closes them if the next one fails
            if start.source is not None and not continues:
                for tracker in self.trackers.values():
                    tracker.replay(between(self.path, -1, start.step))
        except Exception as error:
            self.finish({}, f"{type(error).__name__}: {error}")
            raise

    def _require_shared(self) -> None:
        """Check that a file of rank 0 in the run directory is seen by each host; every rank must call this.

        Raises:
            ConfigError: a host does not see the file, on all ranks.
        """
        world = self.world
        if world.nodes == 1:
            return
        file = self.path / f".shared-{secrets.token_hex(8)}"  # a new name: no file system has cached its absence
        if world.rank == 0:
            file.touch()
        file, place = broadcast((file, world.host), world)
        problem = ""
        if world.local_rank == 0 and not _appears(file):
            problem = (
                f"the run directory {file.parent}, which rank 0 has created on {place}, is not seen by {world.host} "
                f"(rank {world.rank}): choose a directory that all hosts share with hydra.run.dir=DIR"
            )
        _, problem = first_text(problem, world.device)
        if world.rank == 0:
            file.unlink(missing_ok=True)
        if problem:
            if self._lock:
                self._lock.close()
            raise ConfigError(problem)

    def _before(self, step: int) -> dict[str, Any]:
        """Return what is recorded of the run so far; a run.json that cannot be read is set aside."""
        file, before = self.path / RECORD, recorded(self.path)
        if not read_record(self.path):
            was = f"cannot be read, and is now {files.set_aside(file).name}" if os.path.lexists(file) else "is missing"
            rest = f"its record of earlier launches is restored from the checkpoint of step {step}"
            LOGGER.warning("%s %s: %s", file, was, rest if before else "its record of earlier launches is lost")
        return before

    def checkpointed(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of run.json."""
        return {name: self.record[name] for name in CHECKPOINTED if name in self.record}

    def require_folder(self) -> None:
        """Check that the run directory is still there.

        Raises:
            UserError: it was removed, or cannot be reached.
        """
        if self.record and (lost := gone(self.path)):
            raise UserError(lost)

    def step_done(self) -> None:
        """Note that a step was taken; the first one after a fault completes the fault's entry in run.json."""
        if self._recoveries and self._recoveries.complete():
            self._write_record()

    def log(self, metrics: dict[str, Any]) -> None:
        """Pass a line of metrics with its ``step`` to the trackers: numbers, also as tensors of one element.

        Raises:
            TypeError: a metric is not a number.
        """
        self.require_folder()
        if self.trackers:
            metrics = {name: _number(name, value) for name, value in metrics.items()}
        self._each("log", metrics)

    def log_lists(self, metrics: dict[str, Any]) -> None:
        """Add a line of metrics that are lists of numbers, with its ``step``, to metrics.jsonl alone."""
        self._each("log_lists", metrics)

    def sample(self, step: int, text: str) -> None:
        """Pass a generated text to the trackers."""
        self._each("sample", step, text)

    def note(self, **facts: Any) -> None:
        """Add ``facts`` to run.json."""
        if self.record:
            self.record |= facts
            self._write_record()

    def rewind(self, step: int) -> None:
        """Return to ``step`` in all records: later steps will be repeated."""
        if self.trackers:
            logged = int(read(self.path).last_step)
            self._each("rewind", step, logged)

    def tracker_states(self) -> dict[str, Any]:
        """Return what the trackers need to continue when the run is resumed, by name."""
        self._states |= {name: state for name, state in self._each("state").items() if state}
        return self._states

    def _each(self, method: str, *values: Any) -> dict[str, Any]:
        """Call a ``method`` of each tracker and return the results by name.

        A tracker that fails is removed, so that the run continues, except for metrics.jsonl: resuming needs it.
        """
        results = {}
        for name, tracker in list(self.trackers.items()):
            try:
                results[name] = getattr(tracker, method)(*values)
            except Exception as error:
                if name == "jsonl":
                    raise
                where = traceback.extract_tb(error.__traceback__)[:2][-1]  # the tracker's own line
                LOGGER.warning(
                    "tracker=%s failed (%s: %s, in %s:%d): the run continues without it; metrics.jsonl has all metrics",
                    name,
                    type(error).__name__,
                    first_line(error),
                    Path(where.filename).name,
                    where.lineno,
                )
                del self.trackers[name]
                with contextlib.suppress(Exception):
                    tracker.abandon()
        return results

    def finish(self, summary: dict[str, Any], error: str = "") -> list[Path]:
        """Record how the run ended, close the trackers, draw the plots and write the report; return these files.

        Args:
            summary: the result.
            error: why the run ended early; empty: it is finished.
        """
        if not self.record:
            return []
        try:
            if lost := gone(self.path):
                self._each("finish", summary, 1)
                raise UserError(lost)
            self.record |= {**summary, "exit_reason": error or "finished", "end": now()}
            self._write_record()
            self._each("finish", summary, 1 if error else 0)
            return self._report() if self.trackers and self.cfg.train.report else []
        finally:
            if self._lock is not None:
                self._lock.close()

    def _report(self) -> list[Path]:
        """Write plots and report and return these files; the run is complete without them."""
        try:
            return page.write(self.path, plots=True)
        except (OSError, UserError) as problem:
            LOGGER.warning("no plots and no report: %s", first_line(problem))
            return []

    def _write_record(self) -> None:
        text = json.dumps(finite(self.record), indent=2, default=str)
        files.replace(self.path / RECORD, f"{text}\n")


def note_failure(run_dir: Path, rank: int, step: int, report: str) -> Path | None:
    """Write a rank's traceback to its own file, because other ranks may not know of it, and return the file."""
    file = run_dir / "failures" / f"rank-{rank}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        text = f"rank {rank} on {socket.gethostname()}, after {step} steps, {now()}\n{report}"
        file.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return file


def recorded(run_dir: Path) -> dict[str, Any]:
    """Return run.json; if it is missing or cannot be read, what the newest checkpoint says of the run."""
    if record := read_record(run_dir):
        return record
    for folder in reversed(folders.all_in(run_dir)):
        with contextlib.suppress(UserError):
            found = typed(folder.manifest().get("run"), TYPES)
            return found and found | {"steps": folder.step}
    return {}


def _set_aside_misplaced(path: Path) -> None:
    """Rename whatever is in the place of a record but is not readable as one, such as a folder or a dangling link."""
    for name in (".lock", *FILES, *FOLDERS):
        file = path / name
        if not os.path.lexists(file):
            continue
        if name in FOLDERS:
            problem = "" if file.is_dir() else "is no folder"
        elif not (file.is_file() or file.is_char_device()):  # a link to /dev/null is intended
            problem = "is no file"
        else:
            problem = "" if os.access(file, os.R_OK) else "cannot be read"
        if problem:
            LOGGER.warning("%s %s, and is now %s", file, problem, files.set_aside(file).name)


def _compared_by(cfg: Config) -> dict[str, str]:
    """Return by which metric the run's evaluations are compared, and whether min or max is best."""
    metric = cfg.train.best_metric
    return {"best_metric": metric, "best_mode": "max" if higher_is_better(metric, cfg.train.best_mode) else "min"}


def _number(name: str, value: Any) -> int | float | None:
    """Return the metric ``value`` as a Python number; it may be NaN or infinite, which JSON lines store as null."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # a tensor or array of several elements
        number = value
    if not isinstance(number, int | float | None):
        raise TypeError(f"the metric {name} is {value!r:.80}, which is not a number")
    return number


def now() -> str:
    """Return the time as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_folder(path: Path, *, again: bool) -> None:
    if not again and has_run(path):
        raise ConfigError(
            f"hydra.run.dir={path} already contains a run: resume it with train.resume=auto, choose another directory, "
            "or remove it",
            page="train.md#the-run-directory",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        _set_aside_misplaced(path)
        (path / ".lock").touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {path}: {error.strerror}. Choose another with hydra.run.dir=DIR"
        ) from None


def _appears(file: Path) -> bool:
    """Return whether ``file`` exists within ``SEEN_S`` seconds."""
    end = time.monotonic() + SEEN_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _lock_folder(path: Path, patience_s: float) -> IO[str]:
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
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
            LOGGER.warning("cannot lock %s (%s): make sure that no other run uses it", path, error.strerror)
            return file
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise ConfigError(
            f"the run directory {path} is in use by {holder}: wait for it to end, or choose another with "
            "hydra.run.dir=DIR"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    file.flush()
    return file


def _adopt_launch_record(path: Path) -> None:
    """Move launch.json into the run directory, and leave a link through which ``launch`` completes it at the end."""
    record = Path(os.environ.get("WORDRUN_LAUNCH_RECORD", ""))
    if not record.is_file() or record.is_symlink():
        return
    try:
        if (path / "launch.json").exists():  # from the previous launch
            number = 1 + len(list(path.glob("launch-*.json")))
            (path / "launch.json").rename(path / f"launch-{number}.json")
        shutil.move(record, path / "launch.json")
        record.symlink_to(path / "launch.json")
    except OSError as error:
        LOGGER.warning("could not move launch.json from %s: %s", record, error)


def _point_latest_at(path: Path) -> None:
    """Point outputs/latest at this run, if it is below outputs/."""
    outputs = Path("outputs").resolve()  # a link in a submitted job's copy of the code
    if outputs not in path.parents:
        return
    try:
        files.point(outputs / "latest", os.path.relpath(path, outputs))
    except OSError as error:
        LOGGER.warning("cannot update the link %s: %s", outputs / "latest", error)
