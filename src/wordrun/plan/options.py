"""What the plan is made for: the ``plan.*`` options and the devices that they can name."""

from __future__ import annotations

import os
from dataclasses import dataclass

from wordrun.errors import ConfigError, nearest
from wordrun.launch import site_files
from wordrun.launch.site import Site


@dataclass
class PlanConfig:
    """For which machine to plan."""

    devices: int | None = None
    """Devices in all, one for each rank; null: those of a node."""
    device: str | None = None
    """Kind of the devices, a name of the table; null: the site's, or a100-40."""
    memory: float | None = None
    """Memory of a device in GiB; null: what the table says of plan.device."""
    per_node: int | None = None
    """Devices of a node; null: the site's, or what the table says of plan.device."""
    site: str | None = None
    """A cluster that launch knows (or a site file), for the kind of the devices and their number on a node."""
    reserve: float = 0.1
    """Share of a device's memory that the plan leaves free: the driver's context, the communication library, gaps."""
    host_memory: float | None = None
    """Memory of a node in GiB, in which what is offloaded has to fit; null: not looked at."""


@dataclass(frozen=True)
class Device:
    """A kind of device."""

    memory: float
    """GiB that a process finds on it when it is idle."""
    per_node: int
    """Devices of a usual node."""
    bf16: bool = True
    """Whether it is fast at bf16, so that train.dtype=auto chooses it."""


# Memory as the vendors' tools show it, with error correction on: less than the data sheets' round figures.
DEVICES = {
    "a100-40": Device(39.5, 4),
    "a100-80": Device(79.2, 4),
    "h100-80": Device(79.2, 8),
    "h200-141": Device(139.8, 8),
    "gh200": Device(94.5, 4),
    "b200": Device(178.3, 8),
    "mi250x": Device(64.0, 8),  # one of its two dies, which is one device
    "mi300x": Device(191.7, 8),
    "max1550": Device(64.0, 12),  # one of its two tiles, which is one device
    "v100-16": Device(15.8, 4, bf16=False),
    "v100-32": Device(31.7, 4, bf16=False),
    "a30": Device(23.6, 4),
    "a40": Device(44.4, 4),
    "l4": Device(22.2, 1),
    "l40s": Device(44.5, 4),
    "t4": Device(14.6, 1, bf16=False),
    "cpu": Device(16.0, 1, bf16=False),
}


@dataclass(frozen=True)
class Machine:
    """The devices of a plan."""

    kind: str
    devices: int
    per_node: int
    memory: float
    """GiB of a device."""
    reserve: float
    host_memory: float | None
    """GiB of a node."""

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.memory * (1 - self.reserve) * 2**30

    @property
    def usable_host(self) -> float:
        """Bytes of a node's memory for each of its devices."""
        whole = float("inf") if self.host_memory is None else self.host_memory
        return whole / min(self.per_node, self.devices) * 2**30

    @property
    def nodes(self) -> int:
        """Number of nodes, the last of which may be partly filled."""
        return -(-self.devices // self.per_node)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are processors."""
        return self.kind == "cpu"


def machine(options: PlanConfig) -> Machine:
    """Return the devices that ``options`` describe.

    Raises:
        ConfigError: names every impossible value.
    """
    site = _site(options.site) if options.site else None
    kind = options.device or (site.device if site else "") or "a100-40"
    problems = []
    if kind not in DEVICES:
        known = ", ".join(DEVICES)
        problems.append(
            f"plan.device={kind} should be one of {known}{nearest(kind, DEVICES)}; "
            "for another one say plan.memory=GIB, too"
        )
        if options.memory is not None:
            problems.clear()
    device = DEVICES.get(kind, Device(options.memory or 0, 1))
    per_node = options.per_node or (site.devices if site else None) or device.per_node
    for name, value in (("devices", options.devices), ("per_node", options.per_node)):
        if value is not None and value < 1:
            problems.append(f"plan.{name}={value} should be at least 1")
    for name, size in (("memory", options.memory), ("host_memory", options.host_memory)):
        if size is not None and not 0 < size < float("inf"):
            problems.append(f"plan.{name}={size:g} should be a number of GiB above 0")
    if not 0 <= options.reserve < 1:
        problems.append(f"plan.reserve={options.reserve:g} should be at least 0 and less than 1")
    if problems:
        raise ConfigError("\n".join(problems))
    devices = options.devices or per_node
    memory = device.memory if options.memory is None else options.memory
    return Machine(kind, devices, min(per_node, devices), memory, options.reserve, options.host_memory)


def _site(name: str) -> Site:
    files = site_files.site_files(os.environ)
    if name not in files and not os.path.isfile(name):
        raise ConfigError(
            f"plan.site={name} is neither a file nor one of {', '.join(sorted(files))}{nearest(name, files)}"
        )
    return site_files.load(files.get(name, name))
