"""What a rank sees of itself and of the others; ``launch --doctor`` starts it on every rank and reads its line."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from wordrun.dist import mpi
from wordrun.dist.world import World, discover
from wordrun.errors import UserError

MEETING_S = 20.0


def main(mark: str) -> int:
    """Print one line, ``mark`` and JSON: who this rank is, by whom, and what it found."""
    found: dict[str, Any] = {"host": socket.gethostname(), "rank": os.environ.get("RANK"), "problems": []}
    try:
        world = discover()
        found |= {"rank": world.rank, "size": world.size, "local_size": world.local_size, "source": world.source}
        found |= {"launcher": world.launcher, "node": world.node}
        found["mpi_size"] = _mpi_size(world, found["problems"])
        found["meets"] = meet(world, os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        if world.rank == 0:
            found["wandb"] = _wandb_mode()
    except UserError as error:
        found["problems"].append(str(error))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found |= {"cores": cores, "threads": os.environ.get("OMP_NUM_THREADS")}
    begin = time.perf_counter()
    import torch

    found["torch_s"] = round(time.perf_counter() - begin, 2)
    found["devices"] = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    sys.stdout.write(f"{mark}{json.dumps(found)}\n")  # in one write, so that no other rank's words come between
    sys.stdout.flush()
    return 0


def _mpi_size(world: World, problems: list[str]) -> int | None:
    if not mpi.at_work(world):
        return None
    try:
        return int(mpi.communicator().size)
    except UserError as error:
        problems.append(str(error))
        return None


def meet(world: World, address: str, port: int) -> str:
    """Open a socket between rank 0 and this rank; return what went wrong, or nothing."""
    if world.size == 1:
        return ""
    end = time.monotonic() + MEETING_S
    if world.rank == 0:
        return _wait_for(world.size - 1, port, end)
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return ""
        except OSError as error:
            if time.monotonic() > end:
                return f"cannot reach MASTER_ADDR={address} port {port}: {error}"
            time.sleep(0.2)


def _wait_for(others: int, port: int, end: float) -> str:
    try:
        with socket.create_server(("", port), backlog=others) as server:
            for arrived in range(others):
                server.settimeout(max(0.1, end - time.monotonic()))
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    return f"only {arrived} of {others} other ranks reached port {port} in {MEETING_S:g} s"
    except OSError as error:
        return f"cannot listen at port {port}: {error}"
    return ""


def _wandb_mode() -> str:
    from wordrun.config import WandbConfig
    from wordrun.track.wandb import choose_mode

    return choose_mode(WandbConfig())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
