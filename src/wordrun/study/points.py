"""The points of a study or a sweep, and points.csv, which has a row for each."""

from __future__ import annotations

import argparse
import contextlib
import csv
import errno
import fcntl
import io
import math
import os
import shlex
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from wordrun.common import files
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.run_dir import RECORD
from wordrun.track import metrics_jsonl
from wordrun.track.run_json import load, state_of

DONE, FAILED, SUBMITTED, IMPOSSIBLE = "done", "failed", "submitted", "impossible"
"""States of a row. A point without a row has not been run; an impossible one is ruled out by the options."""
WAITING, PRUNED = "waiting", "pruned"
"""Further states of a row of a sweep: still to be run, or ended early by a search because of poor values."""
OWN = ("schema", "point", "state", "reason", "ranks", "nodes")
LAST = ("started", "device", "site", "commit", "versions", "hosts", "run_dir", "overrides")
"""The columns before and after the study's own columns."""


@dataclass(frozen=True)
class Point:
    """One run of a study or a sweep."""

    name: str
    """Unique among the points."""
    dir: Path
    """Its run directory."""
    overrides: tuple[str, ...]
    """The options of the run."""
    launch: tuple[str, ...] = ()
    """Options of launch that choose the ranks, such as -n 2, if points differ in them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the study's own columns that are known in advance."""
    run_id: str = ""
    """With a run ID, a point that is started again continues what is in its directory; without, it begins anew."""
    problem: str = ""
    """Why the options rule the point out; empty: they do not."""

    @property
    def log(self) -> Path:
        """The file with everything that its launches print."""
        return self.dir.with_name(f"{self.dir.name}.log")

    def state(self) -> str:
        """Return the state of its run: new, running, finished, stopped, failed, died or silent."""
        if not (self.dir / RECORD).exists():
            return "failed" if self.log.exists() else "new"
        record = load(self.dir)
        state = state_of(record)
        # A run that a hook has ended early, such as early_stop, is complete as well.
        complete = state == "failed" and record.launches and record.launches[-1].get("exit_status") == 0
        return "finished" if complete else state

    def clear(self) -> None:
        """Remove what a failed or stopped run has left, unless it is to be continued."""
        if not self.run_id:
            shutil.rmtree(self.dir, ignore_errors=True)
            self.log.unlink(missing_ok=True)


class Points:
    """The folder of a study or a sweep, with points.csv, locked while this object is open as a context manager.

    Each row is written as soon as its point ends. The file is replaced as a whole, so that it is never incomplete.

    Args:
        folder: the folder.
        study: name of the study; sweep for all sweeps.
        version: version of the columns; to be increased when their meaning changes.
        columns: the study's own columns.
        option: the option that names the folder.
        subset: other processes may run other points of the folder meanwhile: lock nothing, and write no rows.
    """

    def __init__(
        self,
        folder: Path,
        study: str,
        version: int,
        columns: Sequence[str],
        option: str = "--out",
        *,
        subset: bool = False,
    ) -> None:
        self.folder, self.path, self.study, self.option, self.subset = (
            folder,
            folder / "points.csv",
            study,
            option,
            subset,
        )
        self.schema = f"{study}-{version}"
        self.columns = (*OWN, *columns, *LAST)
        self.rows: dict[str, dict[str, str]] = {}
        """The rows by the point's name."""
        self._lock: IO[str] | None = None

    def __enter__(self) -> Points:
        """Lock the folder and read the rows.

        Raises:
            UserError: another process uses it, or it was not written by this version of this study.
        """
        if self.subset:
            self.rows = self._read()
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("a+", encoding="utf-8")
            if not _locked(self._lock):
                self._lock.seek(0)
                holder = self._lock.read() or "another process"
                raise ConfigError(
                    f"{self.option} {self.folder} is in use by {holder}: wait for it to end, or choose another"
                )
            self.rows = self._read()
            self._lock.truncate(0)
            job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}" + (f" (job {job})" if job else ""))
            self._lock.flush()
        except BaseException as error:
            with contextlib.suppress(OSError):  # closing tries once more to write
                self.__exit__()
            if isinstance(error, OSError):
                raise UserError(
                    f"cannot write to {self.folder}: {error.strerror}. Start the {self.what} again when this is fixed, "
                    f"or choose another {self.option}"
                ) from None
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()

    @property
    def what(self) -> str:
        """``study`` or ``sweep``, for messages."""
        return "sweep" if self.study == "sweep" else "study"

    def _read(self) -> dict[str, dict[str, str]]:
        if not self.path.exists():
            return {}
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows, names = list(reader), tuple(reader.fieldnames or ())
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"cannot read {self.path}: {error}; choose another {self.option}") from None
        found = {row.get("schema") for row in rows} - {self.schema}
        if found or names != self.columns:
            other = next(iter(found), None) or "other columns"
            raise ConfigError(
                f"{self.path} was written by another study or version of wordrun ({other}; this one writes "
                f"{self.schema}): choose another {self.option}, or continue with that version"
            )
        return {row["point"]: row for row in rows}

    def state(self, point: Point) -> str:
        """Return the state in the row of ``point``; empty: it has none."""
        return self.rows.get(point.name, {}).get("state", "")

    def check(self, points: Iterable[Point]) -> None:
        """Check that no point has a row of a run with other options.

        Raises:
            ConfigError: one has; the message names it and the other options.
        """
        for point in points:
            row = self.rows.get(point.name)
            if row is not None and row["overrides"] != options_of(point):
                raise ConfigError(
                    f"{self.path} has the point {point.name} with other options ({row['overrides']}): "
                    f"use these, or choose another {self.option}"
                )

    def put(self, points: Sequence[Point], state: str, reason: str = "", **values: Any) -> None:
        """Write the rows of ``points``, replacing those they have.

        Args:
            points: some points.
            state: one of the states above.
            reason: why they failed; for submitted points the scheduler's job.
            values: further columns; None is an empty cell.

        Raises:
            UserError: the file cannot be written, such as on a full disk; the rows in it remain as they were.
        """
        for point in points:
            known = {
                **point.columns,
                **values,
                "schema": self.schema,
                "point": point.name,
                "state": state,
                "reason": reason,
                "run_dir": os.path.relpath(point.dir, self.folder),
                "overrides": options_of(point),
            }
            unknown = known.keys() - set(self.columns)
            assert not unknown, f"not a column of {self.schema}: {unknown}"
            self.rows[point.name] = {name: cell(known.get(name)) for name in self.columns}
        if self.subset or not points:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows.values())
        try:
            files.replace(self.path, text.getvalue())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; it has all rows except that of {points[-1].name}. "
                f"Start the {self.what} again when this is fixed: a finished run is not repeated",
                page="sweeps.md#continuing-a-sweep" if self.study == "sweep" else "study.md#interrupted-studies",
            ) from None


def _locked(file: IO[str]) -> bool:
    """Return whether this process has locked ``file``, or its file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def options_of(point: Point) -> str:
    """Return a point's options as a command line."""
    return shlex.join([*point.launch, *point.overrides])


def best(run: Path, metric: str, *, higher: bool) -> float | None:
    """Return the best finite value of ``metric`` in the evaluations of ``run`` so far; None: there is none."""
    values = [value for _, value in metrics_jsonl.evaluations(run, metric)]
    return (max if higher else min)(values) if values else None


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return the number in a cell, or None if it is empty."""
    return float(row[column]) if row.get(column) else None


def cell(value: Any) -> str:
    """Return a value as in a CSV file; None is an empty cell."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def positive_numbers(text: str) -> list[float]:
    """Return the numbers in ``text``, in order and each once; for an option of argparse."""
    try:
        found = sorted({float(each) for each in text.split(",")})
    except ValueError:
        found = []
    if not all(0 < number < math.inf for number in found or [0]):
        raise argparse.ArgumentTypeError(f"{text} should be positive numbers, separated by commas, such as 128,256")
    return found
