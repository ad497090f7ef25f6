"""Which ranks keep copies of which others' shares (``NodeGroups``), and how they fetch them (``Peers``).

Ranks fetch files over connections of their own, from any thread. Collectives of torch do not serve in the background of
training: those of two threads must not interleave, and on GPUs they would wait for the device.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wordrun.checkpoint.memory.node import NodeMemory
from wordrun.common.listener import Listener, UnfitError, is_secret
from wordrun.dist.collectives import gather_json
from wordrun.dist.rendezvous import shared_store
from wordrun.dist.world import World

# Either side waits at most this long [s] for the other's next bytes.
SILENCE_S = 60
REQUEST = re.compile(rb"([0-9a-f]+) (\w[\w.-]*/\w[\w.-]*)\n")
LENGTH = 8
# Bytes received before they are written: they stay in the processor's cache.
BUFFER = 2**20
# How often silent connections, and whether to stop, are checked [s].
LOOK_S = 0.2


class PeerError(OSError):
    """Another rank cannot be reached, or does not have a file."""


class Peers:
    """Serves the files in the subfolders of ``folder`` to those who know ``secret``, until ``close``.

    Raises:
        OSError: this rank cannot listen.
    """

    def __init__(self, folder: Path, world: World, secret: str) -> None:
        self.folder, self.secret = folder, secret
        family, own, name = _address(world)
        self._selector, self._ended = selectors.DefaultSelector(), threading.Event()
        self._listener = Listener(own, self._selector, self._answer, family)
        self.address = name, self._listener.port
        """Where other ranks reach this one."""
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._thread.join()

    def fetch(self, address: Sequence[Any], name: str, into: Path) -> None:
        """Copy the file ``name`` of the rank at ``address`` to ``into``, which appears when it is complete.

        Raises:
            OSError: the rank cannot be reached or does not have the file, or there is no room.
        """
        part = into.with_name(f".{into.name}.part")
        with socket.create_connection(tuple(address), timeout=SILENCE_S) as peer:
            peer.sendall(f"{self.secret} {name}\n".encode())
            size = int.from_bytes(_exactly(peer, bytearray(LENGTH)), "little")
            if not size:
                raise PeerError(f"{address[0]} does not have {name}")
            try:
                with part.open("wb") as file:
                    buffer = bytearray(min(size, BUFFER))
                    for start in range(0, size, len(buffer)):
                        file.write(_exactly(peer, memoryview(buffer)[: size - start]))
                part.rename(into)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _serve(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(LOOK_S):
                key.data()
            self._listener.look()
        self._listener.close()
        self._selector.close()

    def _answer(self, peer: socket.socket, line: bytes) -> None:
        asked = REQUEST.fullmatch(line)
        if asked is None or not is_secret(asked[1].decode(), self.secret):
            raise UnfitError
        threading.Thread(target=self._send, args=(peer, asked[2].decode()), name="peers", daemon=True).start()

    def _send(self, peer: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(SILENCE_S)
            try:
                file = (self.folder / name).open("rb")
            except OSError:
                peer.sendall(bytes(LENGTH))
                return
            with file:
                peer.sendall(os.fstat(file.fileno()).st_size.to_bytes(LENGTH, "little"))
                peer.sendfile(file)


class NodeGroups:
    """Which ranks share a node's memory, whose shares each rank copies, and where each rank serves files.

    All ranks must create one together.
    """

    def __init__(self, memory: NodeMemory, address: Sequence[Any], world: World) -> None:
        found = gather_json([memory.node, address, world.host], world.device)
        by_node: dict[str, list[int]] = {}
        for rank, (node, _, _) in enumerate(found):
            by_node.setdefault(node, []).append(rank)
        self.ranks = list(by_node.values())
        """The ranks of each node."""
        self.addresses = [address for _, address, _ in found]
        self.host = found[world.rank][2]
        self.here = list(by_node).index(memory.node)
        """The number of this rank's node."""
        self.local = self.ranks[self.here]
        """The ranks of this rank's node."""
        self.local_index = self.local.index(world.rank)
        """This rank's index among them; the first acts for the node."""
        before = self.ranks[self.here - 1] if len(self.ranks) > 1 else []
        self.sources = before[self.local_index :: len(self.local)]
        """The ranks on the previous node whose shares this rank copies."""

    def address(self, node: int) -> Any:
        """Return the address of a rank on another node; ranks of this node choose different ones, to share the load."""
        ranks = self.ranks[node]
        return self.addresses[ranks[self.local_index % len(ranks)]]


def _exactly(peer: socket.socket, buffer: Any) -> Any:
    """Fill ``buffer`` from a connection, and return it."""
    view, length = memoryview(buffer), 0
    while length < len(view):
        n = peer.recv_into(view[length:])
        if not n:
            raise PeerError("the connection was closed before the file was complete")
        length += n
    return buffer


def _address(world: World) -> tuple[socket.AddressFamily, str, str]:
    """Return the family and the address at which this rank should listen, and its name for others.

    The address is on the network through which this host reaches rank 0, where the ranks have met.
    """
    if world.size == 1:
        return socket.AF_INET, "127.0.0.1", "127.0.0.1"
    store = shared_store(world)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    family, kind, _, _, rank_0 = socket.getaddrinfo(store.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(rank_0)  # sends nothing
        own = str(route.getsockname()[0])
    # On rank 0's host, its name may stand for 127.0.1.1, which is of no use to others.
    if own.startswith("127.") and store.host not in ("localhost", own):
        return family, "", store.host
    return family, own, own
