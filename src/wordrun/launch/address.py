"""Where rank 0 is reached: decided once, outside the ranks, because they could not agree on it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from wordrun.launch.site import Site, fill

ASKED_AT_ONCE = 32
"""Names."""


def decide(
    hosts: Sequence[str], site: Site | None, here: str, resolve: Callable[[str], str | None]
) -> tuple[str, str, str]:
    """Return the address of the first host, why it is that one, and what is wrong with it (empty: nothing).

    It is never ``localhost``: the other hosts would look for rank 0 on themselves, and wait.

    Args:
        hosts: the hosts that have ranks, in the job's order.
        site: the cluster, which may know a name on its fast network.
        here: name of this machine.
        resolve: gives the address of a name, or None.
    """
    first = hosts[0]
    short = first.partition(".")[0]
    names: dict[str, str] = {}
    if site:
        names[fill(site.master_addr, host=short)] = f"first host of the job, by its name on {site.name}'s network"
    names[first] = names.get(first, "first host of the job")
    for name, why in names.items():
        if resolve(name) is not None:
            return name, why, ""
    if short == here.partition(".")[0]:
        own = resolve(here)
        if own and not own.startswith("127."):
            return own, f"address of the first host of the job, {first}, whose name does not resolve", ""
    wanted = next(iter(names))
    return wanted, names[wanted], (
        f"the first host of the job does not resolve here ({' and '.join(names)}); --env MASTER_ADDR=ADDRESS names it"
    )  # fmt: skip


def resolve(name: str) -> str | None:
    """Return the address of ``name``, or None where there is none."""
    try:
        # As bytes: for a text Python would first load the codec for international names.
        return str(socket.getaddrinfo(name.encode("ascii"), None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError):
        return None


def is_unknown(name: str) -> bool:
    """Say whether there is no machine of this name; a name service that is out of order says nothing."""
    try:
        socket.getaddrinfo(name.encode("ascii"), None)
    except socket.gaierror as error:
        return error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
    except (OSError, UnicodeError):
        return False
    return False


def strangers(hosts: Sequence[str], here: str, unknown: Callable[[str], bool], within_s: float = 2.0) -> list[str]:
    """Return those of ``hosts`` that are unknown, as far as that comes out in time.

    Args:
        hosts: names, thousands perhaps.
        here: name of this machine, which need not be known.
        unknown: says it of a name, and may take its time.
        within_s: seconds after which those that nobody has answered for are believed.
    """
    todo = deque(host for host in hosts if host.partition(".")[0] != here.partition(".")[0])
    found: set[str] = set()
    end = time.monotonic() + within_s

    def ask() -> None:
        with contextlib.suppress(IndexError):  # all have been asked for
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
