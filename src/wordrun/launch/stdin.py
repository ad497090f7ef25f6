"""Forward the stdin of launch to rank 0, whole, at any size and speed.

Launchers cannot be relied on: Hydra kills the ranks if rank 0 reads too slowly, and under torchrun all ranks read from
the same stdin.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from typing import ClassVar

from wordrun.launch.job import short
from wordrun.launch.plan import LaunchPlan

READ = 65536
REMEDY = "let it read a file, or launch in a folder that all hosts share and on rank 0's host"
# At most this many files, of about this size, wait for rank 0 at a time.
FILES, FILE_BYTES = 16, 1_000_000
# How often to look for files that were read, and whether launch is in the foreground and may read its terminal [s].
LOOK_S = 0.1
# How long the end of a launch waits for this thread [s].
PATIENCE_S = 1.0


def pipe_of(folder: str) -> str:
    """Return the path of the named pipe from which rank 0 reads if it runs on this host."""
    return os.path.join(folder, f"{socket.gethostname()}.in")


class Stdin(threading.Thread):
    """Copies stdin into a named pipe that rank 0 opens or, if it runs on another host, into a series of files.

    Args:
        folder: the folder of the ranks' reports, which all hosts share.
        is_pipe: whether rank 0 runs on this host, and can read from a pipe.

    Raises:
        OSError: the file system has no named pipes, or no room.
    """

    begin: ClassVar[int | None] = None
    """The offset at which stdin began, if it is a file: after a relaunch, rank 0 reads from there."""

    def __init__(self, folder: str, *, is_pipe: bool) -> None:
        super().__init__(name="stdin", daemon=True)
        self.path = pipe_of(folder) if is_pipe else os.path.join(folder, "stdin")
        self._is_pipe, self._rest, self._reached = is_pipe, b"", False
        self._over, self._close = os.pipe()
        with contextlib.suppress(OSError):
            Stdin.begin = os.lseek(0, Stdin.begin or 0, os.SEEK_CUR if Stdin.begin is None else os.SEEK_SET)
        if is_pipe:
            os.mkfifo(self.path, 0o600)
        else:
            open(self.path, "xb").close()  # rank_env.sh looks for it

    def run(self) -> None:
        """Copy until stdin ends or ``close`` is called."""
        with contextlib.suppress(OSError):  # the folder is gone
            if not self._is_pipe:
                self._fill_files()
                return
            while not self._is_over(0):
                sink = os.open(self.path, os.O_WRONLY)  # when rank 0, or with --elastic its next one, opens it
                os.set_blocking(sink, False)
                self._reached = True
                with contextlib.suppress(BrokenPipeError):
                    self._fill(sink)
                os.close(sink)

    def close(self) -> str:
        """Stop forwarding; return a message if there was input, but never a rank 0 to read it; empty: no problem."""
        reached = self._reached or os.path.exists(f"{self.path}.seen")
        os.close(self._close)
        end = time.monotonic() + PATIENCE_S
        while self.is_alive() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # it may wait for a rank that never came
                os.close(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK))
            self.join(LOOK_S)
        if self.is_alive():  # in read(): another process has read what had arrived, as two launches in one script may
            return ""
        os.close(self._over)
        if reached or os.isatty(0):
            return ""
        if self._is_pipe:
            left = bool(select.select([0], [], [], 0)[0] and os.read(0, 1))
            return f"rank 0 did not run on this host, so it had no input: {REMEDY}" if left else ""
        unread = os.path.exists(f"{self.path}.0") and os.path.getsize(f"{self.path}.0")
        return (
            f"rank 0's host does not have {os.path.dirname(self.path)}, so it had no input: {REMEDY}" if unread else ""
        )

    def _fill(self, sink: int) -> None:
        """Copy to the pipe ``sink``; at the end of stdin, remove its name, so that nobody else waits for it."""
        while self._rest or (data := self._read()) is not None:
            if not self._rest and not data:
                os.unlink(self.path)
                return
            self._rest = self._rest or data or b""
            if self._over in select.select([self._over], [sink], [])[0]:
                return
            with contextlib.suppress(BlockingIOError):
                self._rest = self._rest[os.write(sink, self._rest) :]

    def _fill_files(self) -> None:
        """Write what arrives to ``stdin.0`` and so on, which rank_env.sh removes; an empty one is the end."""
        number = 0
        while (data := self._read()) is not None:
            while os.path.exists(f"{self.path}.{number - FILES}"):
                if self._is_over(LOOK_S):
                    return
            with open(f"{self.path}.part", "wb") as file:
                file.write(data)
                while data and file.tell() < FILE_BYTES and select.select([0], [], [], 0)[0]:
                    if not file.write(os.read(0, READ)):  # the end, which the next read meets again
                        break
            os.rename(file.name, f"{self.path}.{number}")
            number += 1
            if not data:
                return

    def _read(self) -> bytes | None:
        """Return what has arrived (empty: stdin has ended); None: ``close`` was called."""
        while True:
            if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():  # reading would stop launch (SIGTTIN)
                if self._is_over(LOOK_S):
                    return None
            elif self._over in select.select([0, self._over], [], [])[0]:
                return None
            else:
                with contextlib.suppress(BlockingIOError):
                    return os.read(0, READ)

    def _is_over(self, timeout: float) -> bool:
        """Return whether ``close`` is called within ``timeout`` seconds."""
        return bool(select.select([self._over], [], [], timeout)[0])


def forward(plan: LaunchPlan, folder: str) -> Stdin | None:
    """Start to forward stdin to rank 0 of ``plan``; return None if its launcher does this, or there is no need.

    Args:
        plan: what is started.
        folder: the folder of the ranks' reports; empty: there is none.
    """
    if not folder or sys.stdin is None:
        return None
    here = plan.job.is_local and not plan.options.hostfile
    here = here or short(plan.hosts[0]) in (short(socket.gethostname()), "localhost")
    by_file = not plan.launcher.carries_stdin and plan.starter.uses_rank_env and not os.isatty(0)
    for is_pipe in [True] * here + [False] * by_file:
        with contextlib.suppress(OSError):  # such as a file system without named pipes
            thread = Stdin(folder, is_pipe=is_pipe)
            thread.start()
            return thread
    return None


def is_inherited(plan: LaunchPlan, folder: str, forwarder: Stdin | None) -> bool:
    """Return whether the launcher inherits stdin, because nobody forwards it.

    Under a launcher, a closed stdin is an empty one, which ``rank_env.sh`` also gives to all ranks but 0.
    """
    return not folder or (not forwarder and plan.launcher.carries_stdin and sys.stdin is not None)
