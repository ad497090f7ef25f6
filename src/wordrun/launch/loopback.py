"""Close the sockets at which other processes of this machine listen to other hosts (Linux)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

# The number of pidfd_getfd(2), which Python does not have.
PIDFD_GETFD = 438


def close_to_others(pid: int, inode: str) -> None:
    """Make the listening socket ``inode`` of process ``pid`` accept connections through the loopback interface only.

    This changes the socket itself, so it holds for all processes that have it. Linux permits it from 5.7 on, for
    processes that this one could trace, such as its descendants; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        process = os.pidfd_open(pid)
        stack.callback(os.close, process)
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}") == f"socket:[{inode}]":
                copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(name), 0)
                if copy >= 0:
                    with socket.socket(fileno=copy) as shared:
                        shared.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                return
