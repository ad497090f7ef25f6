"""Ranks that were killed by a signal: whether to restart them."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from wordrun.launch.output_tail import Fault

KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
"""Signals that may kill a rank through no fault of its program, so that a relaunch may succeed."""
TAIL_BYTES = 65536


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    status: int
    failed: int | None = None
    """The first rank to fail, if it is known."""
    memory: str = ""
    """The evidence that the kernel killed a rank because memory ran out."""
    last_lines: list[str] = field(default_factory=list)
    """The last lines that the launcher and the ranks printed on stderr, if they passed through launch."""
    lost: str = ""
    """The guardian that was lost (--elastic)."""
    stopped: bool = False
    """A signal had stopped that rank, and its guardian killed it."""
    uses_mpi: bool = False
    """The program calls MPI, so guardians cannot start it."""
    pid: int | None = None
    """The process ID of the first rank to fail, if it is known."""
    at: float | None = None
    """When it failed, as seconds since the epoch; None: when launch ended."""
    killed_status: int = 128 + signal.SIGKILL
    """The launcher's status if SIGKILL ended a rank that could not report it."""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal of KILLERS that ended the first rank to fail."""
        if self.failed is None and self.status == self.killed_status:
            return signal.SIGKILL
        return next((each for each in KILLERS if each == self.status - 128), None)

    @property
    def killed(self) -> bool:
        """Whether such a signal ended it."""
        return self.signal is not None


@dataclass
class Kills:
    """The ranks that were killed so far, each with the step that the run had reached."""

    left: int = 0
    """How many times ranks may still be restarted."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """For run.json, the faults after which they were restarted."""
    seen: set[tuple[int | str | None, int | None]] = field(default_factory=set)
    refusal: str = ""
    """Why another launch would not help."""

    def fault(self, outcome: Outcome, record: str) -> Fault | None:
        """Return a fault if a rank was killed, and neither for memory nor for the second time at the same step.

        Args:
            outcome: how the launch ended.
            record: path of its launch.json.
        """
        self.refusal = ""
        if not (outcome.killed or outcome.lost):
            return None
        who, step = (
            outcome.lost or ("a rank" if outcome.failed is None else f"rank {outcome.failed}"),
            last_step(record),
        )
        at, what = "" if step is None else f" at step {step}", "lost" if outcome.lost else "killed"
        victim = outcome.lost or outcome.failed
        if outcome.memory:
            self.refusal = "relaunching would need as much memory"
        elif (victim, step) in self.seen:
            self.refusal = f"{who} was {what} twice{at}, so relaunching would not help"
        else:
            self.seen.add((victim, step))
            cause = "lost guardian" if outcome.lost else outcome.signal.name if outcome.signal else ""
            cause = "SIGSTOP" if outcome.stopped else cause
            self.note(outcome, cause, step)
            detail = f"{cause}, not for lack of memory on this host" if cause == "SIGKILL" else cause
            return Fault(f"{who} was {what}{at}", detail, ())
        return None

    def start_again(self) -> None:
        """Count a restart of the ranks."""
        self.left -= 1

    def note(self, outcome: Outcome, cause: str, step: int | None) -> None:
        """Remember a fault for run.json."""
        at = time.time() if outcome.at is None else outcome.at
        self.faults.append({"rank": outcome.failed, "pid": outcome.pid, "cause": cause, "last_step": step, "time": at})


def last_step(record: str) -> int | None:
    """Return the last step in the metrics of a launch's run, whose directory has the record; None: unknown."""
    try:
        with open(os.path.join(os.path.dirname(os.path.realpath(record)), "metrics.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            steps = re.findall(rb'"step": *(\d+)', file.read())
    except OSError:
        return None
    return int(steps[-1]) if steps else None
