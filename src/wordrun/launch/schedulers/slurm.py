"""SLURM."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.common.slurm import cores_on_node, expand_counts, expand_hosts, is_task
from wordrun.launch.job import Job, LocalHost
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
from wordrun.launch.site import Site, fill


class Slurm(Scheduler):
    """The hosts are in variables; srun starts the ranks, as a step of the job."""

    name = "slurm"
    variable = "SLURM_JOB_ID"
    exports: ClassVar[Mapping[str, str]] = {"TMPDIR": "/tmp", "CUDA_VISIBLE_DEVICES": ".*"}
    numbers_hosts = True
    checks_names = False
    end_query = ("squeue", "-h", "-o", "%e", "-j")
    submitter, canceller, directive, interactive = "sbatch", "scancel", "#SBATCH", "salloc"
    nodes_of_shell = "-N {nodes}"
    job_query, unknown_job = ("squeue", "--noheader", "--jobs"), "Invalid job id"
    output = "{name}-{number}.out"
    sharing = ("--overlap",)
    beside = "srun waits while that one uses what this one needs (both at once: launch --launcher-args=--overlap)"
    fills_directives = True
    continuing = (
        'if scontrol requeue "$SLURM_JOB_ID"; then echo "saved: SLURM requeues this job"',
        'else echo "saved, but SLURM does not requeue this job: submit this script again to continue"; fi',
    )

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return the job that SLURM's variables in ``env`` describe."""
        hosts = _hosts(env)
        count = len(hosts)
        notes: list[str] = []
        cores, cores_why = (host.cores,) * count, host.cores_why
        if env.get("SLURM_JOB_CPUS_PER_NODE"):
            cores = _per_host("SLURM_JOB_CPUS_PER_NODE", env, count, notes)
            cores_why = "SLURM_JOB_CPUS_PER_NODE"
        elif site.cores:
            cores, cores_why = (site.cores,) * count, f"site {site.name}"
        devices, devices_why = devices_of(host, site)
        # The first is set only on a job's nodes; the second in salloc's shell on a login node, possibly as a100:4.
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
            gpus = re.fullmatch(r"(?:[^,]*:)?(\d+)", env.get(name, ""))
            if gpus:
                devices, devices_why = int(gpus[1]), name
                break
        listed = (1,) * count
        # Without -n, SLURM_TASKS_PER_NODE is the number of CPUs, which is not a request for that many ranks.
        if not (site.ranks_per_node or devices) and env.get("SLURM_NTASKS") and env.get("SLURM_TASKS_PER_NODE"):
            listed = _per_host("SLURM_TASKS_PER_NODE", env, count, notes)
        end, restarts = env.get("SLURM_JOB_END_TIME", ""), env.get("SLURM_RESTART_COUNT", "")
        return Job(
            hosts=hosts,
            cores=cores,
            devices=(devices,) * count,
            slots=default_slots(site, devices, listed),
            scheduler="slurm",
            id=env["SLURM_JOB_ID"],
            queue=env.get("SLURM_JOB_PARTITION", ""),
            restarts=int(restarts) if restarts.isdigit() else 0,
            ends_at=float(end) if end.isdigit() else None,
            reasons={
                "scheduler": "SLURM_JOB_ID",
                "hosts": "SLURM_JOB_NODELIST",
                "cores": cores_why,
                "devices": devices_why,
                "job": "SLURM_JOB_ID",
                "queue": "SLURM_JOB_PARTITION",
                "restarts": "SLURM_RESTART_COUNT",
                **({"time_left": "SLURM_JOB_END_TIME"} if end.isdigit() else {}),
            },
            notes=tuple(notes),
        )

    def granted(self, env: Mapping[str, str], host: LocalHost, hosts: Sequence[str]) -> Iterator[Grant]:
        """Yield the cores of a single host, and those of each host's tasks, which are fewer in a job with --exclusive.

        The affinity of this process is not that of the ranks.
        """
        tasks, each = env.get("SLURM_TASKS_PER_NODE", ""), env.get("SLURM_CPUS_PER_TASK", "")
        if len(hosts) == 1 and (cores := cores_on_node(env)):
            yield (cores,), "SLURM_CPUS_ON_NODE"
        counts = expand_counts(tasks, "SLURM_TASKS_PER_NODE") if tasks and each.isdigit() else []
        if len(counts) == len(hosts):
            yield tuple(int(each) * count for count in counts), "SLURM_CPUS_PER_TASK"

    def read_end(self, text: str) -> float:
        """Return the end time that squeue prints."""
        return time.mktime(time.strptime(text.split()[0], "%Y-%m-%dT%H:%M:%S"))

    def directives(self, options: Options, site: Site) -> list[str]:
        """Return sbatch's options."""
        by_device = site.queue(options.queue).get("device_per_rank")
        devices = site.devices or (ranks_of_node(options, site) if by_device else 0)
        cores = options.cores or site.cores
        if options.gpus:
            if site.devices and site.cores and not options.cores:
                cores = site.cores * options.gpus // site.devices
            devices = options.gpus
        own = site.submit.get("directives", [])
        given = [fill(word, devices=devices) for word in own if devices or "{devices}" not in word]
        lines = [
            f"--job-name={options.job_name}",
            *([f"--account={options.account}"] if options.account else []),
            *([f"{site.submit.get('queue_option', '--partition')}={options.queue}"] if options.queue else []),
            f"--nodes={nodes_of_job(options, site)}",
            f"--time={options.walltime}",
            *(["--no-kill"] if options.spare_nodes else []),  # the job outlives a lost node
        ]
        ppn = ranks_of_node(options, site) if options.np or options.ppn else devices or (1 if options.cores else 0)
        if options.np and options.np % ppn:
            lines.append(f"--ntasks={options.np}")  # makes the number per node a maximum
        if ppn:
            lines.append(f"--ntasks-per-node={ppn}")
        if ppn and cores and not any("cpus" in word for word in given):
            lines.append(f"--cpus-per-task={max(1, cores // ppn)}")
        if devices and not any("gpu" in word for word in given if not word.startswith("--constraint")):
            lines.append(f"--gpus-per-node={devices}")
        lines += given
        if options.walltime_margin and self.sends_warning(options):
            lines.append(f"--signal=USR1@{options.walltime_margin:g}")
        output = self.output.format(name=options.job_name, number="%j")
        return [*lines, "--requeue", "--open-mode=append", f"--output={output}"]

    def submit_command(self, path: str, previous: str | None) -> list[str]:
        """Return sbatch's command line."""
        return ["sbatch", "--parsable", *([f"--dependency=afterany:{previous}"] if previous else []), path]

    def job_id(self, text: str) -> str:
        """Return the id: sbatch --parsable adds the cluster's name after a semicolon."""
        return text.strip().partition(";")[0]

    def sends_warning(self, options: Options) -> bool:
        """Return whether srun starts the ranks: sbatch's --signal reaches them, but would kill another launcher."""
        return options.launcher in (None, "srun")

    def fixed(self, site: Site, queue: Mapping[str, object], resource: str) -> str:
        """A site's directives may set the resource without using {devices}."""
        lines = [line for line in site.submit.get("directives", []) if resource in line and "--constraint" not in line]
        return f"{lines[0]} (submit.directives)" if lines and not any("{devices}" in line for line in lines) else ""

    def is_ending(self, job: Job) -> bool:
        """Return whether SLURM has sent SIGTERM to all processes of the job's steps."""
        return _is_ending(job.id)

    def signal_step(self, job: Job, step: str, number: int) -> None:
        """Signal the ranks of the step named ``step``.

        Signalling srun itself would not do: on SIGTERM it kills the ranks at once. If SLURM is ending the job, it has
        already sent them SIGTERM, and a second one would end them before they have saved.
        """
        if number == signal.SIGTERM and self.is_ending(job):
            return
        for line in _output("squeue", "--noheader", "--steps", "--jobs", job.id, "--format", "%i %j").splitlines():
            number_of_step, _, name = line.partition(" ")
            if name.strip() == step:
                _output("scancel", f"--signal={signal.Signals(number).name}", number_of_step)


def _hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the job's hosts; reject jobs and shells in which launch cannot start a step."""
    if env.get("SLURM_HET_SIZE"):
        what = f"SLURM_HET_SIZE={env['SLURM_HET_SIZE']}: this is a heterogeneous job, which launch does not support"
        raise ConfigError(f"{what}; submit one with equal components, or call srun --het-group yourself")
    if is_task(env):
        raise ConfigError(
            f"this is already task {env['SLURM_PROCID']} of step {env['SLURM_STEP_ID']} of SLURM job "
            f"{env['SLURM_JOB_ID']} (SLURM_STEP_ID): call launch outside srun, where it starts the step itself, "
            "or use --scheduler none for ranks on this node alone"
        )
    text = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    if not text:
        raise ConfigError(f"SLURM job {env['SLURM_JOB_ID']}, but SLURM_JOB_NODELIST is not set: {NO_HOSTS}")
    return expand_hosts(text, "SLURM_JOB_NODELIST")


def _per_host(name: str, env: Mapping[str, str], count: int, notes: list[str]) -> tuple[int, ...]:
    counts = expand_counts(env[name], name)
    if len(counts) < count:
        raise ConfigError(f"{name}={env[name]} counts {len(counts)} nodes, but SLURM_JOB_NODELIST names {count}")
    if len(counts) > count:
        more = f"counts more than the {count} nodes of SLURM_JOB_NODELIST; the rest is ignored"
        notes.append(f"{name}={env[name]} {more}")
    return tuple(counts[:count])


def _is_ending(job_id: str) -> bool:
    """Return whether SLURM is ending a job: cancelled, requeued, preempted, or out of time."""
    try:
        state = _output("squeue", "--noheader", "--jobs", job_id, "--format", "%T").split()
    except (OSError, subprocess.TimeoutExpired):
        return False
    return state != [] and state[0] != "RUNNING"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
