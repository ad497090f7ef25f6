"""Join and leave the process group: ``setup``, ``cleanup``, and both in a ``with`` block, ``session``."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from wordrun.common import cgroup, network, slurm
from wordrun.common.errors import UserError, WorldError, show
from wordrun.common.log import LOGGER
from wordrun.dist import mpi
from wordrun.dist.device import backend_of, choose_device
from wordrun.dist.failure import guard
from wordrun.dist.hang import watch
from wordrun.dist.rendezvous import close_store, shared_store
from wordrun.dist.world import World, discover

# gloo's threads end a collective within this time.
QUIET_S = 0.02
# torch keeps a record of this many collectives; the report of a hang names the last ones. 2.8 keeps none by default.
FLIGHT_RECORDS = "2000"


@dataclass
class _Joined:
    """This process's state while it is part of a job."""

    world: World | None = None
    users: int = 0
    owns_group: bool = False


_joined = _Joined()


def identify(env: Mapping[str, str] | None = None) -> World:
    """Return this process's World, from its launcher's variables and, under an MPI launcher, from MPI.

    Under MPI, every rank must call this, before importing torch (some sites' MPI requires that order).
    """
    world = discover(env)
    return mpi.verify(world) if mpi.in_use(world) else world


def discover_or_exit() -> World:
    """Return ``discover()``; if the variables contradict each other, print the message and exit."""
    try:
        return discover()
    except UserError as error:  # the rank is not known yet
        raise SystemExit(show(error)) from None


def setup(world: World | None = None, *, device: str = "auto", timeout_s: int = 1800, seed: int | None = None) -> World:
    """Join the process group and return this process's World; every rank must call this.

    The device is set before the group is created, and the group is bound to it, so that no rank uses device 0 by
    mistake. Calls nest: the group ends with the last ``cleanup``.

    Args:
        world: this process's World, if ``identify`` has been called already.
        device: ``auto`` (the accelerator if there is one, else the CPU), ``cpu``, ``cuda`` or ``xpu``.
        timeout_s: seconds after which a collective fails if a rank has not reached it.
        seed: seed of Python's, NumPy's and torch's random number generators, the same on all ranks.

    Raises:
        WorldError: the ranks cannot connect to each other, or the device does not exist.
    """
    if _joined.world is None:
        _join(world or identify(), device, timeout_s)
        atexit.register(_leave)
    elif device not in ("auto", _joined.world.device.partition(":")[0]):
        joined = f"this process has joined its group with {_joined.world.device}"
        raise WorldError(
            f"device={device}, but {joined}: close what uses that device first", page="install.md#clusters"
        )
    _joined.users += 1
    if seed is not None:
        seed_everything(seed)
    assert _joined.world is not None
    return _joined.world


def cleanup() -> None:
    """Undo one ``setup``; the last one destroys the process group.

    Under MPI on several hosts, every rank waits for the others there, unless it handles an exception or is exiting.
    """
    _joined.users = max(0, _joined.users - 1)
    if _joined.users == 0:
        if sys.exc_info()[0] is None and threading.main_thread().is_alive():
            mpi.part()
        _leave()
        atexit.unregister(_leave)


@contextlib.contextmanager
def session(
    *, device: str = "auto", timeout_s: int = 1800, seed: int | None = None, hang_s: float = 120.0
) -> Iterator[World]:
    """Join the other ranks for a ``with`` block; an exception in it ends the whole job.

    The arguments are those of ``setup``, and ``hang_s``: after a collective has waited for this many seconds, report
    where each rank is (0: never).
    """
    with guard(discover_or_exit()):
        world = identify()
    with guard(world):
        world = setup(world, device=device, timeout_s=timeout_s, seed=seed)
        end_watch = watch.start_for_script(world, hang_s, timeout_s)
        failed = True
        try:
            yield world
            failed = False
        finally:
            end_watch()
            if not failed or world.size == 1:  # after a failed collective, leaving the others can hang
                cleanup()


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch (on all devices)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _join(world: World, device: str, timeout_s: int) -> None:
    import torch.distributed

    chosen = choose_device(device, world)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    world = replace(world, device=str(chosen))
    _limit_threads(world)
    _joined.world = world
    _joined.owns_group = not torch.distributed.is_initialized()
    if not _joined.owns_group:
        return
    store = shared_store(world, timeout_s)
    if world.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        others = (os.environ.get("MASTER_ADDR", ""), *(host for host in world.hosts if host != world.host))
        if interface := network.interface_for_gloo(filter(None, others)):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its old name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDS)
    try:
        torch.distributed.init_process_group(
            backend_of(chosen),
            store=torch.distributed.PrefixStore("wordrun/group", store),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=chosen if chosen.type != "cpu" else None,
        )
    except Exception:
        _joined.world = None
        raise


def _limit_threads(world: World) -> None:
    """Under srun without launch, divide the job's cores on this node by its ranks, unless the user has set threads."""
    import torch

    if not world.in_step or {"WORDRUN_LAUNCH_ID", "OMP_NUM_THREADS"} & {*os.environ}:
        return
    own = cgroup.own_cores()
    # Ranks that are not bound share all cores of the job, or of the machine.
    threads = max(1, min(own, (slurm.cores_on_node(os.environ) or own) // world.local_size))
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for this rank's own processes
        reason = f"{world.local_size} ranks on {world.host}, OMP_NUM_THREADS is not set"
        LOGGER.info("threads: %d per rank (%s)", threads, reason)


def _leave() -> None:
    if _joined.world is not None and _joined.owns_group:
        import torch.distributed

        if torch.distributed.is_initialized():
            # gloo's threads may hold a lock that destroying needs while they wait for the GIL to release a collective.
            time.sleep(QUIET_S)
            torch.distributed.destroy_process_group()
    _joined.world, _joined.users = None, 0
    close_store()
