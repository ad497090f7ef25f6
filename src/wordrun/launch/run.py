"""Start a Plan, watch it, and stop it so that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from wordrun.errors import REQUEUE, ConfigError
from wordrun.launch import processes
from wordrun.launch.command import Plan, step_name
from wordrun.launch.job import job_end
from wordrun.launch.record import Record
from wordrun.launch.tail import Tail, lines_of

IDLE_STATUS = 124
CANNOT_START = 126
# A job that was asked to stop may finish its step and write its files. In a scheduler's job, where large models are
# saved, the scheduler sets the limit.
STOP_PATIENCE_S = 30.0
JOB_PATIENCE_S = 600.0
# After one rank has failed the others get this long to end by themselves, and then again after SIGTERM.
FAILURE_PATIENCE_S = 4.0
# A rank's last lines come by other ways than the news of its end, and may be later by so much.
LAST_LINES_S = 2.0
# What is left when the command itself has ended: time to close a file.
LEFTOVER_PATIENCE_S = 2.0
POLL_S = 0.25

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)


def say(message: str) -> None:
    """Print one of launch's own messages: on stderr, apart from what the ranks print."""
    for line in message.splitlines():
        print(f"launch: {line}", file=sys.stderr, flush=True)


def run(
    plan: Plan,
    idle_timeout: float | None = None,
    walltime_margin: float | None = None,
    last_lines: list[str] | None = None,
) -> int:
    """Run ``plan`` to its end and return its exit status.

    Args:
        plan: what to start.
        idle_timeout: end the job after so many seconds without output; None waits for ever.
        walltime_margin: send the ranks SIGUSR1 so many seconds before the scheduler ends the job.
        last_lines: filled with the last lines that the launcher and the ranks print on stderr.
    """
    status_dir = plan.decided.status_dir if plan.launcher.kind != "local" else ""
    if status_dir:
        try:
            os.makedirs(os.path.dirname(status_dir), exist_ok=True)
            os.mkdir(status_dir, 0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot make {status_dir}: {error.strerror}; "
                + (
                    "point TMPDIR to a folder of yours"
                    if plan.job.scheduler == "none"
                    else "launch from a folder of yours"
                )
            ) from None
    try:
        for path, text in plan.files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        record, env = _begin_record(plan)
        processes.adopt_orphans()
        with _signals() as arrived:
            try:
                idle = idle_timeout is not None
                child = _start(plan, env, stdout=idle, stderr=idle or plan.np > 1 or last_lines is not None)
            except OSError as error:  # no interpreter, or an argument list that is too long
                say(f"cannot start {plan.argv[0]}: {error.strerror}")
                status = CANNOT_START
            else:
                job = _Running(plan, child, status_dir)
                if walltime_margin is not None:
                    job.asking = _ask_for_end(job, walltime_margin)
                status = _watch(job, arrived, idle_timeout)
                job.repeat_what_failed()
                if status == REQUEUE:
                    run_id = plan.env_set["WORDRUN_RUN_ID"]
                    say(f"stopped before its end, nothing lost (exit status {REQUEUE}): run {run_id} can be continued")
                if last_lines is not None and not job.stopped_by:
                    last_lines += job.tail.lines()
    finally:
        if status_dir:
            for name in os.listdir(status_dir):
                os.unlink(os.path.join(status_dir, name))
            os.rmdir(status_dir)
    if record:
        try:
            record.end(status)
        except OSError as error:
            say(f"cannot complete {record.path}: {error.strerror}")
    return status


def _ask_for_end(job: _Running, margin: float) -> threading.Thread:
    """Find out when the job's walltime ends, beside all else: a scheduler may take its time to answer."""

    def ask() -> None:
        end = job.plan.job.ends_at
        if end is None:  # who asks ends with us: this thread may be slower to begin than the job to end
            end = job_end(job.plan.job, processes.before_exec(own_group=False, death_signal=signal.SIGKILL))
        if end is not None:
            job.warn_at = end - margin
        elif job.returned is None:
            say(f"--walltime-margin {margin:g}: nobody says when this job ends, so the ranks will not be told")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def _begin_record(plan: Plan) -> tuple[Record | None, dict[str, str]]:
    env = plan.environment(os.environ)
    record = Record(plan)
    try:
        record.begin()
    except OSError as error:
        say(f"no record of this launch: {error.filename}: {error.strerror}")
        del env["WORDRUN_LAUNCH_RECORD"]
        return None, env
    return record, env


@dataclass
class _Running:
    """A job on its way: its first process, and what has happened to it so far."""

    plan: Plan
    child: subprocess.Popen[bytes]
    status_dir: str
    returned: int | None = None
    """Exit status of the first process, once it has ended."""
    interrupts: int = 0
    stopped_by: int = 0
    """The signal that we were asked to pass on and that ends jobs."""
    idle: bool = False
    failed: tuple[int, int] | None = None
    """First rank to report a failure, and its exit status."""
    saved: bool = False
    """A rank has reported that the run has saved and is to be continued."""
    deadline: float = float("inf")
    """When to lose patience, on the monotonic clock."""
    at_deadline: Callable[[], None] = field(default=lambda: None)

    warn_at: float = float("inf")
    """When to send SIGUSR1 because the walltime ends, in seconds since 1970."""
    asking: threading.Thread | None = None
    """Asks the scheduler for that."""
    tail: Tail = field(default_factory=Tail)
    """The end of what came on stderr, where that comes through us."""
    complaint: str = ""
    """How the first rank to fail did."""
    last_lines: list[str] = field(default_factory=list)
    """What that rank wrote last."""
    listen_until: float = 0.0
    next_look: float = 0.0

    @property
    def owns_group(self) -> bool:
        """Say whether the job has a process group of its own, apart from ours."""
        return not _keeps_terminal(self.plan)

    def look(self) -> None:
        """Look for what ranks have reported, and for what they have left behind."""
        if self.status_dir:
            self.next_look = time.monotonic() + POLL_S
            self.look_for_failure()
            self.end_what_ranks_left()

    def notice(self, ended: Mapping[int, int]) -> None:
        """Keep the exit status of the first process, if it is among those that have ended."""
        if self.child.pid in ended:
            code = os.waitstatus_to_exitcode(ended[self.child.pid])
            self.returned = code if code >= 0 else 128 - code
            self.child.returncode = code  # so that Popen does not wait for it

    def look_for_failure(self) -> None:
        """Read the ranks' reports; the first failure starts the clock for the other ranks."""
        self.listen()
        if self.saved or not self.status_dir:
            return
        reports = []
        for entry in os.scandir(self.status_dir):
            with open(entry.path) as file:
                text = file.read().strip()
            if text:  # else it is being written
                code, _, host = text.partition(" ")
                reports.append((entry.stat().st_mtime_ns, int(entry.name), int(code), host))
        if any(status == REQUEUE for _, _, status, _ in reports):
            self.saved = True  # whatever other ranks meet with on their way out
            self.patience(STOP_PATIENCE_S, self.give_up)
            return
        if not reports or self.failed:
            return
        _, rank, status, host = min(reports)
        self.failed = (rank, status)
        if self.plan.np > 1 and not self.stopped_by and not self.idle:
            on = f" on {host}" if len(self.plan.hosts) > 1 else ""
            self.complaint, self.listen_until = f"rank {rank}{on} {_ending(status)}", time.monotonic() + LAST_LINES_S
            self.listen()
            say(self.complaint)
            self.patience(FAILURE_PATIENCE_S, self.give_up)

    def listen(self) -> None:
        """Keep the failed rank's last lines, which may come after the news of its end."""
        if self.failed and self.complaint and not self.last_lines and time.monotonic() < self.listen_until:
            self.last_lines = lines_of(self.failed[0], self.tail.lines())

    def repeat_what_failed(self) -> None:
        """Print once more how the first rank failed, and its last lines, where others' have covered them."""
        own = self.last_lines
        if own and own != self.tail.lines()[-len(own) :]:
            say("\n".join([f"{self.complaint}; its last lines:", *(f"  {line}" for line in own)]))

    def end_what_ranks_left(self) -> None:
        """End the daemons of ranks that are gone: mpiexec would wait for them to close the ranks' output."""
        pid = self.child.pid
        if self.asking and self.asking.is_alive():
            return  # its qstat is a child of ours too
        if self.returned is None and processes.orphans(pid) and not processes.rank_groups(pid):
            self.notice(processes.end_all(LEFTOVER_PATIENCE_S, spare=pid))

    def deliver(self, number: int) -> None:
        """Pass a signal on to the command or to every rank, once."""
        kind, pid = self.plan.launcher.kind, self.child.pid
        # An order to end is SIGTERM: HUP would end Hydra's mpiexec on the spot, and the ranks with it.
        asked = signal.SIGTERM if number == signal.SIGHUP and kind != "local" else number
        if kind == "srun":
            _signal_step(self.plan, asked)
        elif kind == "local":
            processes.send(pid, number, group=self.owns_group)
        elif number in DIRECT.get(kind, ()):
            for group in processes.rank_groups(pid):
                processes.send(group, number, group=True)
        else:
            processes.send(pid, asked)

    def receive(self, number: int) -> None:
        """Act on a signal that launch itself got."""
        if number == signal.SIGINT and not self.owns_group:
            return  # the terminal has sent it to the command too
        if number not in STOPPING:
            self.deliver(number)
            return
        again = self.stopped_by != 0
        self.stopped_by = self.stopped_by or number
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts == 1:
                say("Ctrl-C: passed on; waiting for the ranks to finish (again: SIGTERM, a third time: SIGKILL)")
            if self.interrupts > 2:
                self.kill()
                return
            self.deliver(signal.SIGINT if self.interrupts == 1 else signal.SIGTERM)
        elif again and self.interrupts == 0:
            self.kill()
            return
        else:
            self.deliver(number)
        self.patience(STOP_PATIENCE_S if self.plan.job.scheduler == "none" else JOB_PATIENCE_S, self.kill)

    def patience(self, seconds: float, then: Callable[[], None]) -> None:
        """Wait ``seconds`` at most for the job's end, and do ``then`` if it has not come."""
        self.deadline, self.at_deadline = time.monotonic() + seconds, then

    def show_stacks(self) -> None:
        """Print where the ranks are stuck: by py-spy where it is installed and may look, else by faulthandler.

        faulthandler, which PYTHONFAULTHANDLER has switched on, prints all threads' stacks on SIGABRT and lets the
        process end.
        """
        looked, ranks = False, processes.pythons(self.child.pid, self.plan.decided.launch_id)
        for rank in ranks:
            looked = _spy(rank) or looked
        if looked:
            self.give_up()
            return
        say("py-spy is not installed or may not look, so each rank prints its stacks and ends (SIGABRT)")
        if self.plan.launcher.kind == "srun":
            _signal_step(self.plan, signal.SIGABRT)  # on all hosts
        else:
            processes.abort_in_turn(self.child.pid, ranks)
        self.patience(FAILURE_PATIENCE_S, self.give_up)

    def give_up(self) -> None:
        """End the ranks that outlive a failed one or a silence."""
        say("ending the other ranks" if self.failed or self.saved else "ending the job")
        self.deliver(signal.SIGTERM)
        self.patience(FAILURE_PATIENCE_S, self.kill)

    def kill(self) -> None:
        """End all processes of the job at once."""
        self.deadline = float("inf")
        if self.plan.launcher.kind == "srun":
            _signal_step(self.plan, signal.SIGKILL)
        if self.owns_group:
            processes.send(self.child.pid, signal.SIGKILL, group=True)
        self.notice(processes.end_all(0))

    def status(self) -> int:
        """Return the exit status of the whole launch."""
        if self.idle:
            return IDLE_STATUS
        if self.saved or self.returned == REQUEUE:
            return REQUEUE
        if self.stopped_by:
            return 128 + self.stopped_by
        if self.failed:
            return self.failed[1]
        return self.returned if self.returned is not None else 1


# Signals that the launcher would not pass on, or would take for an order to kill: ranks get them from us.
DIRECT = {
    "hydra": (signal.SIGUSR2,),  # knows INT, TERM and USR1
    "openmpi": PASSED_ON,  # answers INT and TERM with SIGKILL to the ranks after a moment
    "torchrun": (signal.SIGUSR1, signal.SIGUSR2),  # dies of them and leaves the ranks
}


def _spy(pid: int) -> bool:
    """Print a process's stacks by py-spy; say whether that was possible."""
    program = shutil.which("py-spy") or os.path.join(sys.prefix, "bin", "py-spy")
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode == 0:
        sys.stderr.write(f"{done.stdout}\n")
        sys.stderr.flush()
    return done.returncode == 0


def _signal_step(plan: Plan, number: int) -> None:
    """Signal the ranks of an srun, which are no processes of ours, by the step's name.

    A signal to srun itself would not do: it answers SIGTERM with SIGKILL to the ranks at once. Where SLURM is ending
    the whole job, it has sent them SIGTERM itself, and a second one would end them before they have saved.
    """
    if number == signal.SIGTERM and _is_ending(plan.job.id):
        return
    steps = ["squeue", "--noheader", "--steps", "--jobs", plan.job.id, "--format", "%i %j"]
    try:
        listed = subprocess.run(steps, capture_output=True, text=True, timeout=10, check=False).stdout
        for line in listed.splitlines():
            step, _, name = line.partition(" ")
            if name.strip() == step_name(plan.decided):
                words = ["scancel", f"--signal={signal.Signals(number).name}", step]
                subprocess.run(words, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"could not ask SLURM to pass {signal.Signals(number).name} on: {error}")


def _is_ending(job_id: str) -> bool:
    """Say whether SLURM is about to end a job: cancelled, requeued, preempted, or out of time."""
    ask = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        state = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return False
    return state != [] and state[0] != "RUNNING"


def _keeps_terminal(plan: Plan) -> bool:
    """Say whether the command reads the terminal itself, as pdb and a shell do: then it stays in our group."""
    return plan.launcher.kind == "local" and sys.stdin is not None and sys.stdin.isatty()


def _start(plan: Plan, env: dict[str, str], *, stdout: bool, stderr: bool) -> subprocess.Popen[bytes]:
    """Start the command; what it writes on ``stdout`` and ``stderr`` comes through us where that is asked for."""
    # These end their ranks on SIGTERM and leave them on SIGKILL; Hydra's and Open MPI's go with it either way.
    remote = plan.launcher.kind in ("torchrun", "srun", "pals")
    death_signal = signal.SIGTERM if remote else signal.SIGKILL
    return subprocess.Popen(
        plan.argv, env=env, bufsize=0,
        stdout=subprocess.PIPE if stdout else None, stderr=subprocess.PIPE if stderr else None,
        preexec_fn=processes.before_exec(own_group=not _keeps_terminal(plan), death_signal=death_signal),
    )  # fmt: skip


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor from which the numbers of arriving signals are read, in their order."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before: dict[signal.Signals, Any] = {}
    for number in (*PASSED_ON, signal.SIGCHLD):
        # One that was ignored from the start (nohup, a shell's background job) stays so.
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


def _watch(job: _Running, arrived: int, idle_timeout: float | None) -> int:
    """Wait for the job's end, passing on signals and, where they are piped, its output; return its status."""
    selector = selectors.DefaultSelector()
    selector.register(arrived, selectors.EVENT_READ)
    for source, sink in ((job.child.stdout, 1), (job.child.stderr, 2)):
        if source is not None:
            selector.register(source, selectors.EVENT_READ, sink)
    last_output = time.monotonic()
    while job.returned is None:
        for key, _ in selector.select(POLL_S):
            if key.fd == arrived:
                for number in os.read(arrived, 512):
                    if number != signal.SIGCHLD:
                        job.receive(number)
            else:
                if key.data == 2:
                    job.look_for_failure()  # before another rank's words cover a failed one's
                _pump(selector, key, job.tail)
                last_output = time.monotonic()
        job.notice(processes.reap())
        if job.returned is not None:
            _drain(selector, job.tail)  # the ranks' last words come before ours
        if job.returned is not None or time.monotonic() >= job.next_look:
            job.look()
        if time.time() > job.warn_at and job.returned is None:
            job.warn_at = float("inf")
            say("the walltime ends soon (--walltime-margin): SIGUSR1 to the ranks")
            job.deliver(signal.SIGUSR1)
        now = time.monotonic()
        silent = idle_timeout is not None and not job.stopped_by and not job.idle and now - last_output > idle_timeout
        if silent and job.returned is None:
            job.idle = True
            say(f"no output for {idle_timeout:g} seconds (--idle-timeout)")
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
    """Pass on all that has been written up to now."""
    while keys := [key for key, _ in selector.select(0) if key.data is not None]:
        for key in keys:
            _pump(selector, key, tail)


def _pump(selector: selectors.BaseSelector, key: selectors.SelectorKey, tail: Tail) -> None:
    """Pass on, byte for byte, what the job has written; stop at the end, or where nobody reads us any more.

    Stderr goes to ``tail`` too.
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


def _ending(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - 128).name} (exit status {status})"
    return f"ended with exit status {status}"
