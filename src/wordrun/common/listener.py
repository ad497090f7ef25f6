"""Listen for the processes of a job, on a port that other programs can reach, too.

A connection that is not from a process of the job is closed, and affects no other connection.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import resource
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

# A connection has to say who it is in one line of at most this many bytes, within this long [s].
LONGEST_LINE, PATIENCE_S = 1024, 10.0
# Connections that have not yet said who they are: at most MOST, and at most the fraction FILES of the files that this
# process may open. One more closes the oldest. A call accepts at most the fraction AT_ONCE of this limit, so that
# a connection that sends its line immediately is read before others can displace it.
MOST, FILES, AT_ONCE = 128, 1 / 8, 1 / 4
# Enough for all ranks of a large job at once; the kernel may limit it further (net.core.somaxconn).
BACKLOG = 4096
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Nothing can be accepted for lack of memory or file descriptors."""
PAUSE_S = 0.5


class UnfitError(Exception):
    """A connection sent something that no process of the job would send."""


class Listener:
    """A port, and the connections to it that have not yet said who they are.

    Args:
        address: where to listen.
        selector: where sockets are registered; the ``data`` of each is a function to call when something arrives.
        admit: gets each connection and the line that it has sent; it raises ``UnfitError``, or owns the connection.
        family: of the address.
        port: 0: a free one.

    Raises:
        OSError: it is not possible to listen there.
    """

    def __init__(
        self,
        address: str,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, bytes], None],
        family: socket.AddressFamily = socket.AF_INET,
        port: int = 0,
    ) -> None:
        self._selector, self._admit = selector, admit
        self._unknown: dict[socket.socket, tuple[float, bytes]] = {}
        """When each connection is closed, and what it has sent; the oldest is the first."""
        self._server = socket.create_server((address, port), family=family, backlog=BACKLOG)
        self._server.setblocking(False)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST if files == resource.RLIM_INFINITY else max(4, min(MOST, int(files * FILES)))
        self._resume_at: float | None = None
        selector.register(self._server, selectors.EVENT_READ, self._accept)
        self.port = int(self._server.getsockname()[1])

    def look(self) -> None:
        """Close connections that have been silent for too long; call this regularly."""
        now = time.monotonic()
        for connection in [each for each, (until, _) in self._unknown.items() if now > until]:
            self._close(connection)
        if self._resume_at is not None and now > self._resume_at:
            self._resume_at = None
            self._selector.register(self._server, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening."""
        for connection in list(self._unknown):
            self._close(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._server)
        self._resume_at = None
        self._server.close()

    def _accept(self) -> None:
        for _ in range(int(self._most * AT_ONCE)):
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if error.errno in EXHAUSTED and self._unknown:
                    self._close(next(iter(self._unknown)))
                elif error.errno in EXHAUSTED and self._resume_at is None:
                    self._selector.unregister(self._server)  # or it would be ready again at once
                    self._resume_at = time.monotonic() + PAUSE_S
                return
            if len(self._unknown) >= self._most:
                self._close(next(iter(self._unknown)))
            connection.setblocking(False)
            self._unknown[connection] = time.monotonic() + PATIENCE_S, b""
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._unknown:
            return  # closed since the selection
        until, line = self._unknown[connection]
        try:
            chunk = connection.recv(LONGEST_LINE + 1 - len(line))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        line += chunk
        if not chunk or len(line) > LONGEST_LINE:
            self._close(connection)
        elif b"\n" not in chunk:
            self._unknown[connection] = until, line
        else:
            self._selector.unregister(connection)
            del self._unknown[connection]
            try:
                if not line.endswith(b"\n"):
                    raise UnfitError("it does not wait for an answer")
                self._admit(connection, line)
            except UnfitError:
                connection.close()

    def _close(self, connection: socket.socket) -> None:
        del self._unknown[connection]
        self._selector.unregister(connection)
        connection.close()


def is_secret(given: object, secret: str) -> bool:
    """Return whether ``given``, of any type, is ``secret``, in a time that does not depend on where they differ."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), secret.encode())
