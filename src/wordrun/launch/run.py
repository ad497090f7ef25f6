"""Run a launch plan and clean up after it."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import IO, Any

from wordrun.errors import REQUEUE, ConfigError
from wordrun.launch import processes
from wordrun.launch.launchers.base import PASSED_ON
from wordrun.launch.meeting import Meeting
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.record import Record
from wordrun.launch.supervisor import LEFTOVER_PATIENCE_S, POLL_S, Supervisor, say
from wordrun.launch.tail import Tail

CANNOT_START = 126


def run(plan: LaunchPlan, last_lines: list[str] | None = None) -> int:
    """Run ``plan`` to completion and return its exit status.

    Args:
        plan: what to start.
        last_lines: receives the last lines that the launcher and the ranks print on stderr.
    """
    idle, margin = plan.options.idle_timeout is not None, plan.options.walltime_margin
    status_dir = plan.decided.status_dir if plan.launcher.in_between else ""
    if status_dir:
        try:
            os.makedirs(os.path.dirname(status_dir), exist_ok=True)
            os.mkdir(status_dir, 0o700)
        except OSError as error:
            remedy = "point TMPDIR to a folder of yours" if plan.job.is_local else "launch from a folder of yours"
            raise ConfigError(f"cannot create {status_dir}: {error.strerror}; {remedy}") from None
    try:
        for path, text in plan.files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        record, env = _begin_record(plan)
        processes.adopt_orphans()
        with _signals() as arrived:
            try:
                child = _start(plan, env, stdout=idle, stderr=idle or plan.ranks.np > 1 or last_lines is not None)
            except OSError as error:  # no interpreter, or an argument list that is too long
                say(f"cannot start {plan.argv[0]}: {error.strerror}")
                status = CANNOT_START
            else:
                job = Supervisor(plan, child, status_dir)
                if margin:
                    job.warn_before_end(margin)
                meeting = Meeting(plan, child.pid)
                meeting.begin()
                status = _watch(job, arrived)
                apart = meeting.end()
                if apart and status == 0:
                    say(apart)
                job.repeat_what_failed()
                if status == REQUEUE:
                    run_id = plan.env["WORDRUN_RUN_ID"]
                    say(f"stopped early, with its state saved (exit status {REQUEUE}): run {run_id} can be resumed")
                if last_lines is not None and not job.stopped_by:
                    last_lines += job.tail.lines()
    finally:
        if status_dir:
            shutil.rmtree(status_dir)
    if record:
        try:
            record.end(status)
        except OSError as error:
            say(f"cannot complete {record.path}: {error.strerror}")
    return status


def _begin_record(plan: LaunchPlan) -> tuple[Record | None, dict[str, str]]:
    env = plan.environment(os.environ)
    record = Record(plan)
    try:
        record.begin()
    except OSError as error:
        say(f"no record of this launch: {error.filename}: {error.strerror}")
        del env["WORDRUN_LAUNCH_RECORD"]
        return None, env
    return record, env


def _start(plan: LaunchPlan, env: dict[str, str], *, stdout: bool, stderr: bool) -> subprocess.Popen[bytes]:
    """Start the command; ``stdout`` and ``stderr`` say which of its streams pass through launch."""
    own_group = not plan.launcher.keeps_terminal()
    return subprocess.Popen(
        plan.argv, env=env, bufsize=0,
        stdout=subprocess.PIPE if stdout else None, stderr=subprocess.PIPE if stderr else None,
        preexec_fn=processes.before_exec(own_group=own_group, death_signal=plan.launcher.death_signal),
    )  # fmt: skip


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a file descriptor from which to read the numbers of arriving signals, in order."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before: dict[signal.Signals, Any] = {}
    for number in (*PASSED_ON, signal.SIGCHLD):
        # A signal ignored on entry (nohup, a shell's background job) stays ignored.
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for caught, handler in before.items():
            signal.signal(caught, handler)
        os.close(reader)
        os.close(writer)


def _watch(job: Supervisor, arrived: int) -> int:
    """Wait for the job to end, passing on signals and piped output; return its status."""
    selector = selectors.DefaultSelector()
    selector.register(arrived, selectors.EVENT_READ)
    for source, sink in ((job.child.stdout, 1), (job.child.stderr, 2)):
        if source is not None:
            selector.register(source, selectors.EVENT_READ, sink)
    last_output, limit = time.monotonic(), job.plan.options.idle_timeout
    while job.returned is None:
        for key, _ in selector.select(POLL_S):
            if key.fd == arrived:
                for number in os.read(arrived, 512):
                    if number != signal.SIGCHLD:
                        job.receive(number)
            else:
                if key.data == 2:
                    job.look_for_failure()  # before other ranks' output follows the failed rank's
                _pump(selector, key, job.tail)
                last_output = time.monotonic()
        job.notice(processes.reap())
        if job.returned is not None:
            _drain(selector, job.tail)  # so that the ranks' last output precedes launch's
        if job.returned is not None or time.monotonic() >= job.next_look:
            job.look()
        if time.time() > job.warn_at and job.returned is None:
            job.warn_at = float("inf")
            say("the walltime ends soon (--walltime-margin): SIGUSR1 to the ranks")
            job.deliver(signal.SIGUSR1)
        now = time.monotonic()
        silent = limit is not None and not job.stopped_by and not job.idle and now - last_output > limit
        if silent and job.returned is None:
            job.idle = True
            say(f"no output for {limit:g} seconds (--idle-timeout)")
            job.show_stacks()
        elif now > job.deadline and job.returned is None:
            job.at_deadline()
    processes.end_all(LEFTOVER_PATIENCE_S)
    _drain(selector, job.tail)
    for stream in (job.child.stdout, job.child.stderr):
        if stream is not None:
            stream.close()
    return job.status()


def _drain(selector: selectors.BaseSelector, tail: Tail) -> None:
    """Forward everything written so far."""
    while keys := [key for key, _ in selector.select(0) if key.data is not None]:
        for key in keys:
            _pump(selector, key, tail)


def _pump(selector: selectors.BaseSelector, key: selectors.SelectorKey, tail: Tail) -> None:
    """Forward the job's output byte for byte; stop at its end, or when our own output is closed.

    Stderr also goes to ``tail``.
    """
    stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
    chunk = os.read(key.fd, 65536)
    if key.data == 2:
        tail.add(chunk)
    try:
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(key.data, rest) :]
    except BrokenPipeError:
        chunk = b""
    if not chunk:
        selector.unregister(stream)
        stream.close()
