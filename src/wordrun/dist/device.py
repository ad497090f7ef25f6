"""Which device a rank uses, and how ranks communicate on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wordrun.common.errors import WorldError
from wordrun.common.log import LOGGER
from wordrun.common.version import torch_build
from wordrun.dist.world import World

if TYPE_CHECKING:
    import torch


COUNTED = "WORDRUN_DEVICES"
"""Variable with the number of devices that launch has counted on each node, and how it has counted them."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose which of a node's devices a process sees."""


def choose_device(kind: str, world: World) -> torch.device:
    """Return the device of ``world``'s process.

    Args:
        kind: ``auto`` (the accelerator if there is one, else the CPU), ``cpu``, ``cuda`` or ``xpu``.
        world: says how many ranks share this node's devices.

    Raises:
        WorldError: torch finds no such device, or none for ``auto`` where launch has counted some.
    """
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    have = found.type if found is not None and found.type in ("cuda", "xpu") else "cpu"
    if kind == "auto":
        kind = have
        counted = os.environ.get(COUNTED, "")
        if have == "cpu" and counted and (by := hidden(os.environ)):
            LOGGER.warning("%s hides the devices of %s (launch counted %s): using the CPU", by, world.host, counted)
        elif have == "cpu" and counted:
            raise WorldError(
                f"launch counted devices: {counted}, but {torch_build()} finds none on {world.host}: install a torch "
                "built for the device, or load the site's module (details: launch --doctor); to use the CPU, "
                "train.device=cpu",
                page="install.md#clusters",
            )
    if kind == "cpu":
        return torch.device("cpu")
    if kind != have:
        found_here = f"{'no accelerator' if have == 'cpu' else have} on {world.host}"
        remedy = f"use device=auto, or install a torch built for {kind}"
        raise WorldError(
            f"device={kind}, but torch {torch.__version__} finds {found_here}: {remedy}", page="install.md#clusters"
        )
    count = torch.accelerator.device_count()
    if count != 1 and world.local_size > count:
        LOGGER.warning(
            "%d ranks share %d devices on %s: use launch --ppn %d", world.local_size, count, world.host, count
        )
    # A single visible device is number 0 for every local rank: the launcher has already assigned them.
    return torch.device(kind, 0 if count == 1 else world.local_rank % count)


def hidden(env: Mapping[str, str]) -> str:
    """Return the setting by which the user hides all devices from a process; empty: there is none."""
    settings = (f"{name}={env[name]}" for name in HIDING if name in env and env[name].strip() in ("", "-1"))
    return next(settings, "")


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
        raise WorldError(f"{missing}: load the site's frameworks module", page="install.md#clusters") from error
    return "ccl"
