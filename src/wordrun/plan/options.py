"""The ``plan.*`` options and the hardware they describe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.common.validation import one_of, positive
from wordrun.launch import site_files
from wordrun.launch.site import Site
from wordrun.plan.devices import VARIANTS

DEFAULT = "a100-40"
"""The device to plan for, unless one is named."""
CPU = "cpu"
"""The kind of device whose memory is its node's, shared by all ranks there."""


@dataclass
class PlanConfig:
    """The hardware to plan for."""

    FORMER: ClassVar[dict[str, str]] = {"devices": "ranks"}

    ranks: int | None = None
    """Total number of ranks, one per device; null: one node, or one rank with plan.device=cpu."""
    device: str | None = None
    """Kind of device, one of the names below; cpu: ranks on the CPUs of a node, whose memory they share; null: the
    site's devices, or a100-40."""
    memory: float | None = None
    """Memory per device in GiB, with plan.device=cpu per node; null: as for plan.device."""
    per_node: int | None = None
    """Devices per node; null: as at the site, or as in a typical node with plan.device; with plan.device=cpu all ranks
    are on one node."""
    site: str | None = None
    """A site that launch knows, or a site file, which sets the kind of device and the number per node."""
    reserve: float = 0.1
    """Fraction of a device's memory to leave free: driver context, communication library, fragmentation."""
    host_memory: float | None = None
    """Host memory per node in GiB, which must hold offloaded data; null: not checked."""


@dataclass(frozen=True)
class Hardware:
    """The devices to plan for."""

    kind: str
    devices: int
    per_node: int
    memory: float
    """GiB per device; on CPUs, each rank's share of its node's memory."""
    reserve: float
    host_memory: float | None
    """GiB per node."""
    bf16: bool
    """Whether the devices have fast bf16."""
    float8: bool
    """Whether train.float8 works on the devices, as far as is known."""
    assumed: str = ""
    """What is assumed, because neither the options nor a site say it: "device" (the kind), or "memory" (a node's)."""

    @property
    def usable(self) -> float:
        """Bytes per device that a strategy may use."""
        return self.memory * (1 - self.reserve) * 2**30

    @property
    def usable_host(self) -> float:
        """Bytes of host memory per device."""
        node = float("inf") if self.host_memory is None else self.host_memory
        return node / min(self.per_node, self.devices) * 2**30

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may be partly used."""
        return -(-self.devices // self.per_node)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.kind == CPU


def hardware(options: PlanConfig) -> Hardware:
    """Return the hardware described by ``options``.

    Raises:
        ConfigError: if values are invalid; the message names all of them.
    """
    site = _site(options.site) if options.site else None
    kind = options.device or (site.device if site else "") or DEFAULT
    problems = []
    if options.memory is None:
        problems += [
            f"{problem}; for another one add plan.memory=GIB" for problem in one_of("plan.device", kind, VARIANTS)
        ]
    device, memory = VARIANTS.get(kind, (None, 0.0))
    typical = options.ranks or 1 if kind == CPU else device.per_node if device else 1
    per_node = options.per_node or (site.devices or site.ranks_per_node if site else None) or typical
    problems += positive("plan", options, "ranks", "per_node")
    for name, size in (("memory", options.memory), ("host_memory", options.host_memory)):
        if size is not None and not 0 < size < float("inf"):
            problems.append(f"plan.{name}={size:g} should be a number of GiB above 0")
    if not 0 <= options.reserve < 1:
        problems.append(f"plan.reserve={options.reserve:g} should be at least 0 and less than 1")
    if problems:
        raise ConfigError("\n".join(problems))
    devices, memory = options.ranks or per_node, options.memory or memory
    bf16, float8 = device is None or device.bf16, device is None or device.float8
    near, assumed = min(per_node, devices), ""
    if kind == CPU:
        memory, assumed = memory / near, "" if options.memory else "memory"
    elif not options.device and not (site and site.device):
        assumed = "device"
    return Hardware(kind, devices, near, memory, options.reserve, options.host_memory, bf16, float8, assumed)


def ranks_for_launch(options: PlanConfig, target: Hardware) -> list[str]:
    """Return the options with which ``launch`` starts a rank on each device of ``target``; [] if that is its default.

    At a site, where the job says how many ranks a node gets, the number of nodes is enough.
    """
    site = _site(options.site) if options.site else None
    if target.devices % target.per_node:  # launch fills the nodes in order, and the last one partly
        return ["-n", str(target.devices)]
    if site and not site.count_devices and (site.ranks_per_node or site.devices) == target.per_node:
        return ["-N", str(target.nodes)]
    if target.nodes > 1:
        return ["-N", str(target.nodes), "--ppn", str(target.per_node)]
    # Without devices, launch starts a single process.
    return [] if target.on_cpu and target.devices == 1 else ["-n", str(target.devices)]


def _site(name: str) -> Site:
    files = site_files.site_files(os.environ)
    if name not in files and not os.path.isfile(name):
        raise ConfigError(
            f"plan.site={name} is neither a file nor one of {', '.join(sorted(files))}{nearest(name, files)}"
        )
    return site_files.load(files.get(name, name))
