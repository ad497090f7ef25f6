"""Report what a rank knows of itself, and whether it reaches the others; ``launch --doctor`` runs this on each rank."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from wordrun.common.errors import UserError, first_line
from wordrun.common.listener import Listener, UnfitError
from wordrun.common.network import resolve
from wordrun.common.version import torch_build
from wordrun.dist import mpi
from wordrun.dist.device import hidden
from wordrun.dist.world import World, discover

MEETING_S = 20.0
BACK_S = 3.0
# The time limit of joining the process group and of an all-reduce in it; and of both, if torch does not keep it.
REDUCE_S, REDUCE_MOST_S = 20, 50.0
LATE = f"no end within {REDUCE_MOST_S:g} s"
# A rank's greeting: the port at which it listens (0: none), its rank and its host.
HELLO, LAST_PORT = re.compile(rb"(\d{1,5}) (\d{1,9}) (\S+)\n"), 65535
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def main(prefix: str) -> int:
    """Print one line, ``prefix`` and JSON: this rank's identity and findings."""
    found: dict[str, Any] = {"host": socket.gethostname(), "rank": os.environ.get("RANK"), "problems": []}
    try:
        world = discover()
        names = ("rank", "size", "local_rank", "local_size", "node", "launcher", "source")
        found |= {name: getattr(world, name) for name in names}
        found["mpi_size"] = _mpi_size(world, found["problems"])
        found["mpi_unused"] = "" if mpi.in_use(world) else " ".join(mpi.library().split())
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        found["meets"], found["unreached"] = meet(world, address, port)
        if world.rank == 0:
            from wordrun.track.options import WandbConfig
            from wordrun.track.wandb import choose_mode

            found["wandb"] = choose_mode(WandbConfig())
    except UserError as error:
        found["problems"].append(str(error))
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    found |= {"cores": len(affinity) or os.cpu_count() or 1, "affinity": affinity}
    found["threads"] = os.environ.get("OMP_NUM_THREADS")
    begin = time.perf_counter()
    import torch

    found["torch_s"] = round(time.perf_counter() - begin, 2)
    found["devices"] = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not found["devices"]:
        found |= {"torch": torch_build(), "hidden": hidden(os.environ)}
    else:
        found |= device_of(found.get("local_rank", 0), found["devices"], os.environ)
        found["device_id"] = _hardware_id(found["index"])
    alone = bool(found["problems"] or found["meets"]) or found["mpi_size"] not in (None, found["size"])
    if not alone and found["size"] > 1:
        found["all_reduce"] = all_reduce()
        found["own_address"], found["interface"] = resolve(found["host"]), os.environ.get("GLOO_SOCKET_IFNAME", "")
    sys.stdout.write(f"{prefix}{json.dumps(found)}\n")  # one write, so that other ranks' output cannot split it
    sys.stdout.flush()
    if found.get("all_reduce") == LATE:
        os._exit(0)  # the thread may wait for other ranks for ever
    return 0


def all_reduce() -> str:
    """Join the process group as training does, and sum a number over all ranks; return the error (empty: none)."""
    import torch.distributed

    from wordrun.dist.setup import cleanup, identify, setup

    errors = [LATE]

    def add() -> None:
        try:
            world = setup(identify(), timeout_s=REDUCE_S)
            total = torch.ones(1, device=world.device)
            torch.distributed.all_reduce(total)
            wrong = f"{world.size} ones add up to {total.item():g}" if total.item() != world.size else ""
        except Exception as error:  # RuntimeError, or a subclass of it that depends on the backend
            wrong = first_line(error)
        else:
            cleanup()
        errors.append(wrong)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    thread.join(REDUCE_MOST_S)
    return errors[-1]


def _mpi_size(world: World, problems: list[str]) -> int | None:
    if not mpi.in_use(world):
        return None
    try:
        return int(mpi.communicator().size)
    except UserError as error:
        problems.append(str(error))
        return None


def device_of(local_rank: int, count: int, env: Mapping[str, str]) -> dict[str, int | None]:
    """Return a rank's device: torch's ``index``, and the node's ``device`` number, if known.

    Args:
        local_rank: index of the rank on its node.
        count: devices that torch sees.
        env: its environment; a list of visible devices in it renumbers them.
    """
    index = 0 if count == 1 else local_rank % count
    lists = [env[name].split(",") for name in VISIBLE if env.get(name)]
    number = lists[0][index].strip() if lists and index < len(lists[0]) else str(index)
    # With one visible device and no list, the launcher has assigned devices without saying how.
    known = number.isdigit() and (bool(lists) or count > 1)
    return {"index": index, "device": int(number) if known else None}


def _hardware_id(index: int) -> str | None:
    """Return a device id that does not depend on numbering; None: there is none."""
    import torch

    kind = torch.accelerator.current_accelerator()
    properties: Any = getattr(torch, kind.type).get_device_properties(index) if kind else None
    return str(properties.uuid) if hasattr(properties, "uuid") else None


def meet(world: World, address: str, port: int) -> tuple[str, list[str]]:
    """Open sockets from this rank to rank 0, and from rank 0 back to the first rank of each node.

    Returns:
        This rank's error (empty: none) and, on rank 0, the nodes that it could not reach.
    """
    if world.size == 1:
        return "", []
    end = time.monotonic() + MEETING_S
    if world.rank == 0:
        return _serve(world.size - 1, port, end)
    with socket.create_server(("", 0)) as server:
        # One socket back to each node is enough, and rank 0 needs none to its own.
        back = server.getsockname()[1] if world.local_rank == 0 else 0
        while True:
            try:
                with socket.create_connection((address, port), timeout=5) as connection:
                    connection.sendall(f"{back} {world.rank} {socket.gethostname()}\n".encode())
                    connection.settimeout(MEETING_S)
                    connection.recv(1)  # wait until rank 0 has tried to connect back
                return "", []
            except OSError as error:
                if time.monotonic() > end:
                    return f"cannot reach MASTER_ADDR={address} port {port}: {error}", []
                time.sleep(0.2)


def _serve(others: int, port: int, end: float) -> tuple[str, list[str]]:
    arrived: set[int] = set()
    unreached: list[str] = []

    def admit(connection: socket.socket, line: bytes) -> None:
        said = HELLO.fullmatch(line)
        if said is None or int(said[2]) in {0, *arrived} or int(said[2]) > others or int(said[1]) > LAST_PORT:
            raise UnfitError
        back, rank, host = int(said[1]), int(said[2]), said[3].decode(errors="replace")
        arrived.add(rank)
        with connection, contextlib.suppress(OSError):  # it may have been closed
            caller = connection.getpeername()[0]
            if back:
                try:
                    socket.create_connection((caller, back), timeout=BACK_S).close()
                except OSError as error:
                    unreached.append(f"rank {rank} on {host} ({caller} port {back}): {error}")

    try:
        with (
            selectors.DefaultSelector() as selector,
            contextlib.closing(Listener("", selector, admit, port=port)) as at,
        ):
            while len(arrived) < others:
                if time.monotonic() > end:
                    return (
                        f"only {len(arrived)} of {others} other ranks reached port {port} in {MEETING_S:g} s",
                        unreached,
                    )
                for key, _ in selector.select(0.5):
                    key.data()
                at.look()
    except OSError as error:
        return f"cannot listen at port {port}: {error}", unreached
    return "", unreached


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
