"""What launch knows about a cluster, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wordrun.launch.job import short


@dataclass(frozen=True)
class Site:
    """One cluster. The fields are the keys of its YAML file."""

    name: str = ""
    """The file's name without .yaml; empty: the cluster is unknown."""
    description: str = ""
    """One line, to show to users."""
    recognise: Mapping[str, Any] = field(default_factory=dict)
    """hosts: a regular expression that matches a node's short name; env: regular expressions to find in variables."""
    scheduler: str = ""
    """The scheduler, such as slurm."""
    launcher: str = ""
    """The launcher that starts ranks in its jobs."""
    launcher_paths: tuple[str, ...] = ()
    """Paths of that launcher (wildcards allowed), in order of preference; empty: look in PATH."""
    devices: int | None = None
    """Accelerators per node; unset: as many as the job sees."""
    device: str = ""
    """The kind of these accelerators, as plan.device names it."""
    count_devices: bool = False
    """Whether jobs may hold only some of a node's devices: then the visible ones count instead of ``devices``."""
    network: float | None = None
    """GB/s of the node's network adapters for each device, for ``launch --doctor``."""
    ranks_per_node: int | None = None
    """Default number of ranks; unset: one per device, else one."""
    cores: int | None = None
    """Hardware threads per node that ranks may use, if the job does not say."""
    cores_near_device: tuple[str, ...] = ()
    """For each device, the cores next to it, such as 8-15; PALS binds the device's rank to them."""
    pals_binding: str = ""
    """PALS's --cpu-bind for nodes without devices, such as depth."""
    srun_args: tuple[str, ...] = ()
    """srun options for devices and binding; {devices} stands for the number per node."""
    master_addr: str = "{host}"
    """Name under which other nodes reach {host}, a node's short name."""
    env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Variables for every rank: value and reason. The user's exports win."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that must not reach the launcher, and why."""
    proxies: Mapping[str, str] = field(default_factory=dict)
    """Variables through which compute nodes reach the internet."""
    internet: bool = True
    """Whether compute nodes can reach the internet; if not, W&B records offline."""
    modules: tuple[str, ...] = ()
    """Shell lines that load torch and MPI, for setup_python."""
    submit: Mapping[str, Any] = field(default_factory=dict)
    """For job scripts: filesystems, select (empty: full nodes, without resource requests), account_needed,
    queue_needed, queue_option, directives."""
    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: nodes [least, most], hours (or {most nodes: hours}), jobs (how many of one user, waiting or running),
    rerunnable, and device_per_rank if jobs request devices individually."""
    default_queue: str = ""
    """The queue of jobs that name none; empty: unknown."""
    all_queues: bool = False
    """Whether ``queues`` lists all queues: then an unknown name that resembles one of them is an error."""

    @property
    def internet_access(self) -> str:
        """How compute nodes reach the internet according to the site's file; empty: it does not say."""
        if not self.internet:
            return f"not reachable from compute nodes of {self.name}"
        proxies = [name for name in self.proxies if name != "no_proxy"]
        return f"through the site's proxies ({', '.join(proxies)})" if proxies else ""

    def matches(self, host: str, env: Mapping[str, str]) -> bool:
        """Return whether ``host`` or a variable of ``env`` identifies this site."""
        hosts = self.recognise.get("hosts")
        if hosts and (re.fullmatch(hosts, host) or re.fullmatch(hosts, short(host))):
            return True
        patterns = self.recognise.get("env", {})
        return any(name in env and re.search(pattern, env[name]) for name, pattern in patterns.items())

    def queue(self, name: str | None) -> Mapping[str, Any]:
        """Return the limits of a queue, by default of the default one; empty: unknown."""
        return self.queues.get(name or self.default_queue, {})


UNKNOWN = Site()


def fill(text: str, **values: object) -> str:
    """Return ``text`` with each {name} of ``values`` replaced; all other braces are kept."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def numbers(cores: str) -> set[int]:
    """Return the cores listed in text such as 8-15,40."""
    ranges = (part.partition("-") for part in cores.split(","))
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}
