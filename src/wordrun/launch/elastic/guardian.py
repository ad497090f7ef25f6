"""The guardian: the process that ``launch --elastic`` starts on each node, and that starts the node's ranks.

The guardian imports what the ranks will import and then forks them, so that a restart of the ranks needs no imports. It
starts and kills ranks when ``launch`` tells it to, and reports how they end. When the connection to ``launch`` closes,
the guardian kills its ranks and exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from wordrun.common import exit_reports, slurm
from wordrun.common.listener import UnfitError
from wordrun.launch import processes
from wordrun.launch.address import free_port
from wordrun.launch.elastic.connections import VARIABLE, Link
from wordrun.launch.environment import OWN, is_stale
from wordrun.launch.launchers.base import PASSED_ON
from wordrun.launch.oom import OomWatch
from wordrun.launch.stdin import pipe_of

CONNECT_S = 60.0
# A rank that a signal has stopped is killed after this long [s], since the others wait for it.
STOPPED_S = 10.0
# Processes that ranks left behind get this long [s] to close their files.
LEFTOVER_PATIENCE_S = 2.0
CLOSED: dict[str, Any] = {"do": "leave"}
"""The message that a guardian acts on when the connection to ``launch`` closes."""
RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames begin the tracebacks of forked ranks."""
FOR_WORDRUN = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "wordrun.commands.train",
    "wordrun.train.trainer",
    "wordrun.train.language",
)
"""Modules that every rank of wordrun imports. Importing them starts neither threads of torch nor a device."""


class Guardian:
    """The ranks of a node, and the connection to ``launch``.

    Args:
        link: the connection.
        node: the number of this node.
    """

    def __init__(self, link: Link, node: int) -> None:
        self.link, self.node = link, node
        self.setup: dict[str, Any] = {}
        """The setup that ``launch`` sends once: the command, and how to start it."""
        self.layout: list[int] = []
        """The ranks on each node; 0: the node is spare."""
        self._stopped: dict[int, float] = {}
        """The ranks that a signal has stopped, and since when."""
        self.ranks: dict[int, int] = {}
        """The living ranks by process ID."""
        self._watch = OomWatch()
        self._gate = -1
        """The writing end of a pipe from which new ranks read one byte each before they begin; -1: there is none."""
        self._mpi = os.pipe()
        """Ranks that import MPI say so here."""
        os.set_blocking(self._mpi[0], False)
        self._wakeup, writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writer, False)
        # Signals for the ranks come through launch; those that reach this process directly are for launch to handle.
        numbers = (*PASSED_ON, signal.SIGQUIT, signal.SIGCHLD)
        self._before = {number: signal.signal(number, _nothing) for number in numbers}
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        processes.adopt_orphans()

    def serve(self) -> tuple[int, dict[str, Any]] | None:
        """Obey ``launch`` until the end. In each forked rank, return its number and the message that starts it."""
        while True:
            ready, _, _ = select.select([self.link.socket.fileno(), self._wakeup], [], [], 1 if self._stopped else None)
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
                self._reap()
            self._kill_stopped()
            try:
                messages = self.link.receive() if self.link.socket.fileno() in ready else []
            except UnfitError:
                messages = None
            for message in messages if messages is not None else [CLOSED]:
                action = message.get("do")
                if action == "setup":
                    self.setup = message
                    import_before(message)
                    gc.collect()
                    gc.freeze()  # else garbage collection in a rank would copy all shared memory
                    self.link.send(event="ready", port=free_port())
                elif action == "start":
                    if (rank := self._start(message)) is not None:
                        return rank, message
                    self.link.send(event="started", pids={rank: pid for pid, rank in self.ranks.items()})
                elif action == "go":
                    os.write(self._gate, b"." * len(self.ranks))
                    self._close_gate()
                elif action == "signal":
                    for pid in self.ranks:
                        processes.send(pid, message["number"], group=True)
                elif action == "end":
                    self._end()
                    self.link.send(event="ended", port=free_port())
                else:
                    self._end(LEFTOVER_PATIENCE_S)
                    return None

    def own_ranks(self) -> range:
        """Return the numbers of this node's ranks."""
        before = sum(self.layout[: self.node])
        return range(before, before + self.layout[self.node])

    def _start(self, message: Mapping[str, Any]) -> int | None:
        """Fork this node's ranks; return None here and, in each of them, its number once all nodes have theirs."""
        self._watch, self.layout = OomWatch(), message["layout"]
        reader, self._gate = os.pipe()
        prepare = processes.before_exec(own_group=True, death_signal=signal.SIGKILL)
        for rank in self.own_ranks():
            exit_reports.take_unfinished(f"{_unfinished(rank)}-")  # of a guardian here that was killed with its ranks
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # BLAS has threads, and prepares them for a fork
                pid = os.fork()
            if pid == 0:
                prepare()
                self._leave_to_rank()
                if not os.read(reader, 1):
                    os._exit(1)
                os.close(reader)
                return rank
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # the rank does the same: whoever comes first
            self.ranks[pid] = rank
        os.close(reader)
        return None

    def _leave_to_rank(self) -> None:
        """Undo, in a forked rank, what only the guardian needs."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._close_gate()
        for descriptor in (self._wakeup, self._mpi[0]):
            os.close(descriptor)
        self.link.close()

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def say_mpi(self) -> None:
        """In a rank: report that the program uses MPI, and end the process, which would be rank 0 of 1."""
        os.write(self._mpi[1], b".")
        os._exit(1)

    def _reap(self) -> None:
        """Report the ranks that have ended, those killed by a signal first."""
        ended = [(pid, os.waitstatus_to_exitcode(status)) for pid, status in processes.reap().items()]
        for pid, code in sorted(ended, key=lambda pair: pair[1]):
            if pid not in self.ranks:
                continue  # a process that a rank has left behind
            facts = {"rank": self.ranks.pop(pid), "pid": pid, "status": code if code >= 0 else 128 - code}
            unfinished = exit_reports.take_unfinished(f"{_unfinished(facts['rank'])}-") and not code
            memory, mpi = self._watch.killed_for_memory(pid) if code == -signal.SIGKILL else None, b""
            with contextlib.suppress(BlockingIOError):
                mpi = os.read(self._mpi[0], 1)
            stopped = self._stopped.pop(pid, None) is not None
            self.link.send(
                event="exit", **facts, memory=memory or "", mpi=bool(mpi), stopped=stopped, unfinished=unfinished
            )

    def _kill_stopped(self) -> None:
        """Kill the ranks that have been stopped for long enough."""
        stopped = {pid for pid in self.ranks if processes.is_stopped(pid)}
        self._stopped = {pid: self._stopped.get(pid, time.monotonic()) for pid in stopped}
        for pid, since in self._stopped.items():
            if time.monotonic() - since > STOPPED_S:
                processes.send(pid, signal.SIGKILL, group=True)

    def _end(self, patience_s: float = 0.0) -> None:
        """Kill this node's ranks and, ``patience_s`` after SIGTERM, everything that they have started."""
        for pid, rank in self.ranks.items():
            processes.send(pid, signal.SIGKILL, group=True)
            exit_reports.take_unfinished(f"{_unfinished(rank)}-")
        self.ranks.clear()
        self._close_gate()
        processes.end_all(patience_s)


def _unfinished(rank: int) -> str:
    return exit_reports.unfinished_prefix(os.environ["WORDRUN_LAUNCH_ID"], rank)


def environment(guardian: Guardian, rank: int, message: Mapping[str, Any]) -> dict[str, str]:
    """Return a rank's variables: those of this process, without the launcher's, and those of its generation."""
    kept = {name: value for name, value in os.environ.items() if name in OWN or not is_stale(name)}
    used = [count for count in guardian.layout if count]
    node = sum(count > 0 for count in guardian.layout[: guardian.node])
    local, size = guardian.own_ranks().index(rank), sum(used)
    own = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": used[node],
        "NODE_RANK": node,
        "GROUP_RANK": node,
        "ROLE_RANK": rank,
        "WORDRUN_LAUNCHER": "local",
        "WORDRUN_LAYOUT": slurm.compact_counts(used),
        exit_reports.UNFINISHED: _unfinished(rank),
        "WORDRUN_GENERATION": message["generation"],
        "TORCHELASTIC_RESTART_COUNT": message["generation"],
        "TORCHELASTIC_MAX_RESTARTS": guardian.setup["restarts"],
        "MASTER_PORT": message["port"],
    }
    own |= slurm.task_variables(os.environ, rank, local, node, used)  # srun's own describe the guardians
    return {**kept, **message["env"], **{name: str(value) for name, value in own.items()}}


def main() -> int:
    """Connect to ``launch``, and serve it; in each forked process, run the command as a rank."""
    address, port, secret, node = (*os.environ.pop(VARIABLE, "").split(), "", "", "", "")[:4]
    if not secret:
        print("launch: guardians are started by launch --elastic, not directly", file=sys.stderr)
        return 2
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, which is not in a script's path
    number, host = int(node or os.environ.get("RANK", "0")), slurm.node_name(os.environ)
    try:
        connection = socket.create_connection((address, int(port)), timeout=CONNECT_S)
    except OSError as error:
        print(f"launch: the guardian on {host} cannot reach launch at {address}:{port}: {error}", file=sys.stderr)
        return 1
    connection.settimeout(None)
    guardian = Guardian(Link(connection), number)
    guardian.link.send(event="hello", secret=secret, node=number, host=host)
    started = guardian.serve()
    if started is None:
        return 0
    _become_rank(guardian, *started)
    return 0


def _become_rank(guardian: Guardian, rank: int, message: Mapping[str, Any]) -> None:
    """Run the command in this process, as its launcher would."""
    setup = guardian.setup
    env = environment(guardian, rank, message)
    _take_cores(guardian, rank)
    for sink, name in ((1, "out"), (2, "err")):
        pipe = os.path.join(setup["pipes"], f"{rank}.{name}") if setup["pipes"] else ""
        if os.path.exists(pipe):  # each rank has its own pipes, so that lines of different ranks do not mix
            os.dup2(os.open(pipe, os.O_WRONLY), sink)
    stdin = pipe_of(setup["folder"])
    if rank or os.isatty(0) or os.path.exists(stdin):
        os.dup2(os.open(os.devnull if rank or not os.path.exists(stdin) else stdin, os.O_RDONLY), 0)
    for name in {*os.environ} - {*env}:
        del os.environ[name]
    os.environ.update((name, value) for name, value in env.items() if name)  # Python cannot set one without a name
    command = setup["command"]
    if not setup["fork"]:
        os.execvp(command[0], command)
    sys.meta_path.insert(0, _MpiNotice(guardian))
    if "numpy" in sys.modules:  # forked processes would all draw the same numbers
        sys.modules["numpy"].random.seed()
    run_python(command)


class _MpiNotice:
    """Notices the import of mpi4py's MPI, which would start MPI."""

    def __init__(self, guardian: Guardian) -> None:
        self._guardian = guardian

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Leave every module to other finders."""
        if name == "mpi4py.MPI" and sys.modules["mpi4py"].rc.initialize:
            self._guardian.say_mpi()


def _take_cores(guardian: Guardian, rank: int) -> None:
    """Bind a rank to its part of this node's cores, as launchers do in a scheduler's job."""
    ranks = guardian.own_ranks()
    if guardian.setup["bind"] and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // len(ranks)
        if each:
            place = ranks.index(rank)
            os.sched_setaffinity(0, cores[place * each : (place + 1) * each])


def run_python(command: Sequence[str]) -> None:
    """Run ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS`` in this process as ``python`` would."""
    safe = getattr(sys.flags, "safe_path", False)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path[:0] = [] if safe else [os.getcwd()]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[:0] = [] if safe else [os.path.dirname(os.path.realpath(command[0]))]
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        frames = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        raise SystemExit(1) from None


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the guardian and runpy, with which it begins."""
    first = frames
    while first and first.tb_frame.f_code.co_filename in RUNNERS:
        first = first.tb_next
    return first or frames


def import_before(setup: Mapping[str, Any]) -> None:
    """Import what the ranks will need."""
    if not setup["imports"]:
        return
    for name in ("torch", *(FOR_WORDRUN if setup["wordrun"] else ())):
        try:
            importlib.import_module(name)
        except ImportError:
            return  # the ranks may not need it
        except Exception:
            traceback.print_exc()
            return


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    raise SystemExit(main())
