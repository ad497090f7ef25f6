"""Addresses, interfaces and ports at which ranks meet; a host name may resolve to a loopback address, 127.0.1.1."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable

SIOCGIFADDR = 0x8915
"""Linux's ioctl for the address of an interface."""


def resolve(name: str) -> str | None:
    """Return the IPv4 address of ``name``, or None if it has none."""
    try:
        # As bytes: for a str, Python would first load the codec for international domain names.
        return str(socket.getaddrinfo(name.encode("ascii"), None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError):
        return None


def is_loopback(address: str | None) -> bool:
    """Return whether only this host can connect to ``address``."""
    return bool(address) and str(address).startswith("127.")


def address_towards(others: Iterable[str]) -> str:
    """Return this host's address on the network of the first of ``others`` that it has a route to; empty: none."""
    for other in others:
        address = resolve(other)
        if not address or is_loopback(address):
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
                route.connect((address, 9))  # sends nothing
                own = str(route.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(own):
            return own
    return ""


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty: there is none, or this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def interface_for_gloo(others: Iterable[str]) -> str:
    """Return the interface towards ``others`` if gloo would choose loopback, as this host's name does; else empty."""
    if not is_loopback(resolve(socket.gethostname())):
        return ""
    own = address_towards(others)
    return interface_of(own) if own else ""


# Below the ephemeral ports of outgoing connections (Linux: from 32768).
PORTS = range(10000, 30000)


def port_of(seed: bytes) -> int:
    """Return a port determined by ``seed``, at least four bytes."""
    return PORTS[int.from_bytes(seed[:4], "little") % len(PORTS)]
