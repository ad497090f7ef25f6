"""``--retries``: decides whether a failed launch is worth another attempt.

A fault is a failure that a relaunch can cure: of nodes, network or launcher, never of the user's program. In a series
of runs at ALCF, 63 jobs were relaunched after arbitrary failures: 7 relaunches helped, the others repeated the error.
So only two kinds of failures count as faults: those that a launcher reports, and ranks killed by a signal.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wordrun.common.errors import REQUEUE
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.messages import say

if TYPE_CHECKING:
    from wordrun.launch.plan import LaunchPlan

KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
"""Signals that may kill a rank through no fault of its program, so that a relaunch may succeed."""
# A line's pattern, its meaning, and the group that names the host to leave out (0: none).
PATTERNS: tuple[tuple[str, str, int], ...] = (
    *(fault for launcher in LAUNCHERS.values() for fault in launcher.faults),
    (r"No VNIs available", "the fabric has no free network identifier", 0),
    (r"CXI alloc failed on cxi\d+", "an earlier job has not yet released the fabric's resources", 0),
    (r"address already in use|EADDRINUSE", "the port was taken in the meantime", 0),
)
MOST_RESTARTS = 3
"""Restarts of a job after which it is not requeued if its last start made no progress."""
LEAST_S = 60
"""A start that is shorter, in seconds, made no progress, unless it logged a step."""
TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
# The end of metrics.jsonl in which the last step is looked for [bytes].
METRICS_BYTES = 65536


@dataclass(frozen=True)
class Fault:
    """A failure that may not happen again."""

    meaning: str
    line: str
    """The evidence: the launcher's line, or the signal."""
    hosts: tuple[str, ...]
    """Hosts to leave out, as the launcher names them."""


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
    """A process or hosts, named as in messages, that were lost and that only a relaunch replaces; empty: none."""
    lost_hosts: tuple[str, ...] = ()
    """The hosts on which nothing can be started any more."""
    cause: str = ""
    """Why the rank or that process ended, for run.json; empty: the signal of ``status``."""
    pid: int | None = None
    """The process ID of the first rank to fail, if it is known."""
    at: float | None = None
    """When it failed, as seconds since the epoch; None: now."""
    killed_status: int = 128 + signal.SIGKILL
    """The launcher's status if SIGKILL ended a rank that could not report it."""
    needs_launcher: str = ""
    """Why the launcher itself has to start the ranks (``RankStarter``), for a message; empty: it need not, or did."""

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
class Retries:
    """Counts the restarts that are left, and keeps the kills after which ranks were restarted."""

    left: int = 0
    """How many times ranks may still be restarted."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """The kills so far, for run.json."""
    seen: set[tuple[int | str | None, int | None]] = field(default_factory=set)
    """Who was killed, and after which step."""
    refusal: str = ""
    """Why another launch would not help."""

    def after_kill(self, outcome: Outcome, record: str) -> Fault | None:
        """Return the fault if a process was killed, but not for memory, and not twice at the same step.

        Args:
            outcome: how the launch ended.
            record: path of its launch.json.
        """
        self.refusal = ""
        if not (outcome.killed or outcome.lost):
            return None
        rank = "a rank" if outcome.failed is None else f"rank {outcome.failed}"
        victim, what = (outcome.lost, "lost") if outcome.lost else (rank, "killed")
        step = last_step(record)
        at = "" if step is None else f" at step {step}"
        if outcome.memory:
            self.refusal = "relaunching would need as much memory"
            return None
        if (victim, step) in self.seen:
            self.refusal = f"{victim} was {what} twice{at}, so relaunching would not help"
            return None
        self.seen.add((victim, step))
        if (
            outcome.lost_hosts
            and self.faults
            and (self.faults[-1]["rank"], self.faults[-1]["last_step"]) == (None, step)
        ):
            self.faults.pop()  # the guardian there was lost too, and the restart after that did not take place
            self.left += 1
        cause = outcome.cause or (outcome.signal.name if outcome.signal else "")
        when = time.time() if outcome.at is None else outcome.at
        self.faults.append(
            {"rank": outcome.failed, "pid": outcome.pid, "cause": cause, "last_step": step, "time": when}
        )
        detail = f"{cause}, not for lack of memory on this host" if cause == "SIGKILL" else cause
        detail = "nothing can be started there now" if outcome.lost_hosts else detail
        were = "were" if len(outcome.lost_hosts) > 1 else "was"
        return Fault(f"{victim} {were} {what}{at}", detail, outcome.lost_hosts)

    def use_one(self) -> None:
        """Count a restart of the ranks."""
        self.left -= 1


def last_step(record: str) -> int | None:
    """Return the last step in the metrics of a launch's run, whose directory has the record; None: unknown."""
    try:
        with open(os.path.join(os.path.dirname(os.path.realpath(record)), "metrics.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - METRICS_BYTES))
            steps = re.findall(rb'"step": *(\d+)', file.read())
    except OSError:
        return None
    return int(steps[-1]) if steps else None


class Progress:
    """Ends a job that its scheduler would restart for ever: its ranks ask for it at each start, but do nothing else.

    Training makes progress if it logs a further step, any other program if it runs for ``LEAST_S`` seconds.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.restarts, self.record = plan.job.restarts, plan.env["WORDRUN_LAUNCH_RECORD"]
        first = os.path.join(
            plan.decided.folder, f"{plan.decided.run.run_id}.json"
        )  # the record of the job's first start
        self.before, self.began = last_step(first), time.monotonic()

    def checked(self, status: int) -> int:
        """Return the exit status of a launch whose ranks ended with ``status``; 1 instead of 75 without progress."""
        seconds, step = time.monotonic() - self.began, last_step(self.record)
        idle = seconds < LEAST_S if step is None else step == self.before
        if status != REQUEUE or self.restarts < MOST_RESTARTS or not idle:
            return status
        made = f"it ended after {seconds:.0f} s" if step is None else f"the run is still at step {step}"
        say(
            f"start {self.restarts + 1} of this job asks to be requeued (exit status {REQUEUE}) without progress: "
            f"{made}. The job ends with 1, so that it is not requeued again"
        )
        return 1


def reported_fault(lines: Iterable[str], status: int) -> Fault | None:
    """Return the fault that the last lines of a failed launch report; None: a relaunch would only fail again.

    Args:
        lines: what the launcher and the ranks printed last.
        status: exit status; 0, 2 (invalid options) and 75 (a run to resume) are never faults.
    """
    if status in (0, 2, REQUEUE):
        return None
    first: Fault | None = None
    hosts: list[str] = []
    for line in lines:
        for pattern, meaning, group in PATTERNS:
            match = re.search(pattern, line, re.IGNORECASE)
            if match:
                hosts += [match[group].rstrip(":,.")] if group else []
                first = first or Fault(meaning, line.strip(), ())
                break
    return Fault(first.meaning, first.line, tuple(dict.fromkeys(hosts))) if first else None


def port_taken(lines: Iterable[str], port: int) -> bool:
    """Return whether ``lines`` contain torch's report that rank 0 could not listen on ``port``."""
    return any(TAKEN.search(line) and re.search(rf"\b{port}\b", line) for line in lines)
