"""PBS: OpenPBS, PBS Pro."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job, LocalHost, read_hosts, short
from wordrun.launch.options import Options
from wordrun.launch.schedulers.base import (
    NO_HOSTS,
    Grant,
    Scheduler,
    default_slots,
    devices_of,
    nodes_of_job,
    ranks_of_node,
)
from wordrun.launch.site import Site
from wordrun.launch.walltime import seconds

# Variables that a launcher in a PBS job sets for its ranks.
RANK_VARIABLES = ("PALS_RANKID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class PBS(Scheduler):
    """The hosts are in a file; the mpiexec of an MPI library or of the site starts the ranks."""

    name = "pbs"
    variable = "PBS_JOBID"
    # PBS sets OMP_NUM_THREADS to NCPUS, the CPUs of the job's chunk on the first node.
    exports: ClassVar[Mapping[str, str]] = {
        "TMPDIR": r".*/pbs\.\d+\b[^/]*",
        "OMP_NUM_THREADS": "{NCPUS}",
        "CUDA_VISIBLE_DEVICES": ".*",
    }
    end_query = ("qstat", "-f", "-F", "json")
    submitter, canceller, directive, interactive = "qsub", "qdel", "#PBS", "qsub -I"
    nodes_of_shell = "-l select={nodes} -l place=scatter"
    job_query, unknown_job = ("qstat",), "Unknown Job Id|has finished"
    output = "{name}.o{number}"

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return the job that ``env`` describes; its hosts are in PBS_NODEFILE."""
        path = env.get("PBS_NODEFILE", "")
        if not path:
            raise ConfigError(f"PBS job {env['PBS_JOBID']}, but PBS_NODEFILE is not set: {NO_HOSTS}")
        inside = next((name for name in RANK_VARIABLES if name in env), "")
        if inside:
            already = f"this is already rank {env[inside]} of a launch in PBS job {env['PBS_JOBID']} ({inside})"
            remedy = "call launch in the job's own shell, or use --scheduler none for ranks on this node alone"
            raise ConfigError(f"{already}: {remedy}")
        lines = read_hosts(path, "PBS_NODEFILE")
        unexpected = next((line for line in lines if len(line.split()) > 1), "")
        if unexpected:
            raise ConfigError(f"PBS_NODEFILE={path}: {unexpected!r} should be the name of one host")
        listed = Counter(lines)  # in the file's order
        cores, cores_why = host.cores, host.cores_why
        if site.cores:
            cores, cores_why = site.cores, f"site {site.name}"
        elif env.get("NCPUS", "").isdigit() and short(host.name) not in map(short, listed):
            cores, cores_why = int(env["NCPUS"]), "NCPUS"
        devices, devices_why = devices_of(host, site)
        count = len(listed)
        return Job(
            hosts=tuple(listed),
            cores=(cores,) * count,
            devices=(devices,) * count,
            slots=default_slots(site, devices, tuple(listed.values())),
            scheduler="pbs",
            id=env["PBS_JOBID"],
            hostfile=path if len(lines) == count else "",
            queue=env.get("PBS_QUEUE", ""),
            reasons={
                "scheduler": "PBS_JOBID",
                "hosts": f"PBS_NODEFILE {path}",
                "cores": cores_why,
                "devices": devices_why,
                "job": "PBS_JOBID",
                "queue": "PBS_QUEUE",
            },
        )

    def granted(self, env: Mapping[str, str], host: LocalHost, hosts: Sequence[str]) -> Iterator[Grant]:
        """Yield NCPUS for all hosts. It counts the CPUs of the job's first chunk; PBS does not tell those of others."""
        if env.get("NCPUS", "").isdigit() and int(env["NCPUS"]):
            yield (int(env["NCPUS"]),) * len(hosts), "NCPUS"
        yield tuple(host.cores if short(each) == short(host.name) else sys.maxsize for each in hosts), host.cores_why

    def read_end(self, text: str) -> float:
        """Return the start of the job plus its walltime."""
        (facts,) = json.loads(text)["Jobs"].values()
        return time.mktime(time.strptime(facts["stime"])) + seconds(facts["Resource_List"]["walltime"])

    def directives(self, options: Options, site: Site) -> list[str]:
        """Return qsub's options."""
        filesystems = options.filesystems or site.submit.get("filesystems")
        given = site.submit.get("directives", [])
        # PBS may put several chunks on one host; only chunks of single devices may share a node.
        scatter = not (site.queue(options.queue).get("device_per_rank") or any("place=" in word for word in given))
        return [
            f"-N {options.job_name}",
            *([f"-A {options.account}"] if options.account else []),
            *([f"-q {options.queue}"] if options.queue else []),
            f"-l select={_select(options, site)}",
            f"-l walltime={_walltime(options.walltime or '')}",
            *([f"-l filesystems={filesystems}"] if filesystems else []),
            *(["-l place=scatter"] if scatter else []),
            *given,
            "-j oe",
            f"-r {'y' if site.queue(options.queue).get('rerunnable') else 'n'}",
        ]

    def submit_command(self, path: str, previous: str | None) -> list[str]:
        """Return qsub's command line."""
        return ["qsub", *(["-W", f"depend=afterany:{previous}"] if previous else []), path]

    def fixed(self, site: Site, queue: Mapping[str, object], resource: str) -> str:
        """Return a message's words if the site's ``select`` fixes it, except GPUs in queues that count devices."""
        by_device = resource == "gpu" and queue.get("device_per_rank")
        return "what jobs have of a node (submit.select)" if "select" in site.submit and not by_device else ""


def _select(options: Options, site: Site) -> str:
    """Return PBS's chunks: from the site file, else from the node's known resources."""
    by_device = site.queue(options.queue).get("device_per_rank")
    own = site.submit.get("select", "")
    each = (options.gpus or ranks_of_node(options, site)) if by_device else 1
    words = [f"{nodes_of_job(options, site) * each}", *([own] if own else [])]
    if not by_device and "select" not in site.submit:
        gpus = options.gpus or site.devices
        ranks = ranks_of_node(options, site) if options.ppn or options.np else gpus
        wanted = {"ncpus": options.cores or site.cores, "ngpus": gpus, "mpiprocs": ranks}
        words += [f"{name}={count}" for name, count in wanted.items() if count]
    return ":".join(words)


def _walltime(walltime: str) -> str:
    """Convert ``[D-]H:MM:SS`` to H:MM:SS: PBS does not support days."""
    days, _, rest = walltime.rpartition("-")
    hours, _, minutes = rest.partition(":")
    return f"{24 * int(days) + int(hours)}:{minutes}" if days else walltime
