"""Runs Python programs that tests start, as ranks under a launcher, in forks of a process that has imported torch.

The other end is ``stand_in``, which runs in the process that the launcher has started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import forked


class Fd:
    """A file descriptor that a process to be forked inherits; there, it is its number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _number, (reduction.DupFd(self.fd),)


def _number(inherited: Any) -> int:
    return int(inherited.detach())


class Programs:
    """Waits for programs, and tells the processes that stand for them how they end.

    Args:
        path: of the socket to listen on.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            size, fds, *_ = socket.recv_fds(connection, 8, 8)
            message = connection.makefile("rb").read(int.from_bytes(size, "big"))
            try:
                # A message that ends early comes from a process that was killed.
                process = forked.start(_program, json.loads(message), [Fd(fd) for fd in fds]) if fds else None
            except json.JSONDecodeError:
                process = None
            for fd in fds:
                os.close(fd)
            if process is None:
                return
            connection.sendall(b"%d\n" % (process.pid or 0))
            if process.sentinel not in wait([connection, process.sentinel]):  # what stands for it was killed
                process.kill()
            process.join()
            connection.sendall(b"%d\n" % (process.exitcode or 0))


def _program(request: dict[str, Any], fds: list[int]) -> None:
    """Run a program as if Python had been started with it, and end the process."""
    import torch

    env = request["env"]
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    if fds[3:]:
        env["PMI_FD"] = str(fds[3])
    os.sched_setaffinity(0, request["cores"])
    # It may start processes of its own, as the main process.
    kinds = {kind.__name__: kind for kind in multiprocessing.process.BaseProcess.__subclasses__()}
    vars(multiprocessing.process).update(_current_process=kinds["_MainProcess"](), _parent_process=None)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", len(request["cores"]))))
    _open_streams(request["unbuffered"])
    status = _status(lambda: forked.become(request["words"], request["folder"], env))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if mpi:  # which takes leave of the launcher in an exit handler of C
        ctypes.CDLL(None).exit(status)
    os._exit(status)


def _open_streams(unbuffered: bool) -> None:
    """Make new streams, because those of the forked process may be buffered otherwise."""
    streams = {"stdin": io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))}
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        by_line = not unbuffered and (fd == 2 or os.isatty(fd))
        binary = raw if unbuffered else io.BufferedWriter(raw)
        streams[name] = io.TextIOWrapper(binary, write_through=unbuffered, line_buffering=by_line)  # type: ignore[arg-type]
    for name, stream in streams.items():
        vars(sys).update({name: stream, f"__{name}__": stream})


def _status(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
