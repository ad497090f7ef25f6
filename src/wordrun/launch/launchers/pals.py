"""PALS, HPE Cray's launcher in PBS: the mpiexec of Polaris, Aurora, Sunspot and Crux."""

from __future__ import annotations

import signal

from wordrun.common.errors import ConfigError
from wordrun.launch.launchers.base import Launcher, LauncherSearch, mpiexec_command
from wordrun.launch.ranks import listed
from wordrun.launch.request import Request
from wordrun.launch.site import Site, numbers


class PALS(Launcher):
    """An activated conda environment often puts another mpiexec first in PATH, which would start singletons."""

    name = "pals"
    site_keys = ("pals_binding", "launcher_paths")
    file_names = ("/pals/",)
    version_texts = ("PALS",)
    remedy = "module load cray-pals"
    # Most other PALS_ variables, such as PALS_PMI, are options of its mpiexec that users and sites export.
    stale = (
        "PALS_RANKID",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        "PALS_NODEID",
        # These options would take precedence over the --hostfile, --envall and -n of ``argv``.
        "PALS_HOSTLIST",
        "PALS_ENVLIST",
        "PALS_SOFT",
    )
    own_lines = "mpiexec: "
    faults = (
        (r"launch failed on (\S+): .*Couldn't forward RPC", "PALS cannot reach a node", 1),
        (r"Couldn't forward RPC launch", "PALS cannot reach a node", 0),
        (r"(\S+): ping failed", "PALS lost a node", 1),
        (r"ping failed|RPC timeout", "PALS lost a node", 0),
    )
    death_signal = signal.SIGTERM
    keep_going = ("--no-abort-on-failure",)

    @classmethod
    def is_default(cls, search: LauncherSearch) -> bool:
        """Return whether this is a job at a site that uses PALS."""
        return search.site.launcher == cls.name and search.job.scheduler == search.site.scheduler

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return mpiexec's command line."""
        options, ranks = request.options, request.ranks
        binding = options.cpu_bind or cpu_binding(request.site, ranks.ppn)
        # --depth is the distance between the first cores of consecutive ranks.
        depth = ("--depth", str(self.cores_per_rank(request))) if binding == "depth" else ()
        bound = (*depth, "--cpu-bind", binding) if binding else ()
        if not ranks.even and any(each != ranks.ppn for each in ranks.layout[:-1]):
            remedy = f"in {listed(ranks.layout)}, a host other than the last has fewer: use --ppn"
            raise ConfigError(f"{ranks.why}: PALS fills its hosts in order with --ppn ranks each; {remedy}")
        all_hosts = ranks.nodes == len(request.job.hosts) and request.job.hostfile
        return (
            self.path,
            "--envall",
            "--line-buffer",
            "-n",
            str(ranks.np),
            "--ppn",
            str(ranks.ppn),
            "--hostfile",
            request.job.hostfile if all_hosts else request.hosts_file,
            *bound,
            *options.launcher_args,
            *mpiexec_command(options),
        )

    def cores_per_rank(self, request: Request) -> int:
        """Return the smallest number of cores that the binding gives to a rank."""
        kind, _, parts = cpu_binding(request.site, request.ranks.ppn).partition(":")
        if kind != "list" or request.options.cpu_bind:
            return super().cores_per_rank(request)
        return min(len(numbers(cores)) for cores in parts.split(":"))


def cpu_binding(site: Site, ppn: int) -> str:
    """Return the --cpu-bind for ``ppn`` ranks on a node of ``site``; rank r drives device r mod devices.

    Ranks that share a device split its cores evenly; a rank gets only cores next to its device.
    """
    near = site.cores_near_device
    if not near:
        return site.pals_binding
    sharing = -(-ppn // len(near))
    parts = [_split(cores, sharing, site.name) for cores in near]
    return "list:" + ":".join(parts[rank % len(near)][rank // len(near)] for rank in range(ppn))


def _split(cores: str, parts: int, site: str) -> list[str]:
    if parts == 1:
        return [cores]
    near = sorted(numbers(cores))
    each = len(near) // parts
    if each == 0:
        raise ConfigError(
            f"--ppn: {site} has {len(near)} cores near each device, too few for {parts} ranks: use a smaller --ppn"
        )
    return [f"{near[i * each]}-{near[(i + 1) * each - 1]}" for i in range(parts)]
