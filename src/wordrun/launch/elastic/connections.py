"""The connections between ``launch --elastic`` and its guardians: over TCP, with a JSON object per line."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from wordrun.common.listener import Listener, UnfitError, is_secret
from wordrun.launch.job import short

VARIABLE = "WORDRUN_GUARDIAN_TOKEN"
"""Variable that tells guardians where ``launch`` listens, and a secret that they must send: ADDRESS PORT SECRET."""
# A peer whose host has died is noticed after this long [s]: the first probe, the time between probes, and their number.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# Nobody sends longer lines: a command line has at most 2 MB.
LONGEST = 8_000_000
# A guardian that takes no messages for this long [s] is gone.
SEND_S = 5.0
# Maximum number of characters that an error shows of an invalid message.
SHOWN = 80
FACTS: Mapping[str, Mapping[str, type]] = {
    "ready": {"port": int},
    "started": {"pids": dict},
    "exit": {"rank": int, "pid": int, "status": int, "memory": str, "mpi": bool, "stopped": bool},
    "ended": {"port": int},
}
"""What a guardian reports, by event."""


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
        """Return the messages that are complete, after one read from the connection; None: the other end is gone.

        Raises:
            UnfitError: something else has arrived.
        """
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > LONGEST:
            raise UnfitError(f"a line of more than {LONGEST} bytes")
        return [message_in(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


class Connections:
    """The connections of ``launch`` to the guardians, by number of the node.

    Args:
        address: where to listen.
        nodes: the names of the nodes whose guardians are admitted, one for each.
        selector: gets functions without arguments as data, to be called when something arrives.
        admitted: called with the number of the node when its guardian has connected.
        hear: called with the number of the node when its guardian has sent something.
    """

    def __init__(
        self,
        address: str,
        nodes: Sequence[str],
        selector: selectors.BaseSelector,
        admitted: Callable[[int], None],
        hear: Callable[[int], None],
    ) -> None:
        self.open: dict[int, Link] = {}
        self.hosts: dict[int, str] = {}
        """The names of the nodes whose guardians have connected at least once."""
        self._nodes, self._selector, self._admitted, self._hear = nodes, selector, admitted, hear
        self._secret = secrets.token_hex(16)
        self._listener = Listener(address, selector, self._admit)
        self.contact = f"{address} {self._listener.port} {self._secret}"
        """What a guardian needs to know: the value of ``VARIABLE``."""

    def name(self, node: int) -> str:
        """Return the name of a node's guardian for messages."""
        host = self.hosts.get(node, self._nodes[node])
        several = [*self.hosts.values()].count(host) > 1  # a list of hosts may name one of them twice
        return f"the guardian on {host}" + f" (node {node})" * several

    def send(self, nodes: Iterable[int], **message: Any) -> None:
        """Send a message to the guardians of ``nodes``."""
        for node in nodes:
            self.open[node].send(**message)

    def receive(self, node: int) -> list[dict[str, Any]] | None:
        """Return what the guardian of a node has sent; None: it is gone.

        Raises:
            UnfitError: it has sent something else than messages.
        """
        return self.open[node].receive()

    def look(self) -> None:
        """Close connections that do not identify themselves in time; call this regularly."""
        self._listener.look()

    def drop(self, node: int) -> None:
        """Close the connection to the guardian of a node, if it is open."""
        if link := self.open.pop(node, None):
            self._selector.unregister(link.socket)
            link.close()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        for node in list(self.open):
            self.drop(node)

    def _admit(self, connection: socket.socket, line: bytes) -> None:
        """Admit a guardian that knows the secret."""
        hello = message_in(line)
        node, host = hello.get("node"), hello.get("host")
        if not (is_secret(hello.get("secret"), self._secret) and type(node) is int and isinstance(host, str)):
            raise UnfitError
        if node in self.open or node not in range(len(self._nodes)):
            raise UnfitError
        connection.settimeout(SEND_S)
        link = Link(connection)
        self.open[node], self.hosts[node] = link, short(host)
        self._selector.register(link.socket, selectors.EVENT_READ, partial(self._arrived, node))
        self._admitted(node)

    def _arrived(self, node: int) -> None:
        if node in self.open:  # else another one has been lost at the same moment, and all connections are closed
            self._hear(node)


def message_in(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        UnfitError: there is none.
    """
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise UnfitError(f"{line[:SHOWN]!r}, which is not a JSON object")
    return message


def check(message: Mapping[str, Any], np: int) -> None:
    """Check that ``message`` is one that a guardian may send in a launch of ``np`` ranks.

    Raises:
        UnfitError: it reports an unknown event, or an event with wrong facts.
    """
    event, ranks = message.get("event"), [message["rank"]] if "rank" in message else []
    facts = FACTS.get(event) if isinstance(event, str) else None
    fits = facts is not None and all(type(message.get(name)) is kind for name, kind in facts.items())
    if fits and event == "started":
        ranks = [int(rank) if rank.isdecimal() else -1 for rank in message["pids"]]
        fits = all(type(pid) is int for pid in message["pids"].values())
    if not fits or not all(rank in range(np) for rank in ranks) or not 0 < message.get("port", 1) < 65536:
        raise UnfitError(f"{json.dumps(message)[:SHOWN]}, which is none of its messages")
