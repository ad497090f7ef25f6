"""Which process owns a file, and whether it has died: its number alone may be another process's by now."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from wordrun.common.files import read_proc

BOOT = "/proc/sys/kernel/random/boot_id"


def this_process() -> dict[str, str | int]:
    """Return what identifies this process: host, boot, PID namespace, process ID, and start in ticks since the boot."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pids": _namespace(), "pid": pid, "start": _start(pid)}


def is_dead(owner: Mapping[str, object]) -> bool | None:
    """Return whether the process ``owner`` has ended; None: unknown, such as of another host or container.

    An owner with only host and pid counts as alive while any process has its number.
    """
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    if owner.get("boot", _boot()) != _boot():
        return True
    if owner.get("pids", _namespace()) != _namespace():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    start = _start(pid)
    return bool(start) and owner.get("start", start) != start


def _boot() -> str:
    return read_proc(BOOT).strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""


def _start(pid: int) -> str:
    """Return when a process started (Linux); elsewhere empty."""
    return (read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 20)[19]
