"""What the machine on which ``launch`` runs shows of itself: name, cores and devices, without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class LocalHost:
    """This machine, and how each fact was found."""

    name: str
    cores: int
    cores_why: str
    devices: int
    devices_why: str


def local_host(env: Mapping[str, str]) -> LocalHost:
    """Return what this machine shows to a process with ``env``."""
    return LocalHost(socket.gethostname(), *count_cores(), *count_devices(env))


def short(host: str) -> str:
    """Return a host's name without its domain."""
    return host.partition(".")[0]


def count_cores() -> tuple[int, str]:
    """Return how many cores this process may use, and how that was found."""
    try:
        return len(os.sched_getaffinity(0)), "the CPU affinity of this process"
    except AttributeError:  # macOS
        return os.cpu_count() or 1, "the cores of this machine"


def count_devices(env: Mapping[str, str], root: str = "/") -> tuple[int, str]:
    """Return how many accelerators a process with ``env`` would see, and how that was found.

    Args:
        env: its environment; a ``*_VISIBLE_DEVICES`` in it is believed.
        root: the directory of ``proc``, ``dev`` and ``sys``.
    """
    for name in DEVICE_VARIABLES:
        if name in env:
            visible = [word.strip() for word in env[name].split(",")]
            # CUDA stops at the first name that it does not know: empty, -1 or NoDevFiles hide all that follow.
            end = next((i for i, word in enumerate(visible) if word in ("", "-1", "NoDevFiles")), len(visible))
            return end, f"{name}={env[name]}"
    nvidia = len(_names(os.path.join(root, "proc/driver/nvidia/gpus")))
    if nvidia:
        nodes = [name for name in _names(os.path.join(root, "dev")) if name[:6] == "nvidia" and name[6:].isdigit()]
        # A container sees every GPU of the machine in /proc, but has device files only for its own.
        return (len(nodes), "/dev/nvidia*") if 0 < len(nodes) < nvidia else (nvidia, "/proc/driver/nvidia/gpus")
    topology = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    amd = sum(_gpu_id(os.path.join(topology, node, "gpu_id")) != 0 for node in _names(topology))
    if amd:
        return amd, "/sys/class/kfd"
    return 0, "neither /proc/driver/nvidia nor /sys/class/kfd lists one"


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _gpu_id(path: str) -> int:
    """Return the id in a node's ``gpu_id`` file; CPUs are nodes too, with id 0."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
