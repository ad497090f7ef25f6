"""The interface of schedulers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from wordrun.common.files import read_proc
from wordrun.launch.job import Job, LocalHost
from wordrun.launch.options import Options
from wordrun.launch.site import Site

# The remedy if a job's variables name no hosts.
NO_HOSTS = (
    "launch in the job's own shell, or name the hosts with --hostfile FILE "
    "(--scheduler none starts ranks on this machine alone)"
)
# A number for each host, and its source.
Grant = tuple[tuple[int, ...], str]


class Scheduler:
    """A scheduler. The defaults suit one that only runs jobs."""

    name: ClassVar[str]
    variable: ClassVar[str] = ""
    """Variable set in its jobs."""
    numbers_hosts: ClassVar[bool] = False
    """Whether its launcher numbers the hosts, and thus the ranks, in the job's order."""
    exports: ClassVar[Mapping[str, str]] = {}
    """Variables that it sets in jobs, and patterns of its values; {NAME} stands for the value of another variable."""
    checks_names: ClassVar[bool] = True
    """Whether to resolve host names before ranks start; unnecessary if the scheduler distributes addresses."""
    end_query: ClassVar[tuple[str, ...]] = ()
    """Command that prints when a job ends; the job's id is appended."""
    submitter: ClassVar[str] = ""
    """Command that submits a job script; empty: there is none."""
    canceller: ClassVar[str] = ""
    """Command that cancels jobs."""
    interactive: ClassVar[str] = ""
    """Command that starts a job with a shell."""
    nodes_of_shell: ClassVar[str] = ""
    """Options with which ``interactive`` requests {nodes} nodes."""
    job_query: ClassVar[tuple[str, ...]] = ()
    """Command that prints something about a job that waits or runs; the job's id is appended."""
    unknown_job: ClassVar[str] = ""
    """Pattern of its error if the job has ended."""
    output: ClassVar[str] = ""
    """File with the output of a job, relative to where it was submitted; {name} and {number} are the job's."""
    sharing: ClassVar[tuple[str, ...]] = ()
    """Arguments that its launcher needs to start ranks on nodes where other ranks of the job run."""
    beside: ClassVar[str] = "both use the cores and devices of the hosts that they share"
    """What happens if two launches run in a job at the same time, in words for a message."""
    directive: ClassVar[str] = ""
    """Prefix of the scheduler's lines in a job script."""
    fills_directives: ClassVar[bool] = False
    """Whether {devices} in a site's directives is replaced."""
    continuing: ClassVar[tuple[str, ...]] = ('echo "saved: submit this script again to continue"',)
    """Shell lines that continue a run that has saved, in the script of a single job."""

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return the job that ``env`` is part of.

        Raises:
            ConfigError: a variable or file of the job is missing or cannot be parsed.
        """
        raise NotImplementedError

    def granted(self, env: Mapping[str, str], host: LocalHost, hosts: Sequence[str]) -> Iterator[Grant]:
        """Yield the cores that its job may use on each of ``hosts``, once for each source that limits them."""
        yield from ()

    def has_set(self, name: str, env: Mapping[str, str]) -> bool:
        """Return whether the value of ``name`` in ``env`` is the scheduler's rather than the user's."""
        pattern = re.sub(r"{(\w+)}", lambda other: re.escape(env.get(other[1], "")), self.exports.get(name, ""))
        return bool(pattern) and name in env and re.fullmatch(pattern, env[name]) is not None

    def end_time(
        self, job_id: str, before_exec: Callable[[], None] | None = None, within_s: float = 20
    ) -> float | None:
        """Return when the walltime of a job ends, in seconds since 1970; None: unknown.

        Args:
            job_id: the scheduler's id.
            before_exec: called in the child process before exec.
            within_s: time limit of the query, in seconds.
        """
        if not self.end_query:
            return None
        try:
            done = subprocess.run(
                [*self.end_query, job_id],
                capture_output=True,
                text=True,
                timeout=within_s,
                check=True,
                preexec_fn=before_exec,
            )
            return self.read_end(done.stdout)
        except (KeyError, ValueError, IndexError, OSError, subprocess.SubprocessError):
            return None

    def read_end(self, text: str) -> float:
        """Return the end of a job, in seconds since 1970, from the output of ``end_query``."""
        raise NotImplementedError

    def has_job(self, job_id: str) -> bool | None:
        """Return whether a job waits or runs; None: the scheduler does not answer, or cannot be asked."""
        if not self.job_query:
            return None
        try:
            done = subprocess.run([*self.job_query, job_id], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return False if re.search(self.unknown_job, done.stderr) else None
        return bool(done.stdout.strip())

    def directives(self, options: Options, site: Site) -> list[str]:
        """Return the options of a job script, without ``directive``."""
        raise NotImplementedError

    def submit_command(self, path: str, previous: str | None) -> list[str]:
        """Return the command that submits the script ``path``, to start after the job ``previous`` has ended."""
        raise NotImplementedError

    def job_id(self, text: str) -> str:
        """Return the job's id from the output of ``submit_command``."""
        return text.strip()

    def sends_warning(self, options: Options) -> bool:
        """Return whether the scheduler itself sends ranks the SIGUSR1 of --walltime-margin."""
        return False

    def fixed(self, site: Site, queue: Mapping[str, object], resource: str) -> str:
        """Return the entry of the site file that fixes how much of a node's ``resource`` jobs get, for a message.

        Args:
            site: the cluster.
            queue: the limits of the job's queue.
            resource: gpu or cpus.

        Returns:
            Empty if nothing fixes it.
        """
        return ""

    def is_ending(self, job: Job) -> bool:
        """Return whether the scheduler is ending the job, and has sent SIGTERM to the ranks."""
        return False

    def with_others(self, job: Job, options: Options, launches: Sequence[int]) -> str:
        """Return a message if one of the ``launches`` that run on this host, by process ID, is in the same job.

        A host file and arguments with which ranks share nodes show that the user knows of the other launch.
        """
        own = f"{self.variable}={job.id}" if self.variable else ""
        same = [pid for pid in launches if own and own in read_proc(f"/proc/{pid}/environ").split("\0")]
        if not same or options.hostfile or {*self.sharing} & {*options.launcher_args}:
            return ""
        return f"process {same[0]} is another launch of this job: {self.beside}"

    def signal_step(self, job: Job, step: str, number: int) -> None:
        """Send a signal to the ranks of a step; raises OSError or SubprocessError on failure."""
        raise NotImplementedError


def node_count(options: Options, site: Site) -> int:
    """Return the number of nodes: -N, or the fewest for -n ranks, at one per device if the devices are known."""
    if options.nodes:
        return options.nodes
    ppn = options.ppn or options.gpus
    if not ppn and not site.queue(options.queue).get("device_per_rank"):
        ppn = site.ranks_per_node or site.devices
    return -(-options.np // ppn) if options.np and ppn else 1


def nodes_of_job(options: Options, site: Site) -> int:
    """Return the number of nodes that a submitted job requests: those of the ranks and --spare-nodes."""
    return node_count(options, site) + options.spare_nodes


def total_ranks(options: Options, site: Site) -> int:
    """Return the number of ranks that a submitted job will have, as far as the site says what its nodes have."""
    return options.np or node_count(options, site) * (options.ppn or site.ranks_per_node or site.devices or 1)


def ranks_of_node(options: Options, site: Site) -> int:
    """Return the requested number of ranks per node, at least 1."""
    return options.ppn or -(-(options.np or 1) // node_count(options, site))


def devices_of(host: LocalHost, site: Site) -> tuple[int, str]:
    """Return a node's devices if the job does not say, and how they were found."""
    if site.devices is not None and not (site.count_devices and host.devices):
        return site.devices, f"site {site.name}"
    return host.devices, host.devices_why


def default_slots(site: Site, devices: int, listed: Sequence[int]) -> tuple[int, ...]:
    """Return the default ranks on each host: the site's, else one per device, else the job's ``listed`` numbers."""
    each = site.ranks_per_node or devices
    return (each,) * len(listed) if each else tuple(listed)


class NoScheduler(Scheduler):
    """A laptop, a workstation, or a single node of a job."""

    name = "none"

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return this machine as a job of one host."""
        return Job(
            hosts=(host.name,),
            cores=(host.cores,),
            devices=(host.devices,),
            slots=(max(1, host.devices),),
            reasons={"hosts": "this machine's name", "cores": host.cores_why, "devices": host.devices_why},
        )
