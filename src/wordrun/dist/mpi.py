"""Verify the launcher's variables through MPI: the size of the job, and which ranks share a node."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from wordrun.common import sigint, slurm
from wordrun.common.errors import WorldError, first_line
from wordrun.dist.world import TRACED, World

PROGRESS_S = 0.02
_end_progress: list[Callable[[], None]] = []
"""What ends the thread that calls MPI; empty: there is none."""


def in_use(world: World) -> bool:
    """Return whether an MPI launcher started this process (srun only if it gives its tasks PMI or PMIx)."""
    if world.in_step:
        return any(os.environ.get(name) for name in ("PMI_FD", "PMI_RANK", "PMIX_RANK"))
    return world.by_mpi


@cache
def communicator() -> Any:
    """Return mpi4py's COMM_WORLD; the first call starts MPI.

    Raises:
        WorldError: mpi4py is missing or finds no MPI library.
    """
    try:
        import mpi4py

        if os.environ.get("PMI_FD") and slurm.is_task(os.environ):  # pmi2
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        with sigint.killing():  # MPI_Init waits for the other ranks; Ctrl-C may have ended one
            from mpi4py import MPI

            if not MPI.Is_initialized():
                if network := slurm.network(MPI.Get_library_version(), os.environ):
                    os.environ[slurm.NETWORK] = network
                MPI.Init_thread()
    except (ImportError, RuntimeError) as error:
        raise WorldError(
            f"an MPI launcher started this process, but mpi4py cannot load MPI: {first_line(error)}. On a laptop: "
            "pip install 'wordrun[mpich]'. On a cluster: load its MPI module and reinstall mpi4py against it "
            "(pip install --no-binary=mpi4py --force-reinstall mpi4py)."
        ) from error
    return MPI.COMM_WORLD


def broadcast(data: bytes) -> bytes:
    """Return rank 0's ``data``; every rank must call this."""
    comm = communicator()
    size = array("q", [len(data)])
    comm.Bcast(size, root=0)
    buffer = bytearray(data) if comm.rank == 0 else bytearray(size[0])
    comm.Bcast(buffer, root=0)
    return bytes(buffer)


def in_place() -> Any:
    """Return mpi4py's IN_PLACE, for reductions whose input and output are one buffer."""
    from mpi4py import MPI

    return MPI.IN_PLACE


def library() -> str:
    """Return the version of mpi4py's MPI library, without starting MPI; empty: there is none.

    Only for processes that do not use MPI: mpi4py will not start MPI later.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return ""
    return MPI.Get_library_version().strip("\0 \n").partition("\n")[0]


def verify(world: World) -> World:
    """Return ``world`` corrected by MPI; every rank must call this.

    Raises:
        WorldError: MPI sees a different number of ranks: mpiexec and libmpi do not match.
    """
    comm = communicator()
    from mpi4py import MPI

    if world.launcher != TRACED and comm.size != world.size:
        raise WorldError(
            f"{world.launcher} started {world.size} ranks ({world.source}), but MPI sees {comm.size}: "
            "the launcher and the MPI library do not match.\n"
            f"  launcher: {_launcher_path()}\n  library:  {_library_path()}\n"
            "Use the mpiexec that comes with the library (under srun: --mpi=pmi2, pmix or cray_shasta, "
            "as `srun --mpi=list` offers), or rebuild mpi4py against the launcher's MPI."
        )
    if world.in_step:
        # The step's variables are right, and MPI's view may be wrong: with SLURM's pmi2 and --distribution=arbitrary,
        # MPICH takes each rank for a node of its own.
        _, hosts, _ = _nodes(comm, comm.Split(world.node, world.local_rank), world.node)
        if comm.size > 1:
            make_progress()
        return replace(world, hosts=hosts, source=f"{world.source}, verified by MPI")
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = shared.rank, shared.size
    node, hosts, counts = _nodes(comm, shared, comm.rank)
    if len(hosts) > 1:
        make_progress()
    return replace(
        world,
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=len(hosts),
        counts=counts,
        hosts=hosts,
        source=f"{world.source}, verified by MPI",
    )


def _nodes(comm: Any, shared: Any, key: int) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
    """Return this node's number, the names of all nodes, and the number of ranks on each.

    One rank of each node exchanges them with the other nodes.

    Args:
        comm: all ranks.
        shared: the ranks of this node; freed.
        key: this rank's key: nodes are numbered in the order of the keys of their first ranks.
    """
    from mpi4py import MPI

    firsts = comm.Split(MPI.UNDEFINED if shared.rank else 0, key)
    found = None
    if shared.rank == 0:
        found = firsts.rank, *zip(*firsts.allgather((socket.gethostname(), shared.size)), strict=True)
        firsts.Free()
    node, hosts, counts = shared.bcast(found, root=0)
    shared.Free()
    return node, hosts, counts


def make_progress() -> None:
    """Call MPI in a thread until ``part``, so that messages are sent while this rank waits for something else.

    Over libfabric's TCP, a message sometimes stays with its sender until the sender's next call of MPI. Without the
    thread, one rank could wait in MPI for a message of another rank that waits in torch.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE or _end_progress:
        return
    comm, ended = communicator(), threading.Event()

    def probe() -> None:
        while not (ended.wait(PROGRESS_S) or MPI.Is_finalized()):
            comm.Iprobe()

    thread = threading.Thread(target=probe, name="MPI progress", daemon=True)
    thread.start()

    @atexit.register  # before mpi4py finalizes MPI, which no thread may be using then
    def finish() -> None:
        ended.set()
        thread.join()
        _end_progress.clear()

    _end_progress.append(finish)


def part() -> None:
    """Wait until every rank calls this, if a thread calls MPI; then end the thread.

    If it called MPI after another rank's end, UCX would notice that its connection is closed, and MPI_Finalize fails
    then. (With MPIR_CVAR_NO_COLLECTIVE_FINALIZE, which ``launch`` sets, it does not wait for the other ranks itself.)
    """
    if not _end_progress:
        return
    arrived = communicator().Ibarrier()
    while not arrived.Test():  # in Python, where signals are handled
        time.sleep(PROGRESS_S)
    atexit.unregister(_end_progress[0])
    _end_progress[0]()


def _launcher_path() -> str:
    path = os.environ.get("WORDRUN_LAUNCHER_PATH")
    if path:
        return path
    parent = f"/proc/{os.getppid()}/exe"
    if os.path.exists(parent):
        return f"{os.path.realpath(parent)} (parent process)"
    return f"{shutil.which('mpiexec')} (first mpiexec in PATH)"


def _library_path() -> str:
    from mpi4py import MPI

    version = MPI.Get_library_version().strip().splitlines()[0]
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return version
    paths = {line.split()[-1] for line in mapped.splitlines() if "/libmpi" in line}
    return f"{', '.join(sorted(paths)) or 'unknown'} ({version})"
