"""The messages between ``launch --elastic`` and its guardians: a JSON object per line, over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

VARIABLE = "WORDRUN_GUARDIAN_TOKEN"
"""Tells guardians where ``launch`` listens, and the secret that they must know: ADDRESS PORT SECRET."""
# A peer whose host has died is noticed after this long [s]: the first probe, the time between probes, and their number.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# Nobody sends longer lines: a command line has at most 2 MB.
LONGEST = 8_000_000


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        with contextlib.suppress(OSError):  # not every system has all of these
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, ``receive`` will say so."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, after waiting for a part of one; None: the other end is gone."""
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            return None
        if not chunk or len(self._pending) > LONGEST:
            return None
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(each, dict) for each in messages) else None

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


class Listener:
    """Where guardians connect, which have to know a secret.

    Args:
        address: where to listen.
        nodes: the number of guardians; each has a number below it.
        selector: calls this object when something arrives.
        admit: gets each connection, with the guardian's first message.
    """

    def __init__(
        self, address: str, nodes: int, selector: selectors.BaseSelector, admit: Callable[[Link, dict[str, Any]], None]
    ) -> None:
        self._nodes, self._selector, self._admit, self._secret = nodes, selector, admit, secrets.token_hex(16)
        self._server = socket.create_server((address, 0), backlog=nodes)
        self._server.setblocking(False)
        selector.register(self._server, selectors.EVENT_READ, self._accept)
        self.contact = f"{address} {self._server.getsockname()[1]} {self._secret}"
        """What a guardian needs to know."""

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.settimeout(5)
            link = Link(connection)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._greet, link))

    def _greet(self, link: Link) -> None:
        messages = link.receive()
        if messages == []:
            return
        self._selector.unregister(link.socket)
        hello = messages[0] if messages else {}
        if hmac.compare_digest(str(hello.get("secret")), self._secret) and hello.get("node") in range(self._nodes):
            self._admit(link, hello)
        else:
            link.close()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._server)
        self._server.close()
