"""Find and signal the descendants of this process, on Linux through /proc and elsewhere through ps."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from wordrun.common.files import read_proc

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# By then, a process has printed its stacks, even if it takes longer to dump core.
ABORT_S = 1.0


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    name: str


def descendants(pid: int, without: Collection[int] = ()) -> list[Process]:
    """Return the living processes below ``pid``, parents first, except those in ``without`` and their descendants."""
    children: dict[int, list[Process]] = {}
    for process in _table():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [pid]
    while todo:
        below = [process for process in children.get(todo.pop(0), []) if process.pid not in without]
        found += below
        todo += [process.pid for process in below]
    return found


def rank_groups(pid: int, daemons: tuple[str, ...]) -> list[int]:
    """Return the process groups of the ranks started by the launcher ``pid``, one per rank.

    Args:
        pid: the launcher.
        daemons: name prefixes of the processes between it and the ranks, each in a separate process group.
    """
    ranks: list[int] = []
    inside = {pid}
    for process in descendants(pid):
        if process.parent not in inside:
            continue  # a child of a rank
        if process.group != process.pid or process.name.startswith(daemons):
            inside.add(process.pid)
        else:
            ranks.append(process.group)
    return ranks


def pythons(pid: int, launch_id: str, own_module: str = "") -> list[int]:
    """Return the Python processes on this host that are ranks of a launch, without their descendants.

    Args:
        pid: the launcher, their ancestor unless a scheduler's daemon started them.
        launch_id: the launch's WORDRUN_LAUNCH_ID, which identifies the ranks that the daemon started (Linux).
        own_module: the Python module that the launcher's own processes run, if any; the ranks are their descendants.
    """
    table = {process.pid: process for process in _table()}
    mine = {process.pid for process in descendants(pid)}
    setting = f"WORDRUN_LAUNCH_ID={launch_id}"
    found = {
        process.pid
        for process in table.values()
        if process.name.startswith(("python", "pypy"))
        and not (own_module and own_module in read_proc(f"/proc/{process.pid}/cmdline"))
        and (process.pid in mine or setting in read_proc(f"/proc/{process.pid}/environ").split("\0"))
    }

    def is_below_another(process: Process) -> bool:
        above = table.get(process.parent)
        return above is not None and (above.pid in found or is_below_another(above))

    return [number for number in sorted(found) if not is_below_another(table[number])]


def of_launch(pid: int, launch_id: str, *, is_step: bool) -> set[int]:
    """Return the processes of a launch on this host: those below the launcher ``pid``, or those of its step (Linux)."""
    if not is_step:
        return {pid, *_below(pid)}
    setting = f"WORDRUN_LAUNCH_ID={launch_id}"
    return {each.pid for each in _table() if setting in read_proc(f"/proc/{each.pid}/environ").split("\0")}


def _below(pid: int) -> Iterator[int]:
    """Yield the processes below ``pid``, without reading the table of all processes of the host where that is possible.

    The kernel may leave out a process while another one ends, so this is for callers that look repeatedly.
    """
    if not os.path.exists("/proc/thread-self/children"):
        yield from (process.pid for process in descendants(pid))
        return
    todo = [pid]
    for parent in todo:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                todo += map(int, read_proc(f"/proc/{parent}/task/{thread}/children").split())
    yield from todo[1:]


def spy(pid: int) -> bool:
    """Print a process's stacks with py-spy; return whether that worked."""
    program = shutil.which("py-spy") or os.path.join(sys.prefix, "bin", "py-spy")
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode == 0:
        sys.stderr.write(f"{done.stdout}\n")
        sys.stderr.flush()
    return done.returncode == 0


def abort_in_turn(ranks: list[int]) -> None:
    """Send SIGABRT to one rank after another, so that their stacks are not interleaved."""
    for rank in ranks:
        send(rank, signal.SIGABRT)
        deadline = time.monotonic() + ABORT_S
        while time.monotonic() < deadline and any(process.pid == rank for process in _table()):
            time.sleep(0.01)


@contextlib.contextmanager
def paused(launcher: int, daemons: tuple[str, ...]) -> Iterator[None]:
    """Pause ``launcher`` and its daemons: they would kill the other ranks once the first one aborts."""
    above = [launcher, *(p.pid for p in descendants(launcher) if p.name.startswith(daemons))]
    for pid in above:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in above:
            send(pid, signal.SIGCONT)


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process or a group that may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process (Linux)."""
    return read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] == ["T"]


def is_running(pid: int) -> bool:
    """Return whether a process has not ended (Linux; elsewhere True)."""
    state = read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return sys.platform != "linux" or (bool(state) and state[0] not in "ZX")


def orphans(child: int) -> bool:
    """Return whether launch has adopted any processes, that is, has children other than ``child`` (Linux)."""
    return any(int(pid) != child for pid in read_proc(f"/proc/self/task/{os.getpid()}/children").split())


def end_all(patience_s: float, spare: Collection[int] = ()) -> dict[int, int]:
    """End all descendants of this process: SIGTERM, then SIGKILL for any that remain after ``patience_s``.

    Args:
        patience_s: seconds between the two signals.
        spare: children to leave alone, with their descendants.

    Returns:
        The wait statuses of the children reaped meanwhile, by pid.
    """
    ended: dict[int, int] = {}
    deadline = time.monotonic() + patience_s
    signalled: set[int] = set()
    while left := descendants(os.getpid(), spare):
        late = time.monotonic() >= deadline
        for process in left:
            if late:
                send(process.pid, signal.SIGKILL)
            elif process.pid not in signalled:
                signalled.add(process.pid)
                send(process.pid, signal.SIGTERM)
        ended |= reap()
        if time.monotonic() >= deadline + 5:
            break  # stuck in the kernel and unkillable
        time.sleep(0.02)
    return ended | reap()


def reap() -> dict[int, int]:
    """Reap the children that have ended; return their wait statuses by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def adopt_orphans() -> None:
    """Adopt descendants whose parent exits, so that none escapes (Linux)."""
    if sys.platform == "linux":
        _prctl()(PR_SET_CHILD_SUBREAPER, 1)


def before_exec(*, own_group: bool, death_signal: int, ignored: Iterable[int] = ()) -> Callable[[], None]:
    """Return a function for a child to call before exec: it leaves launch's process group, and dies with launch.

    ``ignored`` are signals that it ignores until it handles them.
    """
    prctl = _prctl() if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if own_group:
            os.setpgid(0, 0)
        if prctl:
            prctl(PR_SET_PDEATHSIG, death_signal)
            if os.getppid() != parent:
                os.kill(os.getpid(), death_signal)

    return prepare


def _prctl() -> Callable[[int, int], None]:
    import ctypes

    function = ctypes.CDLL(None).prctl

    def call(option: int, value: int) -> None:
        function(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))

    return call


def _table() -> Iterator[Process]:
    if sys.platform != "linux":
        yield from _table_of_ps()
        return
    for entry in filter(str.isdigit, os.listdir("/proc")):
        # The name is in parentheses and may itself contain spaces and parentheses.
        begin, _, rest = read_proc(f"/proc/{entry}/stat").rpartition(")")
        state, parent, group, *_ = rest.split() or ["X", "0", "0"]  # empty: the process has just ended
        if state not in "ZX":
            yield Process(int(entry), int(parent), int(group), begin.partition("(")[2])


def _table_of_ps() -> Iterator[Process]:
    run = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid=,stat=,comm="], capture_output=True, text=True)
    for line in run.stdout.splitlines():
        pid, parent, group, state, *name = line.split(None, 4)
        if not state.startswith("Z"):
            yield Process(int(pid), int(parent), int(group), os.path.basename(name[0]) if name else "")
