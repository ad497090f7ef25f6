"""Supervise a running launch: react to signals, failed ranks, silence and the time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wordrun.common import ends, stack_requests
from wordrun.common.errors import MARK, REQUEUE, ConfigError, ranges, short_lines
from wordrun.launch import processes
from wordrun.launch.elastic.guardians import Guardians
from wordrun.launch.launchers.base import STOPPING
from wordrun.launch.output import Output
from wordrun.launch.output_tail import lines_of
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.schedulers import SCHEDULERS

IDLE_STATUS = 124
# A job asked to stop gets time to finish its step and write its files. In a scheduler's job, which may save large
# models, the scheduler sets the limit.
STOP_PATIENCE_S = 30.0
JOB_PATIENCE_S = 600.0
# After one rank has failed, the others get this long to exit, and as long again after SIGTERM.
FAILURE_PATIENCE_S = 4.0
# A rank's last lines may arrive this much later than its exit status.
LAST_LINES_S = 2.0
# On a file system that other hosts write to, their last reports may appear this much later.
REPORTS_S = 5.0
# Processes that outlive the command get this long to close their files.
LEFTOVER_PATIENCE_S = 2.0
POLL_S = 0.25
EXIT_STATUS_PAGE = "launch.md#exit-status-and-signals"


def say(message: str, page: str = "") -> None:
    """Print a message from launch, and the section of docs/ with more to say, on stderr if anybody reads it."""
    if message and page:
        message = f"{message}\nmore: docs/{page}"
    try:
        for line in short_lines(message):
            print(f"launch: {line}", file=sys.stderr, flush=True)
    except OSError:  # the job's exit status matters more
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Supervisor:
    """The launched process, what has happened so far, and the next deadline."""

    plan: LaunchPlan
    child: subprocess.Popen[bytes]
    status_dir: str
    output: Output
    guardians: Guardians | None = None
    """Those of --elastic, which started the ranks."""
    returned: int | None = None
    """Exit status of ``child``, once it has ended."""
    interrupts: int = 0
    stopped_by: int = 0
    """The first stopping signal that launch received."""
    idle: bool = False
    failed: tuple[int, int] | None = None
    """First rank to report a failure, and its exit status."""
    failed_at: float | None = None
    """When it did, in seconds since 1970."""
    saved: bool = False
    """A rank has reported that the run has saved and can be resumed."""
    begun: float = field(default_factory=time.time)
    deadline: float = float("inf")
    """When ``at_deadline`` is called, on the monotonic clock."""
    at_deadline: Callable[[], None] = field(default=lambda: None)

    warn_at: float = float("inf")
    """When to send SIGUSR1 because the walltime ends, in seconds since 1970."""
    asking: threading.Thread | None = None
    """The thread that asks the scheduler when the walltime ends."""
    failure: str = ""
    """How the first rank failed, or which ranks have not ended by themselves."""
    incomplete: bool = False
    """The launcher has returned 0, but there are ranks that have not ended by themselves, or had not finished."""
    last_lines: list[str] = field(default_factory=list)
    """That rank's last lines."""
    listen_until: float = 0.0
    next_look: float = 0.0

    def look(self) -> None:
        """Check for failed ranks and leftover processes."""
        if self.status_dir:
            self.next_look = time.monotonic() + POLL_S
            self.look_for_failure()
            self.end_what_ranks_left()

    def notice(self, ended: Mapping[int, int]) -> None:
        """Record the exit status of ``child`` if it is in ``ended``."""
        if self.guardians:
            self.guardians.nodes.notice(ended)
        if self.child.pid in ended and self.guardians and (successor := self.guardians.nodes.successor()):
            self.child = successor
        elif self.child.pid in ended:
            code = os.waitstatus_to_exitcode(ended[self.child.pid])
            self.returned = code if code >= 0 else 128 - code
            self.child.returncode = code  # so that Popen does not wait for it

    def look_for_failure(self) -> None:
        """Read the ranks' reports; the first failure starts the clock for the other ranks."""
        self.listen()
        if self.guardians:
            self.guardians.look()
        if self.saved or not self.status_dir:
            return
        reports = self.failure_reports()
        if any(status == REQUEUE for _, _, status, _ in reports):
            self.saved = True  # whatever happens to other ranks as they exit
            self.output.hush()
            self.patience(STOP_PATIENCE_S, self.give_up)
            return
        if not reports or self.failed:
            return
        when, rank, status, host = min(reports, key=lambda report: (report[2] != 0, report))
        self.failed, self.failed_at = (rank, status or 1), when / 1e9
        self.output.hush()
        on = f" on {host}" if len(self.plan.hosts) > 1 else ""
        self.failure = "\n".join(filter(None, [f"rank {rank}{on} {_ending(status)}", self.ended_before()]))
        if (self.plan.ranks.np > 1 or not status) and not self.stopped_by and not self.idle:
            self.patience(FAILURE_PATIENCE_S, self.give_up)
            if status == ConfigError.exit_status and self.runs_wordrun:
                return  # it has said what is wrong with the options
            self.listen_until = time.monotonic() + LAST_LINES_S
            self.listen()
            say(self.failure, "" if 0 < status <= 128 else EXIT_STATUS_PAGE)

    def failure_reports(self) -> list[tuple[int, int, int, str]]:
        """Return what is reported of ranks that have failed: when [ns], which rank, its exit status and its host."""
        found = [(time.time_ns(), name, text) for name, text in self.output.reports]
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
            for entry in os.scandir(self.status_dir):
                if entry.name.isdigit():
                    with open(entry.path) as file:
                        found.append((entry.stat().st_mtime_ns, entry.name, file.read().strip()))
        return [
            (when, int(name), int(text.split()[0]), text.partition(" ")[2])
            for when, name, text in found
            if name.isdigit() and text
        ]

    def ended(self) -> set[int]:
        """Return the ranks that have ended with status 0."""
        told = {int(text) for name, text in self.output.reports if name.startswith(ends.PREFIX)}
        return told | ends.ended(self.status_dir)

    def ended_before(self) -> str:
        """Return a line with the ranks that have ended with status 0; empty: none."""
        before = self.ended() if self.plan.ranks.np > 1 else ()
        return f"{_named(before)} had ended with exit status 0" if before else ""

    @property
    def died_of_input(self) -> bool:
        """Whether SIGPIPE has killed the launcher as it forwarded its input, perhaps when the ranks had ended."""
        return self.plan.launcher.may_die_of_input and self.child.returncode == -signal.SIGPIPE

    def look_for_missing(self) -> None:
        """Find out, after a launcher that has returned 0, whether all ranks have ended by themselves, with status 0."""
        plan, guardians = self.plan, self.guardians
        unfinished = not self.status_dir and ends.take_unfinished(f"{plan.env[ends.UNFINISHED]}-")
        succeeded = self.returned == 0 or self.died_of_input
        if not succeeded or self.failed or self.saved or self.stopped_by or self.idle:
            return
        if not self.status_dir:
            self.incomplete, self.failure = unfinished, f"COMMAND {_ending(0)}" if unfinished else ""
        elif not (guardians and (guardians.succeeded or guardians.uses_mpi)):
            until = time.monotonic() + (0.0 if plan.job.is_local and len(plan.hosts) == 1 else REPORTS_S)
            while (missing := {*range(plan.ranks.np)} - self.ended()) and time.monotonic() < until:
                time.sleep(POLL_S)
                with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=self.status_dir):
                    pass  # a client of NFS lists a folder anew after it has changed it
                self.look_for_failure()
                if self.failed or self.saved:
                    return
            self.incomplete = bool(missing)
            how = f"did not end by {'itself' if len(missing) == 1 else 'themselves'}: killed, or without a report"
            if missing:
                self.failure = f"{plan.launcher.name} returned {self.returned}, but {_named(missing)} {how}"
        if self.failure:
            self.failure = "\n".join(filter(None, [self.failure, self.ended_before()]))
            say(self.failure, EXIT_STATUS_PAGE)

    def listen(self) -> None:
        """Keep the failed rank's last lines, which may arrive after its status."""
        if self.failed and not self.last_lines and time.monotonic() < self.listen_until:
            self.last_lines = lines_of(self.failed[0], self.output.lines_of(self.failed[0]))

    def explain(self, status: int) -> None:
        """Repeat the last lines of the first rank to fail, if other output has followed them.

        If no rank reported a failure, show what the launcher said about it.
        """
        own, folded = self.last_lines, self.output.folded
        if status and not self.output.quiet:
            pattern = self.plan.launcher.aborted  # such a rank may be ended before it can report
            aborted = next(filter(None, (re.match(pattern, line) for line in folded)), None) if pattern else None
            if self.returned and not self.failure:
                named = f"rank {aborted[1]} {_ending(status)}" if aborted else ""
                self.failure = "\n".join(filter(None, [named, self.ended_before()]))
                say(self.failure)
            say("" if aborted else "\n".join(folded))
        if self.failed and own and own != self.output.tail.lines()[-len(own) :]:
            say("\n".join([f"the last lines of rank {self.failed[0]}:", *(f"  {line}" for line in own)]))

    def end_what_ranks_left(self) -> None:
        """End processes left by ranks that have exited: mpiexec would wait for them to close the ranks' output."""
        pid, daemons = self.child.pid, self.plan.launcher.daemons
        if (self.asking and self.asking.is_alive()) or (self.guardians and self.guardians.nodes.launchers):
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
        if self.guardians:
            if number == signal.SIGTERM and SCHEDULERS[self.plan.job.scheduler].is_ending(self.plan.job):
                return  # the ranks have received theirs
            if self.guardians.signal(number):
                return
            number = signal.SIGTERM if number in STOPPING else number  # no rank has started
        try:
            self.plan.launcher.send(number, self.child.pid, self.plan.job, self.plan.decided.step)
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
        self.interrupts += number == signal.SIGINT
        repeated = self.stopped_by and not self.interrupts
        self.stopped_by = self.stopped_by or number
        if self.guardians:
            self.guardians.stop()
        self.output.hush(interrupted=number == signal.SIGINT)
        if repeated or self.interrupts > 2:
            self.kill()
            return
        if number == signal.SIGINT and self.interrupts == 1:
            say("Ctrl-C: forwarded; waiting for the ranks to finish (again: SIGTERM, a third time: SIGKILL)")
        self.deliver(signal.SIGTERM if self.interrupts == 2 else number)
        self.patience(STOP_PATIENCE_S if self.plan.job.is_local else JOB_PATIENCE_S, self.kill)

    def warn_before_end(self, margin: float) -> None:
        """Find out when the job's walltime ends, in a thread because the scheduler may be slow to answer."""

        def ask() -> None:
            end = self.plan.job.ends_at
            if end is None:  # the query dies with this process, which may exit before this thread starts
                dies_with_us = processes.before_exec(own_group=False, death_signal=signal.SIGKILL)
                end = SCHEDULERS[self.plan.job.scheduler].end_time(self.plan.job.id, dies_with_us)
            if end is not None:
                self.warn_at = end - margin
            elif self.returned is None:
                say(f"--walltime-margin {margin:g}: cannot determine the job's end time, so ranks will not be warned")

        self.asking = threading.Thread(target=ask, daemon=True)
        self.asking.start()

    def look_at_clocks(self, last_output: float) -> None:
        """Warn the ranks before the walltime ends, and act if they have been silent or unresponsive for too long.

        Args:
            last_output: when they last printed something, on the monotonic clock.
        """
        if time.time() > self.warn_at:
            self.warn_at = float("inf")
            say("the walltime ends soon (--walltime-margin): sending SIGUSR1 to the ranks")
            self.deliver(signal.SIGUSR1)
        now, limit = time.monotonic(), self.plan.options.idle_timeout
        if self.plan.options.hang is not None and not self.stopped_by and not self.idle and self.has_reported_hang():
            self.idle = True
            self.output.hush()
            self.patience(POLL_S, self.give_up)  # until the message has arrived
            return
        if limit is not None and not self.stopped_by and not self.idle and now - last_output > limit:
            self.idle = True
            self.output.hush()
            ended = self.ended_before()
            say(f"no output for {limit:g} seconds (--idle-timeout){f'; {ended}' if ended else ''}", "jobs.md#a-hang")
            self.show_stacks()
        elif now > self.deadline:
            self.at_deadline()

    def patience(self, seconds: float, then: Callable[[], None]) -> None:
        """Give the job ``seconds`` to end before ``then`` is called."""
        self.deadline, self.at_deadline = time.monotonic() + seconds, then

    def has_reported_hang(self) -> bool:
        """Return whether a rank has written a report about a hang (``--hang``)."""
        folder = stack_requests.folder_of(self.plan.env["WORDRUN_LAUNCH_RECORD"])
        return any(path.stat().st_mtime > self.begun - 1 for path in folder.glob("hang-*.txt"))

    def ask_for_stacks(self) -> None:
        """Ask the ranks where they are; they print it. py-spy shows those of other programs, which do not answer."""
        record = self.plan.env["WORDRUN_LAUNCH_RECORD"]
        try:
            stack_requests.request(stack_requests.folder_of(record))
        except OSError as error:
            say(f"cannot ask the ranks where they are: {error.filename}: {error.strerror}")
            return
        answers = self.runs_wordrun or self.plan.options.hang is not None
        shown = [processes.spy(rank) for rank in ([] if answers else self.ranks_here())]
        others = "programs that do not use wordrun answer under launch --hang, or py-spy shows them: wordrun[hang]"
        say("asked the ranks where they are" + ("" if answers or any(shown) else f" ({others})"))

    @property
    def runs_wordrun(self) -> bool:
        """Whether the command is wordrun, or has started it, which leaves a mark."""
        marked = bool(self.status_dir) and os.path.exists(os.path.join(self.status_dir, MARK))
        return self.plan.options.runs_wordrun or marked

    def ranks_here(self) -> list[int]:
        """Return the Python processes on this host that are ranks."""
        if self.guardians:
            return self.guardians.ranks_here()
        return processes.pythons(self.child.pid, self.plan.decided.launch_id, self.plan.launcher.own_module)

    def show_stacks(self) -> None:
        """Print where the ranks are stuck: with py-spy if it is installed and permitted, else with faulthandler.

        faulthandler, enabled by PYTHONFAULTHANDLER, prints all threads' stacks on SIGABRT; the process then ends.
        """
        launcher, ranks = self.plan.launcher, self.ranks_here()
        if self.guardians:
            self.guardians.stop()
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
        self.patience(FAILURE_PATIENCE_S, self.give_up)

    def give_up(self) -> None:
        """Terminate ranks that outlive a failed one or have been silent for too long."""
        if self.guardians:
            self.guardians.stop()
        say("stopping the other ranks" if self.failed or self.saved else "stopping the job")
        self.deliver(signal.SIGTERM)
        self.patience(FAILURE_PATIENCE_S, self.kill)

    def kill(self) -> None:
        """Kill all processes of the job."""
        self.deadline = float("inf")
        if self.guardians:
            self.guardians.close()
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
        if self.stopped_by:
            return 128 + self.stopped_by
        if self.failed:
            return self.failed[1]
        if self.guardians and self.guardians.succeeded:
            return 0
        if self.incomplete:
            return 1
        if self.died_of_input:
            return 0
        return self.returned if self.returned is not None else 1


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _ending(status: int) -> str:
    if status == 0:
        return "ended with exit status 0, but wordrun had not finished: os._exit(0), exit(0) in C, or an ignored kill"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"ended with exit status {status}"
