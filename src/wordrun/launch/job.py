"""What the machine or the scheduler's job offers: hosts, cores and devices, without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from wordrun.errors import ConfigError

# A scheduler's job is at work when its variable is set.
JOB_VARIABLES = {"pbs": "PBS_JOBID", "slurm": "SLURM_JOB_ID"}
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Job:
    """The hosts that this launch may use, in the job's order, and what each of them has."""

    hosts: tuple[str, ...]
    cores: tuple[int, ...]
    """Cores of each host that this job may use."""
    devices: tuple[int, ...]
    """Accelerators of each host that this job may use."""
    slots: tuple[int, ...]
    """Ranks of each host where nothing else is asked for: its devices, or 1."""
    scheduler: str = "none"
    id: str = ""
    inside: str = ""
    """The scheduler in whose job this machine is used on its own."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Where each fact comes from."""
    notes: tuple[str, ...] = ()
    """What the user should hear about before ranks start."""


def find_job(scheduler: str | None, env: Mapping[str, str]) -> Job:
    """Return the job that ``env`` is part of, or this machine where there is none.

    Raises:
        ConfigError: the scheduler asked for is not supported yet.
    """
    return READERS[scheduler or "none"](env, asked=scheduler is not None)


def _this_machine(env: Mapping[str, str], *, asked: bool) -> Job:
    cores, cores_why = count_cores()
    devices, devices_why = count_devices(env)
    host = socket.gethostname()
    found = [(name, env[variable]) for name, variable in JOB_VARIABLES.items() if env.get(variable)]
    notes = tuple(
        f"this is {name.upper()} job {job_id}, but this version of launch starts ranks on {host} alone "
        "(--scheduler none says the same without this line)"
        for name, job_id in found
        if not asked
    )
    return Job(
        hosts=(host,), cores=(cores,), devices=(devices,), slots=(max(1, devices),),
        inside=found[0][0] if found else "",
        reasons={
            "scheduler": "--scheduler none" if asked else "this machine",
            "hosts": "this machine's name",
            "cores": cores_why,
            "devices": devices_why,
        },
        notes=notes,
    )  # fmt: skip


def _not_yet(name: str) -> Callable[..., Job]:
    def refuse(env: Mapping[str, str], *, asked: bool) -> Job:
        raise ConfigError(
            f"--scheduler {name} comes with a later version: leave it out to start ranks on this machine alone"
        )

    return refuse


# A scheduler's reader turns variables and files into a Job; it joins the table here.
READERS: dict[str, Callable[..., Job]] = {"none": _this_machine, "pbs": _not_yet("pbs"), "slurm": _not_yet("slurm")}


def count_cores() -> tuple[int, str]:
    """Return how many cores this process may use, and what said so."""
    try:
        return len(os.sched_getaffinity(0)), "the CPU affinity of this process"
    except AttributeError:  # macOS
        return os.cpu_count() or 1, "the cores of this machine"


def count_devices(env: Mapping[str, str], root: str = "/") -> tuple[int, str]:
    """Return how many accelerators a process with ``env`` would see, and what said so.

    Args:
        env: its environment; a ``*_VISIBLE_DEVICES`` in it is taken at its word.
        root: directory under which ``proc``, ``dev`` and ``sys`` lie.
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
