"""Run a launch plan and clean up after it."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from wordrun.common import exit_reports
from wordrun.common.errors import REQUEUE, ConfigError
from wordrun.common.files import why
from wordrun.launch import leftovers, processes, stdin
from wordrun.launch.connection_watch import ConnectionWatch
from wordrun.launch.job import short
from wordrun.launch.launchers.base import PASSED_ON
from wordrun.launch.lost_hosts import lost_hosts
from wordrun.launch.messages import say
from wordrun.launch.oom import OomWatch
from wordrun.launch.output import MOST_RANKS, PARTIAL_S, Output, Pipe
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.rank_control import RankControl, StartLauncher
from wordrun.launch.record import Record
from wordrun.launch.retries import Outcome, Retries, reported_fault
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.supervisor import LEFTOVER_PATIENCE_S, POLL_S, Supervisor

CANNOT_START = 126


def run(plan: LaunchPlan, *, keep_lines: bool = False, retries: Retries | None = None) -> Outcome:
    """Run ``plan`` to completion and return how it ended.

    Args:
        plan: what to start.
        keep_lines: whether to return the last lines that the launcher and the ranks print on stderr.
        retries: how often the ranks may be restarted within this launch.
    """
    status_dir = plan.decided.status_dir if plan.launcher.in_between else ""
    if status_dir:
        try:
            os.mkdir(status_dir, 0o700)
            leftovers.claim(status_dir)
        except OSError as error:
            remedy = f"{'point TMPDIR to' if plan.job.is_local else 'launch from'} a folder that you can write to"
            raise ConfigError(f"cannot create {status_dir}: {why(error)}; {remedy}") from None
    failure = ""
    others = leftovers.clear(os.path.dirname(plan.decided.status_dir), this=status_dir)
    say(SCHEDULERS[plan.job.scheduler].with_others(plan.job, plan.options, others))
    try:
        _write_files(plan)
        record, env = _begin_record(plan)
        processes.adopt_orphans()
        forwarder = stdin.forward(plan, status_dir)
        watch = OomWatch()
        output = _output(plan, status_dir)
        control: RankControl = resolve_name(plan.starter.control)(
            plan, retries or Retries(), output, status_dir, record
        )
        env |= control.variables()
        passes = plan.options.idle_timeout is not None or plan.launcher.in_between
        with _signals() as (arrived, ignored):
            try:
                child = _start(
                    plan,
                    env,
                    ignored,
                    stdin=stdin.is_inherited(plan, status_dir, forwarder),
                    stdout=passes,
                    stderr=passes or keep_lines,
                )
            except OSError as error:  # no interpreter, or an argument list that is too long
                say(f"cannot start {plan.argv[0]}: {error.strerror}")
                output.close()
                outcome = Outcome(CANNOT_START)
            else:
                _read(child, output)
                job = Supervisor(plan, child, output, control)
                status = _supervise(job, arrived, partial(_start_launcher, env, ignored, output))
                outcome = _outcome(job, status, watch, keep_lines=keep_lines)
                failure = job.failure
            missed = forwarder.close() if forwarder else ""
            say(missed if outcome.status == 0 else "", "launch.md#any-torch-script")
    finally:
        if status_dir:
            shutil.rmtree(status_dir, ignore_errors=True)  # a rank on another host may write there even now
            exit_reports.take_unfinished(exit_reports.unfinished_prefix(plan.decided.launch_id, ""))
        leftovers.clear_memory()
    if record:
        try:
            record.end(outcome.status, failure, output.folded)
        except OSError as error:
            say(f"cannot complete {record.path}: {why(error)}")
    return outcome


def _supervise(job: Supervisor, arrived: int, start: StartLauncher) -> int:
    """Supervise a job until it has ended, say why it has failed, and return its status.

    Args:
        job: the job, which has started.
        arrived: the file descriptor from which to read the numbers of signals.
        start: starts further launchers.
    """
    if job.plan.options.walltime_margin:
        job.warn_before_end(job.plan.options.walltime_margin)
    job.control.begin(start)
    connections = ConnectionWatch(job.plan, job.child.pid, pids=job.control.pids)
    connections.begin()
    status = _watch(job, arrived)
    separate = connections.end()
    say(job.output.lost)
    status = status or int(bool(job.output.lost))
    say(separate if status == 0 else "", "launch.md#any-torch-script")
    job.explain(status)
    return status


def _outcome(job: Supervisor, status: int, watch: OomWatch, *, keep_lines: bool) -> Outcome:
    """Return how the launch ended with ``status``; say so if memory ran out."""
    rank, memory, stopped = None, "", bool(job.stop.first)
    killed_status = job.plan.launcher.killed_status
    if status not in (0, REQUEUE) and not stopped:
        if not (job.failed or job.idle) and job.output.names_kill:
            status = killed_status  # the status that the launcher returns if its cleanup succeeds
        rank = job.failed.rank if job.failed else 0 if job.plan.ranks.np == 1 else None
        memory = watch.killed_for_memory() or job.control.memory
        say(memory, "plan.md#before-every-run")
    lines = [*job.output.folded, *job.output.tail.lines()] if not stopped else []
    at = job.failed.at if job.failed else time.time()
    outcome = Outcome(status, rank, memory, lines if keep_lines else [], at=at, killed_status=killed_status)
    outcome = job.control.outcome(outcome, reported=bool(job.failed))
    if stopped or job.idle or memory or status in (0, ConfigError.exit_status, REQUEUE):
        return outcome
    # After an exception in the program, a rank has reported its end, and the launcher has ended by itself. A rank that
    # was killed may have been killed because of the loss of another host.
    suspect = not job.failed or job.failed.status > 128 or job.killed or outcome.lost or reported_fault(lines, status)
    if hosts := lost_hosts(job.plan) if suspect else ():
        named = f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
        what = f"{named} lost: {job.plan.launcher.name} can start nothing there now"
        job.add_failure(what)
        return replace(outcome, lost=named, lost_hosts=hosts, cause="lost host")
    return outcome


def _output(plan: LaunchPlan, status_dir: str) -> Output:
    """Return the output, with pipes for each rank if all ranks run on this machine."""
    launcher, options = plan.launcher, plan.options
    here = plan.job.is_local or [short(host) for host in plan.hosts] == [short(socket.gethostname())]
    # A file may name other hosts, and with options of its own the launcher may label or redirect the ranks' output.
    own = here and not (options.hostfile or options.launcher_args) and plan.ranks.np <= MOST_RANKS
    noise = "|".join(filter(None, (launcher.noise, plan.starter.noise)))
    pipes = status_dir if own else ""
    output = Output(noise, launcher.own_lines, pipes, killed=launcher.killed, launch_id=plan.decided.launch_id)
    if output.pipes:
        output.open_pipes(plan.ranks.np)
    return output


def _write_files(plan: LaunchPlan) -> None:
    for path, text in plan.files.items():
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        except OSError as error:
            remedy = "set XDG_STATE_HOME to a folder that you can write to"
            raise ConfigError(f"cannot write {path}: {why(error)}; {remedy}") from None


def _begin_record(plan: LaunchPlan) -> tuple[Record | None, dict[str, str]]:
    """Write launch.json, and return it with the launcher's environment, which names the file if it is there."""
    env = plan.environment(os.environ)
    record = Record(plan)
    try:
        record.begin()
    except OSError as error:
        say(f"no record of this launch: {error.filename or record.path}: {why(error)}")
        del env["WORDRUN_LAUNCH_RECORD"]
        return None, env
    return record, env


def _start(
    plan: LaunchPlan, env: Mapping[str, str], ignored: Sequence[int], *, stdin: bool, stdout: bool, stderr: bool
) -> subprocess.Popen[bytes]:
    """Start the command, which ignores the signals ``ignored``.

    ``stdin`` says whether it inherits launch's, ``stdout`` and ``stderr`` which of its streams pass through launch.
    """
    own_group = not plan.launcher.keeps_terminal()
    return subprocess.Popen(
        plan.argv,
        env=env,
        bufsize=0,
        stdin=None if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout else None,
        stderr=subprocess.PIPE if stderr else None,
        preexec_fn=processes.before_exec(
            own_group=own_group,
            death_signal=plan.launcher.death_signal,
            ignored=[*ignored, signal.SIGUSR1] if plan.options.trains else ignored,
        ),
    )


def _read(child: subprocess.Popen[bytes], output: Output) -> None:
    """Let what the command prints pass through ``output``."""
    for stream, sink in ((child.stdout, 1), (child.stderr, 2)):
        if stream is not None:
            with stream:
                output.add(Pipe(os.dup(stream.fileno()), sink, own=bool(output.pipes)))


def _start_launcher(
    env: Mapping[str, str], ignored: Sequence[int], output: Output, plan: LaunchPlan, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a further launcher, with the variables ``more``."""
    _write_files(plan)
    child = _start(plan, {**env, **more}, ignored, stdin=False, stdout=True, stderr=True)
    _read(child, output)
    return child


@contextlib.contextmanager
def _signals() -> Iterator[tuple[int, list[int]]]:
    """Yield a file descriptor from which to read the numbers of arriving signals, in order.

    Also yield the signals that are handled here although they were ignored on entry: the command should ignore them.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before: dict[signal.Signals, Any] = {}
    for number in (*PASSED_ON, signal.SIGQUIT, signal.SIGCHLD):
        # A signal ignored on entry (nohup, a shell's background job) stays ignored, unless it does not stop us.
        if number in (signal.SIGQUIT, signal.SIGCHLD) or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader, [signal.SIGQUIT] if before[signal.SIGQUIT] == signal.SIG_IGN else []
    finally:
        signal.set_wakeup_fd(wakeup)
        for caught, handler in before.items():
            signal.signal(caught, handler)
        os.close(reader)
        os.close(writer)


def _watch(job: Supervisor, arrived: int) -> int:
    """Wait for the job to end, passing on signals and piped output; return its status."""
    output = job.output
    output.selector.register(arrived, selectors.EVENT_READ)
    last_output, waiting = time.monotonic(), False
    while job.returned is None:
        for key in output.select(PARTIAL_S / 2 if waiting else POLL_S):
            if key.fd == arrived:
                for number in os.read(arrived, 512):
                    if number != signal.SIGCHLD:
                        job.receive(number)
            elif not isinstance(key.data, Pipe):
                key.data()  # a function that ``job.control`` has registered
            else:
                if key.data.sink == 2 or key.data.own:
                    job.look_for_failure()  # before other ranks' output follows the failed rank's
                output.pump(key.data)
                last_output = time.monotonic()
        if output.stuck:
            last_output = time.monotonic()  # the ranks may be waiting for our output to be read
        waiting = output.forward_partial()
        job.notice(processes.reap())
        if job.returned is not None:
            output.drain()  # so that the ranks' last output precedes launch's
        if job.returned is not None or time.monotonic() >= job.next_look:
            job.look()
        if job.returned is None:
            job.look_at_clocks(last_output)
    job.control.finish()
    processes.end_all(LEFTOVER_PATIENCE_S)
    output.drain()
    output.close(LEFTOVER_PATIENCE_S if job.stop.first else None)
    job.look_for_missing()
    return job.status()
