"""Ports at which ranks meet."""

from __future__ import annotations

# Below the range from which systems hand out ports to outgoing connections (Linux: from 32768).
PORTS = range(10000, 30000)


def pick(seed: bytes) -> int:
    """Return the port that belongs to ``seed``, of four bytes or more."""
    return PORTS[int.from_bytes(seed[:4], "little") % len(PORTS)]
