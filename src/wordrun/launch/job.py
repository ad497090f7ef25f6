"""The hosts that a launch may use (this machine or a scheduler's job), and their cores, devices and slots."""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wordrun.common import cgroup
from wordrun.common.errors import ConfigError

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class LocalHost:
    """This machine's cores and devices, and how they were counted."""

    name: str
    cores: int
    cores_why: str
    devices: int
    devices_why: str


def local_host(env: Mapping[str, str]) -> LocalHost:
    """Describe this machine as a process with ``env`` sees it."""
    return LocalHost(socket.gethostname(), *count_cores(), *count_devices(env))


def short(host: str) -> str:
    """Return a host's name without its domain."""
    return host.partition(".")[0]


def count_cores() -> tuple[int, str]:
    """Return how many cores this process may use, and the source of that number."""
    try:
        cores, why = len(os.sched_getaffinity(0)), "the CPU affinity of this process"
    except AttributeError:  # macOS
        cores, why = os.cpu_count() or 1, "the cores of this machine"
    limit = cgroup.cores() or cores
    return (limit, "the CPU limit of this process's control group") if limit < cores else (cores, why)


def count_devices(env: Mapping[str, str], root: str = "/") -> tuple[int, str]:
    """Return how many accelerators a process with ``env`` would see, and the source of that number.

    Args:
        env: its environment; ``*_VISIBLE_DEVICES`` takes precedence.
        root: the directory that contains ``proc``, ``dev`` and ``sys``.
    """
    for name in DEVICE_VARIABLES:
        if name in env:
            visible = [word.strip() for word in env[name].split(",")]
            # CUDA stops at the first invalid entry: an empty one, -1 or NoDevFiles hides all that follow.
            end = next((i for i, word in enumerate(visible) if word in ("", "-1", "NoDevFiles")), len(visible))
            return end, f"{name}={env[name]}"
    nvidia = len(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*")))
    if nvidia:
        nodes = len(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
        # A container sees every GPU of the machine in /proc, but has device files only for its own.
        return (nodes, "/dev/nvidia*") if 0 < nodes < nvidia else (nvidia, "/proc/driver/nvidia/gpus")
    amd = sum(_gpu_id(path) != 0 for path in glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")))
    if amd:
        return amd, "/sys/class/kfd"
    return 0, "none in /proc/driver/nvidia or /sys/class/kfd"


def _gpu_id(path: str) -> int:
    """Return the id in a node's ``gpu_id`` file; CPUs are nodes too, with id 0."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Job:
    """A scheduler's job, or this machine alone: its hosts, in the job's order, and their resources."""

    hosts: tuple[str, ...]
    cores: tuple[int, ...]
    """Cores that this job may use on each host."""
    devices: tuple[int, ...]
    """Accelerators that this job may use on each host."""
    slots: tuple[int, ...]
    """Default number of ranks on each host: one per device, or what the scheduler or the site says."""
    scheduler: str = "none"
    id: str = ""
    inside: str = ""
    """The scheduler whose job this machine is part of, although only this machine is used; empty: none."""
    granted: tuple[int, ...] = ()
    """Threads that the scheduler allows all ranks on each host together; empty: as many as ``cores``."""
    hostfile: str = ""
    """A file with exactly these hosts, one per line."""
    partial: bool = False
    """Whether some of the scheduler's hosts are left out."""
    queue: str = ""
    restarts: int = 0
    """How often the scheduler has restarted this job."""
    ends_at: float | None = None
    """When the walltime ends, in seconds since 1970, if the scheduler says."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The source of each fact."""
    notes: tuple[str, ...] = ()
    """Messages to show before ranks start."""

    @property
    def threads(self) -> tuple[int, ...]:
        """How many threads all ranks on each host may have together."""
        return self.granted or self.cores

    @property
    def is_local(self) -> bool:
        """Whether this is just this machine rather than a scheduler's job."""
        return self.scheduler == "none"

    @property
    def title(self) -> str:
        """The job's name in messages."""
        return "this machine" if self.is_local else f"{self.scheduler.upper()} job {self.id}"

    def bounded(self, cores: tuple[int, ...], why: str) -> Job:
        """Return this job with at most ``cores`` threads on each host, because of ``why``."""
        if all(most <= bound for most, bound in zip(self.threads, cores, strict=True)):
            return self
        return replace(self, granted=tuple(map(min, self.threads, cores)), reasons={**self.reasons, "threads": why})

    def only(self, indices: list[int]) -> Job:
        """Return this job with only the hosts at ``indices``, in that order."""
        return replace(
            self,
            hosts=tuple(self.hosts[i] for i in indices),
            cores=tuple(self.cores[i] for i in indices),
            devices=tuple(self.devices[i] for i in indices),
            slots=tuple(self.slots[i] for i in indices),
            hostfile="",
            granted=tuple(self.granted[i] for i in indices if self.granted),
        )


def read_hosts(path: str, name: str) -> list[str]:
    """Return the lines of a host file, without comments.

    Args:
        path: the file.
        name: the option or variable that names it, for the error.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts = [line for line in lines if line]
    if not hosts:
        raise ConfigError(f"{name}={path} is empty: it should name one host per line")
    return hosts


def with_hostfile(job: Job, path: str, *, in_job_order: bool) -> Job:
    """Return ``job`` on the hosts of a file: one per line, with ``slots=N`` or ``:N`` to set its ranks.

    Args:
        job: the scheduler's job, or this machine.
        path: the file.
        in_job_order: whether ranks follow the job's order rather than the file's.

    Raises:
        ConfigError: a line cannot be parsed, or names a host outside the scheduler's job.
    """
    slots: dict[str, int] = {}
    for line in read_hosts(path, "--hostfile"):
        name, *words = line.replace(":", " slots=").split()
        number = words[0].removeprefix("slots=") if words else ""
        if len(words) > 1 or (words and (not number.isdigit() or int(number) < 1)):
            raise ConfigError(f"--hostfile {path}: {line!r} should be HOST, HOST:RANKS or HOST slots=RANKS")
        slots[name] = slots.get(name, 0) + int(number or 0)
    known = {short(host): i for i, host in enumerate(job.hosts)}
    strangers = [name for name in slots if short(name) not in known]
    if strangers and not job.is_local:
        has = f"{', '.join(job.hosts[:5])}{', ...' * (len(job.hosts) > 5)}"
        raise ConfigError(f"--hostfile {path}: {', '.join(strangers[:5])} not in {job.title}, which has {has}")
    if in_job_order:
        slots = dict(sorted(slots.items(), key=lambda item: known[short(item[0])]))
    part = job.only([known.get(short(name), 0) for name in slots])
    numbers = tuple(given or own for given, own in zip(slots.values(), part.slots, strict=True))
    return replace(part, hosts=tuple(slots), slots=numbers, reasons={**job.reasons, "hosts": f"--hostfile {path}"})


def hold_back(job: Job, spares: int, left_out: frozenset[str] = frozenset()) -> Job:
    """Return ``job`` without its failed hosts and, up to ``spares`` hosts in all, its last ones.

    Args:
        job: the complete job.
        spares: --spare-nodes.
        left_out: short names of hosts that have failed.

    Raises:
        ConfigError: no host would be left.
    """
    if not spares and not left_out:
        return job
    good = [i for i, host in enumerate(job.hosts) if short(host) not in left_out]
    failed = len(job.hosts) - len(good)
    used = good[: max(0, len(good) - max(0, spares - failed))]
    if not used:
        lost = f", of which {', '.join(sorted(left_out))} failed" if left_out else ""
        has = f"{job.title} has {len(job.hosts)} nodes{lost}"
        raise ConfigError(f"--spare-nodes {spares}: {has}; none would be left for ranks")
    return replace(job.only(used), partial=True)
