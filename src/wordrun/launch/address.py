"""Choose the address and the port at which the ranks meet.

``launch`` chooses them, because the ranks cannot agree on anything before they have met.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from wordrun.common.errors import ConfigError
from wordrun.common.network import PORTS, address_towards, is_loopback, port_of, resolve
from wordrun.launch.job import short
from wordrun.launch.site import Site, fill

# Number of names to look up concurrently.
ASKED_AT_ONCE = 32
# Number of other hosts to look up for an address of this one.
FEW = 4


def decide(hosts: Sequence[str], site: Site, here: str, resolve: Callable[[str], str | None]) -> tuple[str, str, str]:
    """Return the first host's address, why it was chosen, and what is wrong with it (empty: nothing).

    The address is never ``localhost``: other hosts would look for rank 0 on themselves.

    Args:
        hosts: the hosts that run ranks, in the job's order.
        site: the cluster, which may name hosts differently on its fast network.
        here: this machine's name.
        resolve: returns a name's address, or None.
    """
    first = hosts[0]
    on_network = f"first host of the job, by its name on {site.name}'s network"
    names = {fill(site.master_addr, host=short(first)): on_network} if site.name else {}
    names.setdefault(first, "first host of the job")
    for name, why in names.items():
        if resolve(name) is not None:
            return name, why, ""
    if short(first) == short(here):
        own = resolve(here)
        if own and not is_loopback(own):
            return own, f"address of the first host of the job, {first}, whose name does not resolve", ""
    wanted = next(iter(names))
    return (
        wanted,
        names[wanted],
        (f"the first host of the job does not resolve here ({' and '.join(names)}); use --env MASTER_ADDR=ADDRESS"),
    )


def of_first(hosts: Sequence[str], site: Site, here: str) -> tuple[str, str, str]:
    """Return the same as ``decide``, but with a numeric address if possible: hosts may resolve a name differently.

    A loopback address, to which the first host's name may resolve on that host itself, is replaced by one that the
    other hosts can reach. If all hosts resolve to loopback addresses, they are one machine.
    """
    master, why, problem = decide(hosts, site, here, resolve)
    numeric = None if problem else resolve(master)
    others = [host for host in hosts[1:] if short(host) != short(hosts[0])][:FEW]
    others = list(filter(resolve, others))  # one that cannot be resolved is reported by itself
    if is_loopback(numeric) and others and not all(is_loopback(resolve(host)) for host in others):
        if own := address_towards(others):
            return own, f"{why}: {master} resolves to {numeric}, which other hosts cannot reach", ""
        line = f"fix the line of /etc/hosts on {hosts[0]} that begins with {numeric} and names {master}"
        return (
            master,
            why,
            f"{master} resolves to {numeric}, which other hosts cannot reach, and no route leads to "
            f"{', '.join(others)}: {line}, or use --env MASTER_ADDR=ADDRESS",
        )
    if numeric and numeric != master and not is_loopback(numeric):
        return numeric, f"{why}: {master}", problem
    return master, why, problem


def is_unknown(name: str) -> bool:
    """Return whether a name does not exist; a failing name service does not count."""
    try:
        socket.getaddrinfo(name.encode("ascii"), None)
    except (OSError, UnicodeError) as error:
        unknown = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        return isinstance(error, socket.gaierror) and error.errno in unknown
    return False


def unresolved(hosts: Sequence[str], here: str, unknown: Callable[[str], bool], within_s: float = 2.0) -> list[str]:
    """Return the ``hosts`` that turn out not to exist within ``within_s`` seconds.

    Args:
        hosts: names, possibly thousands.
        here: this machine's name, which need not resolve.
        unknown: returns whether a name does not exist; may be slow.
        within_s: seconds after which names without an answer are accepted as they are.
    """
    todo = deque(host for host in hosts if short(host) != short(here))
    found: set[str] = set()
    end = time.monotonic() + within_s

    def ask() -> None:
        with contextlib.suppress(IndexError):  # no names are left
            while time.monotonic() < end:
                host = todo.popleft()
                if unknown(host):
                    found.add(host)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(min(ASKED_AT_ONCE, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [host for host in hosts if host in found]


def free_port() -> int:
    """Return a free port, chosen at random so that two simultaneous launches choose different ones."""
    for _ in range(200):
        port = port_of(os.urandom(4))
        if is_free(port):
            return port
    raise ConfigError(f"no free port between {PORTS[0]} and {PORTS[-1]}: choose one with --env MASTER_PORT=P")


def usable_port(text: str) -> int:
    """Return the port given by ``--env MASTER_PORT``.

    Raises:
        ConfigError: it is not a port, or is in use.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(f"--env MASTER_PORT={text}: a port is a number from 1 to 65535")
    if not is_free(int(text)):
        taken = f"port {text} (--env MASTER_PORT) is in use by another process, or reserved"
        raise ConfigError(f"{taken}; omit MASTER_PORT, and launch finds a free one")
    return int(text)


def is_free(port: int) -> bool:
    """Return whether a server could listen on ``port`` at every address of this machine."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                # As torch's store does: a port in TIME_WAIT after an earlier job counts as free.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False  # other errors: this machine lacks the address family
    return True
