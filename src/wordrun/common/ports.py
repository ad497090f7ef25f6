"""Ports for the rendezvous of ranks."""

# Below the ephemeral ports of outgoing connections (Linux: from 32768).
PORTS = range(10000, 30000)


def pick(seed: bytes) -> int:
    """Return a port determined by ``seed``, at least four bytes."""
    return PORTS[int.from_bytes(seed[:4], "little") % len(PORTS)]
