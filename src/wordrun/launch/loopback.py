"""Close the sockets at which other processes of this machine listen to other hosts (Linux)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

# The number of pidfd_getfd(2), which Python does not have.
PIDFD_GETFD = 438


def close_to_others(pid: int, inode: str) -> bool:
    """Make the listening socket ``inode`` of process ``pid`` accept connections through the loopback interface only.

    This changes the socket itself, so it holds for all processes that have it. Linux permits it from 5.7 on, for
    processes that this one could trace, such as its descendants; elsewhere nothing happens.

    Returns:
        Whether that is all that can be done. False: the process no longer has the socket, and another one may have it.
    """
    if sys.platform != "linux":
        return True
    import ctypes

    with contextlib.ExitStack() as stack:
        try:
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            names = os.listdir(f"/proc/{pid}/fd")
        except (ProcessLookupError, FileNotFoundError):  # it has ended
            return False
        except OSError:
            return True
        for name in names:
            with contextlib.suppress(OSError):  # it has closed this one meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}") != f"socket:[{inode}]":
                    continue
                copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(name), 0)
                if copy >= 0:
                    with socket.socket(fileno=copy) as shared:
                        shared.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                return True
        return False
