"""What ``launch`` asks of a scheduler."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from wordrun.launch.job import Job, LocalHost
from wordrun.launch.request import Options
from wordrun.launch.site import Site

# The remedy where a job's variables name no hosts.
NO_HOSTS = (
    "launch in the job's own shell, or name the hosts by --hostfile FILE "
    "(--scheduler none starts ranks on this machine alone)"
)


class Scheduler:
    """One scheduler. The defaults are for one that only runs jobs."""

    name: ClassVar[str]
    variable: ClassVar[str] = ""
    """Variable that is set in its jobs."""
    numbers_hosts: ClassVar[bool] = False
    """Whether its launcher numbers the hosts, and with them the ranks, in the job's order."""
    checks_names: ClassVar[bool] = True
    """Whether hosts should be looked up before ranks start; not where the scheduler distributes addresses itself."""
    end_query: ClassVar[tuple[str, ...]] = ()
    """Command that prints when a job ends; its id is appended."""
    submitter: ClassVar[str] = ""
    """Command that submits a job script; empty: there is none."""
    canceller: ClassVar[str] = ""
    """Command that cancels jobs."""
    directive: ClassVar[str] = ""
    """Beginning of a job script's lines for the scheduler."""
    fills_directives: ClassVar[bool] = False
    """Whether {devices} in a site's directives is replaced."""
    continuing: ClassVar[tuple[str, ...]] = ('echo "saved: submit this script again to continue"',)
    """Shell lines with which a job script of a single job continues a run that has saved."""

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return the job that ``env`` is part of.

        Raises:
            ConfigError: a variable or file of the job is missing or cannot be understood.
        """
        raise NotImplementedError

    def sets_threads(self, env: Mapping[str, str]) -> bool:
        """Say whether OMP_NUM_THREADS in ``env`` was set by the scheduler rather than by the user."""
        return False

    def end_time(
        self, job_id: str, before_exec: Callable[[], None] | None = None, within_s: float = 20
    ) -> float | None:
        """Return when the walltime of a job ends, in seconds since 1970; None: unknown.

        Args:
            job_id: the scheduler's id.
            before_exec: runs in the new process before it becomes ``end_query``.
            within_s: seconds that the query may take.
        """
        if not self.end_query:
            return None
        try:
            done = subprocess.run(
                [*self.end_query, job_id],
                capture_output=True, text=True, timeout=within_s, check=True, preexec_fn=before_exec,
            )  # fmt: skip
            return self.read_end(done.stdout)
        except (KeyError, ValueError, IndexError, OSError, subprocess.SubprocessError):
            return None

    def read_end(self, text: str) -> float:
        """Return the end of a job, in seconds since 1970, that ``end_query`` has printed."""
        raise NotImplementedError

    def directives(self, options: Options, site: Site) -> list[str]:
        """Return the options of a job script, without ``directive``."""
        raise NotImplementedError

    def submit_command(self, path: str, previous: str | None) -> list[str]:
        """Return the command that submits the script ``path``, to start when the job ``previous`` has ended."""
        raise NotImplementedError

    def sends_warning(self, options: Options) -> bool:
        """Say whether the scheduler itself sends ranks the SIGUSR1 of --walltime-margin."""
        return False

    def fixed(self, site: Site, queue: Mapping[str, object], resource: str) -> str:
        """Return what in a site's file already fixes a ``resource`` (gpu or cpus) of its jobs; empty: nothing."""
        return ""

    def signal_step(self, job: Job, step: str, number: int) -> None:
        """Send a signal to the ranks of a step; raises OSError or SubprocessError where that fails."""
        raise NotImplementedError


def node_count(options: Options, site: Site) -> int:
    """Return the nodes of a job: -N, or the fewest that hold -n ranks, one per device where these are known."""
    if options.nodes:
        return options.nodes
    ppn = options.ppn or options.gpus
    if not ppn and not site.queue(options.queue).get("device_per_rank"):
        ppn = site.ranks_per_node or site.devices
    return -(-options.np // ppn) if options.np and ppn else 1


def ranks_of_node(options: Options, site: Site) -> int:
    """Return the ranks per node that are asked for, at least 1."""
    return options.ppn or -(-(options.np or 1) // node_count(options, site))


def devices_of(host: LocalHost, site: Site) -> tuple[int, str]:
    """Return the devices of a node where the job does not say, and how they were found."""
    if site.devices is not None and not (site.count_devices and host.devices):
        return site.devices, f"site {site.name}"
    return host.devices, host.devices_why


def default_slots(site: Site, devices: int, listed: Sequence[int]) -> tuple[int, ...]:
    """Return the default ranks of each host: the site's, else one per device, else those that the job lists."""
    each = site.ranks_per_node or devices
    return (each,) * len(listed) if each else tuple(listed)
