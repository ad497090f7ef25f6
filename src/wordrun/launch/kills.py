"""Ranks that were killed by SIGKILL: whether to launch again."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field

from wordrun.launch.tail import Fault

KILLED = 128 + signal.SIGKILL
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

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended the first rank to fail; Hydra's mpiexec then returns 9 if no rank could report."""
        return self.status == KILLED or (self.failed is None and self.status == signal.SIGKILL)


@dataclass
class Kills:
    """The ranks that were killed so far, each with the step that the run had reached."""

    seen: set[tuple[int | None, int | None]] = field(default_factory=set)
    refusal: str = ""
    """Why another launch would not help."""

    def fault(self, outcome: Outcome, record: str) -> Fault | None:
        """Return a fault if a rank was killed, and neither for memory nor for the second time at the same step.

        Args:
            outcome: how the launch ended.
            record: path of its launch.json.
        """
        self.refusal = ""
        if not outcome.killed:
            return None
        who, step = "a rank" if outcome.failed is None else f"rank {outcome.failed}", last_step(record)
        at = "" if step is None else f" at step {step}"
        if outcome.memory:
            self.refusal = "launching again would need as much memory"
        elif (outcome.failed, step) in self.seen:
            self.refusal = f"{who} was killed twice{at}, so launching again would not help"
        else:
            self.seen.add((outcome.failed, step))
            return Fault(f"{who} was killed{at}", "SIGKILL, not for lack of memory on this host", ())
        return None


def last_step(record: str) -> int | None:
    """Return the last step in the metrics of a launch's run, whose directory has the record; None: unknown."""
    try:
        with open(os.path.join(os.path.dirname(os.path.realpath(record)), "metrics.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            steps = re.findall(rb'"step": *(\d+)', file.read())
    except OSError:
        return None
    return int(steps[-1]) if steps else None
