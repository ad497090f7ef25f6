"""Supervise a running launch: react to signals, failed ranks, silence and the time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wordrun.common import exit_reports, stack_requests
from wordrun.common.errors import MARK, REQUEUE, ConfigError, ranges
from wordrun.launch import processes
from wordrun.launch.launchers.base import STOPPING
from wordrun.launch.messages import say
from wordrun.launch.output import Output
from wordrun.launch.output_tail import lines_of
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.rank_control import RankControl
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.walltime import WalltimeWarning

IDLE_STATUS = 124
# A job asked to stop gets time to finish its step and write its files. In a scheduler's job, which may save large
# models, the scheduler sets the limit.
STOP_PATIENCE_S = 30.0
JOB_PATIENCE_S = 600.0
# After one rank has failed, the others get this long to exit, and as long again after SIGTERM.
FAILURE_PATIENCE_S = 4.0
# A rank's last lines may arrive up to this much later than its exit status [s].
LAST_LINES_S = 2.0
# On a file system that other hosts write to, their last reports may appear this much later.
REPORTS_S = 5.0
# Processes that outlive the command get this long to close their files.
LEFTOVER_PATIENCE_S = 2.0
POLL_S = 0.25
EXIT_STATUS_PAGE = "how_launch_works.md#exit-status-and-signals"


class Deadline:
    """An action that is due unless the job ends in time. A new deadline replaces the previous one."""

    def __init__(self) -> None:
        self._at = float("inf")
        self._then: Callable[[], None] = lambda: None

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` in ``seconds``."""
        self._at, self._then = time.monotonic() + seconds, then

    def clear(self) -> None:
        """Call nothing."""
        self._at = float("inf")

    def look(self) -> None:
        """Call the action if it is due."""
        if time.monotonic() > self._at:
            self._then()


@dataclass
class StopRequests:
    """The signals that have asked launch to stop."""

    first: int = 0
    """The first of them, which decides the exit status; 0: there was none."""
    interrupts: int = 0
    """How often Ctrl-C was pressed."""

    def add(self, number: int) -> bool:
        """Count a signal, and return whether to kill the job: it has been asked to stop before."""
        self.interrupts += number == signal.SIGINT
        repeated = bool(self.first) and not self.interrupts
        self.first = self.first or number
        return repeated or self.interrupts > 2


@dataclass
class RankFailure:
    """The first rank that has reported a failure."""

    rank: int
    status: int
    at: float
    """When it failed, in seconds since 1970."""
    last_lines: list[str] = field(default_factory=list)
    """The last lines that it printed."""
    listen_until: float = 0.0
    """Until when its last lines may arrive, on the monotonic clock."""

    def listen(self, output: Output) -> None:
        """Keep the rank's last lines, which may arrive after its status."""
        if not self.last_lines and time.monotonic() < self.listen_until:
            self.last_lines = lines_of(self.rank, output.lines_of(self.rank))


@dataclass
class EndReports:
    """The reports on how ranks have ended: files in a folder and, of hosts without the folder, lines in the output."""

    folder: str
    """The folder with the reports; empty: there are no reports."""
    output: Output

    def failures(self) -> list[tuple[int, int, int, str]]:
        """Return when each failed rank ended [ns], its number, its exit status and its host."""
        found = [(time.time_ns(), name, text) for name, text in self.output.reports]
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
            for entry in os.scandir(self.folder):
                if entry.name.isdigit():
                    with open(entry.path) as file:
                        found.append((entry.stat().st_mtime_ns, entry.name, file.read().strip()))
        return [
            (when, int(name), int(text.split()[0]), text.partition(" ")[2])
            for when, name, text in found
            if name.isdigit() and text
        ]

    def succeeded(self) -> set[int]:
        """Return the ranks that have ended with status 0."""
        told = {int(text) for name, text in self.output.reports if name.startswith(exit_reports.PREFIX)}
        return told | exit_reports.ended(self.folder)

    def unreported(self) -> int | None:
        """Return the only rank on this host whose ``rank_env.sh`` has ended without a report; None: none, or several.

        Several end so when a launcher kills the ranks, as after MPI_Abort.
        """
        gone = [rank for rank, pid in self._shells().items() if not processes.is_running(pid)]
        reported = {rank for _, rank, _, _ in self.failures()} | self.succeeded()
        lost = [rank for rank in gone if rank not in reported]
        return lost[0] if len(lost) == 1 else None

    def _shells(self) -> dict[int, int]:
        """Return the process IDs of ``rank_env.sh``, by rank, where it leaves them: if all ranks are on this host."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(".pid"):
                    with open(entry.path) as file:
                        pid = file.read().strip()
                    if pid:
                        found[int(entry.name.removesuffix(".pid"))] = int(pid)
        return found

    def refresh(self) -> None:
        """Make an NFS client list the folder anew, by a change in it."""
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=self.folder):
            pass


@dataclass
class Supervisor:
    """A running launch: its state, and the reactions to events."""

    plan: LaunchPlan
    child: subprocess.Popen[bytes]
    """The launcher, or the command if there is none."""
    output: Output
    control: RankControl
    returned: int | None = None
    """Exit status of ``child``, once it has ended."""
    idle: bool = False
    """The job is being stopped because of --idle-timeout or --hang."""
    saved: bool = False
    """A rank has reported that the run has saved and can be resumed."""
    ends_others: bool = False
    """Whether launch has sent SIGTERM because a rank failed: the others cannot have saved, whatever they report."""
    incomplete: bool = False
    """Whether the launcher has returned 0 although ranks have not ended by themselves, or had not finished."""
    failed: RankFailure | None = None
    failure: str = ""
    """What has failed, for messages and the record: a rank, or the ranks that have not ended by themselves."""
    unreported: int | None = None
    """The rank whose ``rank_env.sh`` was killed, so that nobody reports how the rank ends."""
    killed: bool = False
    """launch has killed the launcher, which did not end by itself."""
    stop: StopRequests = field(default_factory=StopRequests)
    deadline: Deadline = field(default_factory=Deadline)
    walltime: WalltimeWarning = field(default_factory=WalltimeWarning)
    next_look: float = 0.0
    """When to look at the reports again, on the monotonic clock."""

    def __post_init__(self) -> None:
        self._begun = time.time()
        self._reports = EndReports(self.control.status_dir, self.output)
        self._unreported_before: int | None = None

    @property
    def status_dir(self) -> str:
        """The folder in which ranks report how they end; empty: nobody reports."""
        return self.control.status_dir

    @property
    def is_stopping(self) -> bool:
        """Whether the job is being stopped, by a signal or because it is idle."""
        return bool(self.stop.first) or self.idle

    def warn_before_end(self, margin_s: float) -> None:
        """Send SIGUSR1 to the ranks ``margin_s`` before the job's walltime ends."""
        job = self.plan.job

        def ask() -> float | None:
            if job.ends_at is not None:
                return job.ends_at
            # The scheduler's command dies with this process, which may exit before the command has started.
            dies_with_us = processes.before_exec(own_group=False, death_signal=signal.SIGKILL)
            return SCHEDULERS[job.scheduler].end_time(job.id, dies_with_us)

        self.walltime.begin(ask, margin_s, is_running=lambda: self.returned is None)

    def look(self) -> None:
        """Check for failed ranks and leftover processes."""
        if self.status_dir:
            self.next_look = time.monotonic() + POLL_S
            self.look_for_failure()
            self.look_for_unreported()
            self.end_what_ranks_left()
        if self.control.launcher_is_late:
            processes.send(self.child.pid, signal.SIGKILL, group=True)

    def notice(self, ended: Mapping[int, int]) -> None:
        """Record the exit status of ``child`` if it is in ``ended``, unless another launcher stands in for it."""
        self.control.ended(ended)
        if self.child.pid not in ended:
            return
        if stand_in := self.control.next_launcher():
            self.child = stand_in
            return
        code = os.waitstatus_to_exitcode(ended[self.child.pid])
        self.returned = code if code >= 0 else 128 - code
        self.child.returncode = code  # so that Popen does not wait for it

    def look_for_failure(self) -> None:
        """Read the ranks' reports; the first failure starts the clock for the other ranks."""
        if self.failed:
            self.failed.listen(self.output)
        self.control.look()
        if self.saved or not self.status_dir:
            return
        reports = self._reports.failures()
        if any(status == REQUEUE for _, _, status, _ in reports) and not self.ends_others:
            self.saved = True  # whatever happens to other ranks as they exit
            self.output.hush()
            self.deadline.set(STOP_PATIENCE_S, self.give_up)
            return
        if not reports or self.failed:
            return
        when, rank, status, host = min(reports, key=lambda report: (report[2] != 0, report))
        self.failed = RankFailure(rank, status or 1, when / 1e9)
        self.output.hush()
        on = f" on {host}" if len(self.plan.hosts) > 1 else ""
        self.failure = _lines(f"rank {rank}{on} {_ending(status)}", self.ended_before())
        if (self.plan.ranks.np > 1 or not status) and not self.is_stopping:
            self.deadline.set(FAILURE_PATIENCE_S, self.give_up)
            if status == ConfigError.exit_status and self.runs_wordrun:
                return  # it has said what is wrong with the options
            self.failed.listen_until = time.monotonic() + LAST_LINES_S
            self.failed.listen(self.output)
            say(self.failure, "" if 0 < status <= 128 else EXIT_STATUS_PAGE)

    def look_for_unreported(self) -> None:
        """Find a rank whose shell was killed: for two looks in a row, it alone has ended without a report."""
        if self.unreported is not None or self.failed or self.saved or self.is_stopping or self.returned is not None:
            return
        before, self._unreported_before = self._unreported_before, self._reports.unreported()
        if before is not None and before == self._unreported_before:
            self.unreported = before

    def ended_before(self) -> str:
        """Return a line with the ranks that have ended with status 0; empty: none."""
        before = self._reports.succeeded() if self.plan.ranks.np > 1 else ()
        return f"{_named(before)} had ended with exit status 0" if before else ""

    @property
    def died_of_input(self) -> bool:
        """Whether SIGPIPE killed the launcher while it forwarded stdin, perhaps after the ranks had ended."""
        return self.plan.launcher.may_die_of_input and self.child.returncode == -signal.SIGPIPE

    def look_for_missing(self) -> None:
        """After a launcher that has returned 0, check that all ranks have ended by themselves, with status 0."""
        plan = self.plan
        unfinished = not self.status_dir and exit_reports.take_unfinished(f"{plan.env[exit_reports.UNFINISHED]}-")
        succeeded = self.returned == 0 or self.died_of_input
        if not succeeded or self.failed or self.saved or self.is_stopping:
            return
        if not self.status_dir:
            self.incomplete, self.failure = unfinished, f"COMMAND {_ending(0)}" if unfinished else ""
        elif not self.control.knows_ends:
            until = time.monotonic() + (0.0 if plan.job.is_local and len(plan.hosts) == 1 else REPORTS_S)
            while (missing := {*range(plan.ranks.np)} - self._reports.succeeded()) and time.monotonic() < until:
                time.sleep(POLL_S)
                self._reports.refresh()
                self.look_for_failure()
                if self.failed or self.saved:
                    return
            self.incomplete = bool(missing)
            how = f"did not end by {'itself' if len(missing) == 1 else 'themselves'}: killed, or without a report"
            if missing:
                self.failure = f"{plan.launcher.name} returned {self.returned}, but {_named(missing)} {how}"
        if self.failure:
            self.failure = _lines(self.failure, self.ended_before())
            say(self.failure, EXIT_STATUS_PAGE)

    def explain(self, status: int) -> None:
        """Repeat the last lines of the first rank that failed, if other output has followed them.

        If no rank reported a failure, show what the launcher said about it.
        """
        folded = self.output.folded
        if status and not self.output.quiet:
            pattern = self.plan.launcher.aborted  # such a rank may be ended before it can report
            aborted = next(filter(None, (re.match(pattern, line) for line in folded)), None) if pattern else None
            if self.returned and not self.failure:
                rank = f"rank {aborted[1]} {_ending(status)}" if aborted else ""
                if not aborted and self.unreported is not None:
                    rank = f"rank {self.unreported}: its rank_env.sh, the shell that reports how it ends, was killed"
                self.failure = _lines(rank, self.ended_before())
                say(self.failure)
            say("" if aborted else "\n".join(folded))
        own = self.failed.last_lines if self.failed else []
        if self.failed and own and own != self.output.tail.lines()[-len(own) :]:
            say("\n".join([f"the last lines of rank {self.failed.rank}:", *(f"  {line}" for line in own)]))

    def end_what_ranks_left(self) -> None:
        """End processes left by ranks that have exited: mpiexec would wait for them to close the ranks' output."""
        pid, daemons = self.child.pid, self.plan.launcher.daemons
        if self.walltime.is_asking or self.control.has_launchers:
            return  # these are children of ours too
        if self.returned is None and processes.orphans(pid) and not processes.rank_groups(pid, daemons):
            self.notice(processes.end_all(LEFTOVER_PATIENCE_S, spare=(pid,)))

    def deliver(self, number: int) -> None:
        """Forward a signal to the command or to every rank, once.

        The launcher may lose one that arrives while it starts the ranks, so rank_env.sh looks for the file ``stopped``.
        """
        if number in STOPPING and self.status_dir:
            with contextlib.suppress(OSError):
                open(os.path.join(self.status_dir, "stopped"), "w").close()
        try:
            self.control.send(number, self.child.pid)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"could not forward {signal.Signals(number).name}: {error}")

    def receive(self, number: int) -> None:
        """Handle a signal that launch received."""
        if number == signal.SIGQUIT:
            self.ask_for_stacks()
            return
        if number == signal.SIGINT and self.plan.launcher.keeps_terminal():
            return  # the terminal has sent it to the command too
        if number not in STOPPING:
            self.deliver(number)
            return
        kill = self.stop.add(number)
        self.control.stop()
        self.output.hush(interrupted=number == signal.SIGINT)
        if kill:
            self.kill()
            return
        if number == signal.SIGINT and self.stop.interrupts == 1:
            say("Ctrl-C: forwarded; waiting for the ranks to finish (again: SIGTERM, a third time: SIGKILL)")
        self.deliver(signal.SIGTERM if self.stop.interrupts == 2 else number)
        self.deadline.set(STOP_PATIENCE_S if self.plan.job.is_local else JOB_PATIENCE_S, self.kill)

    def look_at_clocks(self, last_output: float) -> None:
        """Warn the ranks before the walltime ends, and act if they have been silent or unresponsive for too long.

        Args:
            last_output: when they last printed something, on the monotonic clock.
        """
        if self.walltime.take():
            say("the walltime ends soon (--walltime-margin): sending SIGUSR1 to the ranks")
            self.deliver(signal.SIGUSR1)
        limit = self.plan.options.idle_timeout
        if self.plan.options.hang is not None and not self.is_stopping and self.has_reported_hang():
            self.idle = True
            self.output.hush()
            self.deadline.set(POLL_S, self.give_up)  # until the message has arrived
        elif limit is not None and not self.is_stopping and time.monotonic() - last_output > limit:
            self.idle = True
            self.output.hush()
            ended = self.ended_before()
            say(f"no output for {limit:g} seconds (--idle-timeout){f'; {ended}' if ended else ''}", "hangs.md#a-hang")
            self.show_stacks()
        else:
            self.deadline.look()

    def has_reported_hang(self) -> bool:
        """Return whether a rank has written a report about a hang (``--hang``)."""
        folder = stack_requests.folder_of(self.plan.env["WORDRUN_LAUNCH_RECORD"])
        return any(path.stat().st_mtime > self._begun - 1 for path in folder.glob("hang-*.txt"))

    def ask_for_stacks(self) -> None:
        """Ask the ranks to print their stacks. For programs that would not answer, py-spy prints them."""
        record = self.plan.env["WORDRUN_LAUNCH_RECORD"]
        try:
            stack_requests.request(stack_requests.folder_of(record))
        except OSError as error:
            say(f"cannot ask the ranks where they are: {error.filename}: {error.strerror}")
            return
        answers = self.runs_wordrun or self.plan.options.hang is not None
        shown = [processes.spy(rank) for rank in ([] if answers else self.ranks_here())]
        others = "programs without wordrun answer only under launch --hang or with py-spy (wordrun[hang])"
        say("asked the ranks where they are" + ("" if answers or any(shown) else f" ({others})"))

    @property
    def runs_wordrun(self) -> bool:
        """Whether the command is wordrun, or has started it, which leaves a mark."""
        marked = bool(self.status_dir) and os.path.exists(os.path.join(self.status_dir, MARK))
        return self.plan.options.runs_wordrun or marked

    def ranks_here(self) -> list[int]:
        """Return the Python processes on this host that are ranks."""
        return self.control.ranks_here(self.child.pid)

    def show_stacks(self) -> None:
        """Print where the ranks are stuck: with py-spy if it is installed and permitted, else with faulthandler.

        faulthandler, enabled by PYTHONFAULTHANDLER, prints all threads' stacks on SIGABRT; the process then ends.
        """
        launcher, ranks = self.plan.launcher, self.ranks_here()
        self.control.stop()
        shown = [processes.spy(rank) for rank in ranks]
        if any(shown):
            self.give_up()
            return
        say("py-spy is not installed or not permitted, so each rank prints its stacks and aborts (SIGABRT)")
        with processes.paused(self.child.pid, launcher.daemons):
            if launcher.is_step:
                self.deliver(signal.SIGABRT)  # on all hosts
                time.sleep(processes.ABORT_S)
            else:
                processes.abort_in_turn(ranks)
        self.deadline.set(FAILURE_PATIENCE_S, self.give_up)

    def give_up(self) -> None:
        """Terminate ranks that outlive a failed one or have been silent for too long."""
        self.control.stop()
        self.ends_others = self.failed is not None
        say("stopping the other ranks" if self.failed or self.saved else "stopping the job")
        self.deliver(signal.SIGTERM)
        self.deadline.set(FAILURE_PATIENCE_S, self.kill)

    def add_failure(self, what: str) -> None:
        """Print and record one more thing that has failed."""
        self.failure = f"{self.failure}\n{what}".strip()
        say(what)

    def kill(self) -> None:
        """Kill all processes of the job."""
        self.killed = True
        self.deadline.clear()
        self.control.kill()
        if self.plan.launcher.is_step:
            self.deliver(signal.SIGKILL)
        if not self.plan.launcher.keeps_terminal():
            processes.send(self.child.pid, signal.SIGKILL, group=True)
        self.notice(processes.end_all(0))

    def status(self) -> int:
        """Return the exit status of the launch."""
        if self.idle:
            return IDLE_STATUS
        if self.saved or self.returned == REQUEUE:
            return REQUEUE
        if self.stop.first:
            return 128 + self.stop.first
        if self.failed:
            return self.failed.status
        if self.control.succeeded:
            return 0
        if self.incomplete:
            return 1
        if self.died_of_input:
            return 0
        return self.returned if self.returned is not None else 1


def _lines(*lines: str) -> str:
    return "\n".join(filter(None, lines))


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _ending(status: int) -> str:
    if status == 0:
        return "ended with exit status 0, but wordrun had not finished: os._exit(0), exit(0) in C, or an ignored kill"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"ended with exit status {status}"
