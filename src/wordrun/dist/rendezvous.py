"""The key-value store through which ranks meet before they have a process group: ``shared_store``."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from wordrun.common import slurm
from wordrun.common.errors import WorldError, first_line
from wordrun.common.network import port_of
from wordrun.dist import mpi
from wordrun.dist.world import World

# Ranks that have not met by then never will; a wrong address should not cost half an hour.
MEETING = timedelta(seconds=300)
# Files that rank 0 opens besides a connection for each rank: the minimum, and with data, libraries and the fabric.
FEW_FILES, OWN_FILES = 64, 512


_opened: Any = None
"""The store of this process, from the first call of ``shared_store`` to ``close_store``."""


def shared_store(world: World, timeout_s: int = 1800) -> Any:
    """Return the key-value store of this job's ranks, which every rank must open; rank 0 hosts it.

    Raises:
        WorldError: the ranks cannot meet.
    """
    global _opened
    if _opened is None:
        _opened = _open_store(world, timedelta(seconds=timeout_s))
    return _opened


def opened_store() -> Any:
    """Return what ``shared_store`` has opened; None: this rank has not met the others."""
    return _opened


def close_store() -> None:
    """Leave the store; the next ``shared_store`` opens another one."""
    global _opened
    _opened = None


def _open_store(world: World, timeout: timedelta) -> Any:
    """Open the store, which all ranks of a job of several reach through a port of rank 0's host.

    Raises:
        WorldError: the ranks cannot meet.
    """
    if world.size == 1:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return HashStore()
    meeting = min(timeout, MEETING)
    store = _store_over_mpi(world, meeting) if mpi.in_use(world) else _store_over_env(world, meeting)
    store.set_timeout(timeout)
    return store


def _store_over_mpi(world: World, timeout: timedelta) -> Any:
    """Open the store on rank 0, then broadcast its port, so that no other process can take that port first."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    decided = os.environ.get("WORDRUN_LAUNCH_ID")  # without launch, MASTER_* may be left over from an earlier job
    first = "127.0.0.1" if world.nodes == 1 else world.hosts[0]
    address = (decided and os.environ.get("MASTER_ADDR")) or first
    store = None
    port: int | str = 0
    if world.rank == 0:
        wanted = int(os.environ.get("MASTER_PORT") or 0) if decided else 0
        for choice in dict.fromkeys((wanted, 0)):
            try:
                store = _host_store(address, choice, world, timeout, wait=False)
                port = store.port
                break
            except Exception as error:  # OSError; DistNetworkError or RuntimeError, depending on torch's version
                port = first_line(error)
    if world.nodes > 1:
        mpi.make_progress()  # an earlier group may have ended the thread
    port = json.loads(mpi.broadcast(json.dumps(port).encode()))
    if isinstance(port, str):
        raise WorldError(
            f"rank 0 on {world.hosts[0]} cannot listen at {address}: {port}", page="how_launch_works.md#who-can-connect"
        )
    if store is None:
        store = TCPStore(address, port, world.size, is_master=False, timeout=timeout)
    return store


def _host_store(address: str, port: int, world: World, timeout: timedelta, *, wait: bool) -> Any:
    """Return a store that listens at ``address`` alone, since it trusts any client; port 0: a free one.

    torch by itself would listen on all interfaces. This store does so only if ``address`` is not one of this host's, or
    is a name that stands for 127.0.1.1 on this host. With ``wait``, return when all ranks have connected.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _allow_connections(world)
    listen: dict[str, Any] = {}
    with contextlib.suppress(socket.gaierror):  # a name with IPv6 addresses only
        at = socket.gethostbyname(address)
        try:
            if world.nodes == 1 or not at.startswith("127."):
                server = socket.create_server((at, port), backlog=max(2048, world.size))
                port, listen = server.getsockname()[1], {"master_listen_fd": server.detach()}
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return TCPStore(
        address, port, world.size, is_master=True, timeout=timeout, wait_for_workers=wait, multi_tenant=True, **listen
    )


def _allow_connections(world: World) -> None:
    """Raise the soft limit on open files, so that every rank can connect to this one.

    Raises:
        WorldError: the hard limit is too low, so some ranks could not connect.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = world.size + OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < world.size + FEW_FILES:
        raise WorldError(
            f"rank 0 on {world.host} may open {hard} files, but {world.size} ranks connect to it: raise the hard limit "
            f"there to {needed} (ulimit -n; LimitNOFILE of the scheduler's daemon)",
            page="how_launch_works.md#who-can-connect",
        )
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def meeting_point(world: World, env: Mapping[str, str]) -> tuple[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; for a bare srun, which sets neither, values derived from the step.

    These are the same for all tasks, and differ between steps.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not world.in_step or (address and port):
        return address, port
    nodes, step = slurm.hosts_of_step(env), slurm.step_of(env)
    first = "127.0.0.1" if len(nodes) == 1 else nodes[0]
    return address or first, port or str(port_of(hashlib.sha256(step.encode()).digest()))


def _store_over_env(world: World, timeout: timedelta) -> Any:
    """Meet at MASTER_ADDR:MASTER_PORT, as torchrun and ``launch`` export them."""
    from torch.distributed.rendezvous import rendezvous

    address, port = meeting_point(world, os.environ)
    if not address or not port or not port.isdigit() or not 0 < int(port) < 65536:
        raise WorldError(
            f"{world.size} ranks ({world.source}) cannot connect at MASTER_ADDR={address} MASTER_PORT={port}: "
            "start them with `launch`, which sets both, or torchrun with --standalone or a --master-port",
            page="how_launch_works.md#who-can-connect",
        )
    if world.nodes > 1 and address in ("localhost", "127.0.0.1"):
        raise WorldError(
            f"MASTER_ADDR={address} cannot be reached from {world.nodes} nodes: set it to the first host's address",
            page="how_launch_works.md#who-can-connect",
        )
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}  # which env:// reads
    try:
        if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return _host_store(address, int(port), world, timeout, wait=True)
        store, _, _ = next(rendezvous("env://", rank=world.rank, world_size=world.size, timeout=timeout))
    except Exception as error:
        raise WorldError(
            f"rank {world.rank} of {world.size} ({world.launcher}) cannot connect to the other ranks at "
            f"{address}:{port}: {first_line(error)}. Leave MASTER_PORT unset and `launch` finds a free one.",
            page="how_launch_works.md#who-can-connect",
        ) from error
    return store
