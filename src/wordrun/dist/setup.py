"""Join and leave the process group, and end the whole job on failure: ``setup``, ``cleanup``, ``guard``."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from wordrun.common import cgroup, slurm
from wordrun.common.errors import UserError, WorldError, show, with_page
from wordrun.common.log import LOGGER
from wordrun.dist import mpi, values
from wordrun.dist.device import backend_of, choose_device
from wordrun.dist.hang import watch
from wordrun.dist.rendezvous import open_store
from wordrun.dist.world import World, discover

# A rank that fails because another one did waits this long for the launcher to end it, then exits.
SECONDARY_WAIT_S = 5.0
# A guardian ends the other ranks within this time [s] after one was killed.
GUARDIAN_S = 1.0
QUIET_S = 0.02
# Time for mpiexec to read a traceback.
OUTPUT_WAIT_S = 0.5
# torch remembers this many collectives, of which a hang's report names the last ones; 2.8 remembers none by default.
FLIGHT_RECORDS = "2000"
# Disk errors, for which a traceback would not help.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass
class _Joined:
    """This process's state while it is part of a job."""

    world: World | None = None
    store: Any = None
    users: int = 0
    owns_group: bool = False


_joined = _Joined()
_broadcasts = itertools.count()
"""Numbers the broadcasts, which all ranks make in the same order; not reset, as a store may outlive a group."""


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


def shared_store(world: World, timeout_s: int = 1800) -> Any:
    """Return the key-value store of this job's ranks, which every rank must open; rank 0 hosts it."""
    if _joined.store is None:
        _joined.store = open_store(world, timedelta(seconds=timeout_s))
    return _joined.store


def broadcast(value: Any, world: World, timeout_s: int = 1800) -> Any:
    """Return rank 0's ``value`` on every rank; all must call this, before or after ``setup``.

    For plain values, paths and dataclasses (``wordrun.dist.values``). Over MPI, if it is in use, in log(n) rounds; else
    through the rendezvous store, which every rank reads once.
    """
    if world.size == 1:
        return value
    data = values.dumps(value) if world.rank == 0 else b""
    if mpi.in_use(world):
        return values.loads(mpi.broadcast(data))
    store, key = shared_store(world, timeout_s), f"wordrun/broadcast/{next(_broadcasts)}"
    if world.rank == 0:
        store.set(key, data)
    return values.loads(store.get(key))


def share(value: Any, world: World, timeout_s: int = 1800) -> Any:
    """Do as ``broadcast``: the old name, which is accepted until the next release."""
    LOGGER.warning("dist.share is now called dist.broadcast; the old name is accepted until the next release")
    return broadcast(value, world, timeout_s)


def monitored_barrier(name: str, world: World, timeout_s: float) -> bool:
    """Return whether every rank calls this with the same, new ``name`` before ``timeout_s`` is over for one of them.

    It needs no collective, so the ranks that do not call it may be in one.
    """
    if world.size == 1:
        return True
    store, key = shared_store(world), f"wordrun/arrived/{name}"
    if store.add(key, 1) == world.size:
        store.set(f"{key}/all", b"")
    try:
        store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
    except RuntimeError:  # DistStoreError: it timed out
        return False
    return True


def setup(world: World | None = None, *, device: str = "auto", timeout_s: int = 1800, seed: int | None = None) -> World:
    """Join the process group and return this process's World; every rank must call this.

    The device is set before the group is created and bound to it, so that no rank's collectives land on device 0.
    Calls nest: the group ends with the last ``cleanup``.

    Args:
        world: this process's World, if ``identify`` has been called already.
        device: ``auto`` (the accelerator if there is one, else the CPU), ``cpu``, ``cuda`` or ``xpu``.
        timeout_s: seconds after which a collective fails if a rank has not reached it.
        seed: seed of Python's, NumPy's and torch's random number generators, the same on all ranks.

    Raises:
        WorldError: the ranks cannot meet, or the device does not exist.
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
    """Undo one ``setup``; the last one destroys the process group."""
    _joined.users = max(0, _joined.users - 1)
    if _joined.users == 0:
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
        try:
            yield world
        finally:
            end_watch()
        cleanup()


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch (on all devices)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def guard(world: World) -> Iterator[None]:
    """End the entire job when this rank raises, and print its traceback once.

    A ``UserError`` prints only its message and ends the job with its exit status; any other exception prints a
    traceback, rank and host, and ends it with status 1. Ranks that fail as a consequence print nothing.
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            abort(world, error.code if isinstance(error.code, int) else 1)
        raise
    except KeyboardInterrupt:
        abort(world, 130)
    except UserError as error:
        _report(world, with_page(error))
        abort(world, error.exit_status)
    except Exception as error:
        message = f"failed on host {world.host}\n{traceback.format_exc().rstrip()}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            what = f"cannot write to {error.filename or 'the run directory'} on {world.host}: {error.strerror}"
            message = (
                f"{what}. What was written before is intact.\nmore: docs/checkpoints.md#when-checkpoints-are-written"
            )
        _report(world, message)
        abort(world, 1)


def abort(world: World, status: int) -> None:
    """End this process and the entire job with ``status`` immediately."""
    sys.stdout.flush()
    sys.stderr.flush()
    if world.size == 1:
        _leave()
        sys.exit(status)
    if mpi.in_use(world):
        # On abort, mpiexec exits at once and drops output that it has not yet read from the ranks (seen with MPICH).
        time.sleep(OUTPUT_WAIT_S)
        with contextlib.suppress(WorldError):  # without an MPI library: the launcher ends the ranks when one has failed
            mpi.communicator().Abort(status)
    # Not sys.exit: destroying a process group after a failed collective can hang.
    os._exit(status)


def _report(world: World, message: str) -> None:
    """Print ``message`` unless another rank has failed before this one."""
    if world.size == 1:
        print(message, file=sys.stderr, flush=True)
        return
    ending_s = 1.0
    if "WORDRUN_GENERATION" in os.environ:
        time.sleep(GUARDIAN_S)
        ending_s = 6.0  # launch lets the other ranks end by themselves before it ends them
    if _joined.store is None:
        # Without a store, no rank knows who failed first. This early, all usually fail alike, so rank 0 reports.
        time.sleep(ending_s if world.rank else 0.0)
    else:
        try:
            _joined.store.set_timeout(timedelta(seconds=5))
            first = _joined.store.add("wordrun/failures", 1) == 1
        except Exception:  # rank 0 hosts the store, and died silently, or launch is about to end this rank
            cause, first = message.partition("\nmore: ")[0].splitlines()[-1], True
            message = f"lost contact with rank 0: {cause}\nmore: docs/jobs.md#what-happens-when"
            time.sleep(ending_s)
        if not first:
            time.sleep(SECONDARY_WAIT_S)
            return
    sys.stderr.write(f"[rank {world.rank}] {message}\n")  # one write, so that other ranks' output cannot split it
    sys.stderr.flush()


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
    """Under a bare srun, share the job's cores on this node among its ranks, unless the user has set threads."""
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
    _joined.world, _joined.store, _joined.users = None, None, 0
