"""The stacks of this process's threads, and of other ranks on this host that cannot report their own.

SIGQUIT makes faulthandler write all stacks of a process into a file in memory (``Dump``), which other processes on this
host read. faulthandler writes from the signal handler, so it works while C++ code waits or an extension holds the
interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from wordrun.common.files import read_proc

Stack = Sequence[tuple[str, int, str]]
"""File, line and function of each call, the innermost last."""
MAIN = "MainThread"
IN_TORCH = "/torch/distributed/"
COMPILERS = re.compile(
    r"/torch/_dynamo/(convert_frame|backends/common)\.py:|/torch/utils/cpp_extension\.py:"
    r"|/torch/_inductor/runtime/triton_heuristics\.py:(precompile|autotune_to_one_config|coordinate_descent_tuning)$"
    r"|/triton/compiler/compiler\.py:compile$|/triton/runtime/autotuner\.py:_bench$"
)
"""Matches FILE:FUNCTION of calls that are on the stack only while torch (2.8 to 2.13) or Triton compiles: the forward
pass, the backward pass when it is first called, C++ extensions, and kernels. If a library renames them, compiling
counts as no progress."""
OWN = str(Path(__file__).parents[2])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
STATES = {"T": "stopped (SIGSTOP or SIGTSTP)", "t": "stopped by a debugger", "D": "waiting in the kernel (state D)"}
# Time for a process to write its stacks, also where it must first get a core.
DUMP_S = 3.0


def own() -> dict[str, Stack]:
    """Return the stacks of this process's threads by name, except of the thread that calls this; the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()} | {threading.main_thread().ident: MAIN}
    found: dict[str, Stack] = {}
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != MAIN):
        if ident != threading.get_ident():
            name = names.get(ident, f"thread {ident}")
            calls = [(at.f_code.co_filename, line, at.f_code.co_name) for at, line in traceback.walk_stack(frame)]
            found[name if name not in found else f"{name} ({ident})"] = calls[::-1]
    return found


def parse(text: str) -> dict[str, Stack]:
    """Return the stacks in what faulthandler has written; the main thread comes last there."""
    sections = re.split(r"^(?:Current thread|Thread) (\w+).*\n", text, flags=re.MULTILINE)
    names, bodies = sections[1::2], sections[2::2]
    found: dict[str, Stack] = {}
    for name, body in reversed(list(zip(names, bodies, strict=True))):
        calls = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', body, re.MULTILINE)
        found[f"thread {name}" if found else MAIN] = [(file, int(line), code) for file, line, code in reversed(calls)]
    return found


def is_users(file: str) -> bool:
    """Return whether ``file`` is neither wordrun's, nor Python's, nor a library's."""
    return not file.startswith((OWN, *LIBRARIES, "<")) and "/site-packages/" not in file


def user_line(stacks: Mapping[str, Stack]) -> str:
    """Return the innermost line of the main thread in the user's code; if there is none, in wordrun's, else in any."""
    calls = stacks.get(MAIN) or next(iter(stacks.values()), ())
    for wanted in (is_users, lambda file: file.startswith(OWN), lambda file: True):
        for file, line, code in reversed(calls):
            if wanted(file):
                return f"{short(file)}:{line} in {code}"
    return "an unknown line"


def torch_call(stacks: Mapping[str, Stack]) -> str:
    """Return the function of torch.distributed in which the main thread waits; empty: it does something else."""
    main = stacks.get(MAIN, ())
    calls = [code for file, _, code in main if IN_TORCH in file and code != "wrapper"]
    # A schedule of a pipeline also calls the model.
    if not calls or not (IN_TORCH in main[-1][0] or main[-1][0].endswith("/torch/_ops.py")):
        return ""
    pipeline = any(f"{IN_TORCH}pipelining/" in file for file, *_ in main)
    return "a pipeline's send or receive" if pipeline else calls[0]


def mpi_call(stacks: Mapping[str, Stack]) -> str:
    """Return the call of mpi4py in the line of Python that the main thread is in, such as ``comm.Bcast``; or empty."""
    mpi, main = sys.modules.get("mpi4py.MPI"), stacks.get(MAIN, ())
    if mpi is None or not main:
        return ""
    calls = re.findall(r"(\w+)\.(\w+)\(", linecache.getline(*main[-1][:2]))
    return next((f"{on}.{name}" for on, name in calls if hasattr(mpi.Comm, name) or hasattr(mpi.Request, name)), "")


class Pulse:
    """Measures how long the main thread has been in C code, such as a call of MPI, without running Python."""

    kept: ClassVar[list[Any]] = []
    """Functions that the interpreter may still call after the watch has ended; they live as long as the process."""

    def __init__(self) -> None:
        self._since, self._is_due = time.monotonic(), False
        # The interpreter calls this in the main thread as soon as the main thread runs Python.
        self._beat = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._come)
        self.kept.append(self._beat)

    def _come(self, argument: int | None) -> int:
        self._is_due = False
        return 0

    def __call__(self) -> float:
        """Return the seconds since the main thread last ran Python, as far as calls of this method have observed."""
        if not self._is_due:
            self._since, self._is_due = time.monotonic(), True
            ctypes.pythonapi.Py_AddPendingCall(self._beat, None)
        return time.monotonic() - self._since


def compiles(stacks: Mapping[str, Stack]) -> bool:
    """Return whether a thread compiles, which may take minutes at any step.

    On accelerators, autograd runs and compiles backward passes in its own threads.
    """
    return any(COMPILERS.search(f"{file}:{code}") for calls in stacks.values() for file, _, code in calls)


def short(file: str) -> str:
    """Return the path of a source file relative to the working directory, or to the folder of its package."""
    for folder in (os.getcwd(), os.path.dirname(OWN), *sorted(filter(None, sys.path), key=len, reverse=True)):
        if file.startswith(f"{folder}/"):
            return file[len(folder) + 1 :]
    return file


def text_of(stacks: Mapping[str, Stack]) -> str:
    """Return stacks as text, in the form of a traceback."""
    return "\n".join(
        f"{name}:\n" + "".join(f'  File "{file}", line {line}, in {code}\n' for file, line, code in calls)
        for name, calls in stacks.items()
    )


def state(pid: int) -> str:
    """Return the state of a process as a letter (Linux; T: stopped, D: waits in the kernel); empty: it is gone."""
    return (read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""])[0]


class Dump:
    """A file in memory into which SIGQUIT makes this process write its stacks; ``peers`` finds it by its name."""

    def __init__(self, name: str, rank: int) -> None:
        if hasattr(os, "memfd_create"):  # with the process in its name, since a forked one has it, too
            self._fd = os.memfd_create(f"{name}-{os.getpid()}-{rank}", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        import fcntl

        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        if not faulthandler.is_enabled():  # also say where C++ code aborts or is killed
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # a stderr that is no file
                faulthandler.enable()
        self._registered = False
        self.register()

    def register(self) -> None:
        """Handle SIGQUIT unless the user's program does, also if it is ignored, as in a shell's background jobs."""
        self._registered = signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN, None)
        if self._registered:
            faulthandler.register(signal.SIGQUIT, file=self._fd, all_threads=True)

    def asked(self) -> bool:
        """Return whether somebody has sent SIGQUIT since the last call."""
        if not os.fstat(self._fd).st_size:
            return False
        os.ftruncate(self._fd, 0)
        return True

    def close(self) -> None:
        """Give SIGQUIT its usual effect again."""
        if self._registered:
            faulthandler.unregister(signal.SIGQUIT)
        os.close(self._fd)


def peers(name: str) -> Iterator[tuple[int, int, str]]:
    """Yield the rank, the process ID and the path of the dump of each process on this host whose dump has this name."""
    for pid in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if found := re.match(rf"/memfd:{name}-{pid}-(\d+)", target):
                        yield int(found[1]), int(pid), f"/proc/{pid}/fd/{fd}"


def ask(pid: int, path: str) -> dict[str, Stack]:
    """Return the stacks of another process on this host, whose dump is at ``path``; empty: it does not answer."""
    caught = re.search(r"^SigCgt:\s*(\w+)", read_proc(f"/proc/{pid}/status"), re.MULTILINE)
    if state(pid) in "TtZ" or not caught or not int(caught[1], 16) >> (signal.SIGQUIT - 1) & 1:
        return {}
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGQUIT)
        end = time.monotonic() + DUMP_S
        size = -1
        while time.monotonic() < end and not 0 < os.stat(path).st_size == size:
            size = os.stat(path).st_size
            time.sleep(0.05)
        fd = os.open(path, os.O_RDWR)
        with os.fdopen(fd, "r+") as file:
            text = file.read()
            file.truncate(0)  # otherwise the process would take it for a request by the user
            return parse(text)
    return {}
