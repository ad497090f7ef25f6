"""The points of a study, and the CSV file with a row for each."""

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
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from wordrun import files
from wordrun.errors import ConfigError, UserError

DONE, FAILED, SUBMITTED, IMPOSSIBLE = "done", "failed", "submitted", "impossible"
"""The states of a row. A point without a row has not been run; one that the options rule out never is."""
OWN = ("schema", "point", "state", "reason", "ranks", "nodes")
LAST = ("started", "device", "site", "commit", "versions", "hosts", "run_dir", "overrides")
"""The columns of every study before and after those of its own."""


@dataclass(frozen=True)
class StudyPoint:
    """One run of a study."""

    name: str
    """Unique within the study; part of file names."""
    overrides: tuple[str, ...]
    """The options of the run."""
    launch: tuple[str, ...] = ()
    """Options of launch that choose the ranks, such as -n 2."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the study's own columns that are known in advance."""


class Points:
    """A study's points.csv, locked while this object is open as a context manager.

    Each row is written as soon as its point ends. The file is replaced as a whole, so that it is never incomplete.

    Args:
        folder: the study's folder.
        study: name of the study.
        version: of its columns; to be increased when their meaning changes.
        columns: the study's own columns.
    """

    def __init__(self, folder: Path, study: str, version: int, columns: Sequence[str]) -> None:
        self.folder, self.path = folder, folder / "points.csv"
        self.schema = f"{study}-{version}"
        self.columns = (*OWN, *columns, *LAST)
        self.rows: dict[str, dict[str, str]] = {}
        """The rows by the point's name."""
        self._lock: IO[str] | None = None

    def __enter__(self) -> Points:
        """Lock the file and read it.

        Raises:
            UserError: another study uses it, or it was not written by this version of this study.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error.strerror}; choose another --out") from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # otherwise a file system without locks
                with self._lock as file:
                    file.seek(0)
                    holder = file.read() or "another process"
                raise ConfigError(
                    f"--out {self.folder} is in use by {holder}: wait for it to end, or choose another"
                ) from None
        try:
            self.rows = self._read()
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()
        except BaseException as error:
            with contextlib.suppress(OSError):  # it tries once more to write
                self._lock.close()
            if isinstance(error, OSError):
                raise UserError(
                    f"cannot write to {self.folder}: {error.strerror}. Start the study again when this is fixed"
                ) from None
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock the file."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> dict[str, dict[str, str]]:
        if not self.path.exists():
            return {}
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows, names = list(reader), tuple(reader.fieldnames or ())
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"cannot read {self.path}: {error}; choose another --out") from None
        found = {row.get("schema") for row in rows} - {self.schema}
        if found or names != self.columns:
            other = next(iter(found), None) or "other columns"
            raise ConfigError(
                f"{self.path} was written by another study or version of wordrun ({other}; this one writes "
                f"{self.schema}): choose another --out, or continue with that version"
            )
        return {row["point"]: row for row in rows}

    def check(self, points: Iterable[StudyPoint]) -> None:
        """Refuse points whose rows belong to runs with other options.

        Raises:
            ConfigError: names the first one, and what it was run with.
        """
        for point in points:
            row = self.rows.get(point.name)
            if row is not None and row["overrides"] != options_of(point):
                raise ConfigError(
                    f"{self.path} has the point {point.name} with other options ({row['overrides']}): "
                    "use these, or choose another --out"
                )

    def put(self, point: StudyPoint, state: str, reason: str = "", **values: Any) -> None:
        """Write the row of ``point``; a row that it has is replaced.

        Args:
            point: the point.
            state: one of the states above.
            reason: why it failed; for a submitted point the scheduler's job.
            values: further columns; None is an empty cell.

        Raises:
            UserError: the file cannot be written, such as on a full disk; the rows in it remain as they were.
        """
        known = {
            **point.columns, **values, "schema": self.schema, "point": point.name, "state": state, "reason": reason,
            "overrides": options_of(point),
        }  # fmt: skip
        unknown = known.keys() - set(self.columns)
        assert not unknown, f"not a column of {self.schema}: {unknown}"
        self.rows[point.name] = {name: _cell(known.get(name)) for name in self.columns}
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows.values())
        try:
            files.replace(self.path, text.getvalue())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; it has all rows except that of {point.name}. "
                "Start the study again when this is fixed: a finished run is not repeated"
            ) from None


def options_of(point: StudyPoint) -> str:
    """Return a point's options as a command line."""
    return shlex.join([*point.launch, *point.overrides])


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return the number in a cell, or None if it is empty."""
    return float(row[column]) if row.get(column) else None


def _cell(value: Any) -> str:
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
