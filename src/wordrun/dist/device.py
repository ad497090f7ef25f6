"""Which device a rank uses, and how ranks communicate on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wordrun.dist.world import World
from wordrun.errors import WorldError
from wordrun.log import LOGGER

if TYPE_CHECKING:
    import torch


def choose_device(kind: str, world: World) -> torch.device:
    """Return the device of ``world``'s process.

    Args:
        kind: ``auto`` (the accelerator if there is one, else the CPU), ``cpu``, ``cuda`` or ``xpu``.
        world: says how many ranks share this node's devices.

    Raises:
        WorldError: torch finds no such device.
    """
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    have = found.type if found is not None and found.type in ("cuda", "xpu") else "cpu"
    if kind == "auto":
        kind = have
    if kind == "cpu":
        return torch.device("cpu")
    if kind != have:
        found_here = f"{'no accelerator' if have == 'cpu' else have} on {world.host}"
        remedy = f"use device=auto, or install a torch built for {kind}"
        raise WorldError(f"device={kind}, but torch {torch.__version__} finds {found_here}: {remedy}")
    count = torch.accelerator.device_count()
    if count != 1 and world.local_size > count:
        LOGGER.warning(
            "%d ranks share %d devices on %s: use launch --ppn %d", world.local_size, count, world.host, count
        )
    # A single visible device is number 0 for every local rank: the launcher has already assigned them.
    return torch.device(kind, 0 if count == 1 else world.local_rank % count)


def backend_of(device: torch.device) -> str:
    """Return the name of torch's backend for collectives on ``device``.

    Raises:
        WorldError: this torch has none.
    """
    import torch.distributed

    if device.type == "cpu":
        return "gloo"
    if device.type == "cuda":
        return "nccl"
    if torch.distributed.is_backend_available("xccl"):
        return "xccl"
    try:
        import oneccl_bindings_for_pytorch  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        missing = "this torch has no xccl backend and oneccl_bindings_for_pytorch is not installed"
        raise WorldError(f"{missing}: load the site's frameworks module") from error
    return "ccl"
