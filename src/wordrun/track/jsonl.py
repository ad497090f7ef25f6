"""metrics.jsonl and samples.txt: plain files, which every run has."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from wordrun.common import files
from wordrun.common.log import LOGGER
from wordrun.common.run_dir import METRICS
from wordrun.track.base import RunInfo, Tracker
from wordrun.track.metrics_jsonl import parsed

SAMPLES = "samples.txt"


class JsonlTracker(Tracker):
    """Appends each line immediately, so that nothing is lost when the run fails."""

    def __init__(self, options: Any, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        self._open()

    def _open(self) -> None:
        self._metrics = (self.run.path / METRICS).open("a", encoding="utf-8")
        self._lines = len(_lines_of(self.run.path / METRICS))

    def log_lists(self, metrics: dict[str, Any]) -> None:
        """Append one JSON object."""
        self.log(metrics)

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one JSON object; non-finite numbers become null, since JSON has no NaN."""
        try:
            self._metrics.write(json.dumps(finite(metrics)) + "\n")
            self._metrics.flush()
            self._lines += 1
        except OSError as error:
            error.filename = self._metrics.name  # missing from errors of write
            raise

    def sample(self, step: int, text: str) -> None:
        """Append the text below a header with its step."""
        with (self.run.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n\n")

    def state(self) -> dict[str, Any]:
        """Return the number of lines of metrics.jsonl, so that a resumed run can tell whether some are lost."""
        return {"lines": self._lines}

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """Do nothing: a branch begins with copies of the files."""

    def rewind(self, step: int, logged: int) -> None:
        """Remove what comes after ``step``."""
        self._metrics.close()
        copy_until(self.run.path, self.run.path, step)
        self._open()

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Close the file."""
        self._metrics.close()

    def abandon(self) -> None:
        """Close the file."""
        self._metrics.close()


def finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with None in place of NaN and the infinities, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def copy_until(source: Path, target: Path, step: int, written: int = 0) -> int:
    """Copy metrics.jsonl and samples.txt up to ``step`` from one run directory to another, which may be the same.

    Lines that cannot be read are left out, with a warning, except for an incomplete last one, left by a killed run. If
    they are the same directory, the original is kept under another name.

    Args:
        source: the run directory to copy from.
        target: the one to copy to.
        step: the last step of which lines are copied.
        written: how many lines there were up to ``step``, if known; a warning reports lost ones.

    Returns:
        The last step in the source.
    """
    file, kept, steps, last = source / METRICS, list[bytes](), [0], -1
    texts = _lines_of(file)
    broken = [text for text in texts if (line := parsed(text)) is None and text.endswith(b"\n")]
    for text in texts:
        if (line := parsed(text)) is not None:
            last = max(last, line["step"])
            if line["step"] <= step:
                kept.append(text.rstrip() + b"\n")
                steps.append(line["step"])
    if broken:
        original = files.set_aside(file) if source == target else file
        what = f"{len(broken)} of its {len(texts)} lines cannot be read and are skipped"
        LOGGER.warning("%s: %s; the original is %s", target / METRICS, what, original)
    if len(kept) < written:
        size, begin, end = max((b - a, a, b) for a, b in pairwise([*sorted(steps), step]))
        where = f"the longest gap is from step {begin} to {end}" if size else "no step is missing"
        LOGGER.warning(
            "%s lacks %d of the %d lines up to step %d: %s", target / METRICS, written - len(kept), written, step, where
        )
    files.replace(target / METRICS, b"".join(kept))
    if samples := _read(source / SAMPLES):
        parts = re.split(rb"^(?=--- step \d+ ---\n)", samples, flags=re.M)
        later = (re.match(rb"--- step (\d+) ---", part) for part in parts)
        texts = [part for part, match in zip(parts, later, strict=True) if not match or int(match[1]) <= step]
        files.replace(target / SAMPLES, b"".join(texts))
    return last


def forget_steps(log: Path, step: int) -> None:
    """Remove the lines of steps after ``step`` from the file ``log``, if it exists, and keep all other lines."""
    if lines := _lines_of(log):
        later = (re.search(rb"\] INFO step (\d+)/", line) for line in lines)
        kept = (line for line, match in zip(lines, later, strict=True) if not match or int(match[1]) <= step)
        files.replace(log, b"".join(kept))


def _lines_of(file: Path) -> list[bytes]:
    """Return the lines of a file, with their line ends; none if it does not exist."""
    return _read(file).splitlines(keepends=True)


def _read(file: Path) -> bytes:
    """Return what is in a file; nothing if it does not exist, or is a device. An unreadable file is renamed."""
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError as error:
        LOGGER.warning("%s cannot be read (%s), and is now %s", file, files.why(error), files.set_aside(file).name)
        return b""
