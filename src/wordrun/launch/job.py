"""What the scheduler's job or this machine offers: hosts, cores and devices, without torch."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from wordrun.errors import ConfigError
from wordrun.launch.site import Site
from wordrun.slurm import expand_counts, expand_hosts, is_task

# A scheduler's job is at work when its variable is set.
JOB_VARIABLES = {"pbs": "PBS_JOBID", "slurm": "SLURM_JOB_ID"}
# What tells a rank of a launcher that may be at work in a PBS job which one it is.
RANK_VARIABLES = ("PALS_RANKID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
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
    """Ranks of each host where nothing else is asked for: its devices, or as the scheduler or the site says."""
    scheduler: str = "none"
    id: str = ""
    inside: str = ""
    """The scheduler in whose job this machine is used on its own."""
    hostfile: str = ""
    """A file with just these hosts, one a line."""
    partial: bool = False
    """Some of the scheduler's hosts are not to be used."""
    queue: str = ""
    array_index: str = ""
    restarts: int = 0
    """How often the scheduler has started this job again."""
    ends_at: float | None = None
    """When the walltime ends, in seconds since 1970, where the scheduler says so."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Where each fact comes from."""
    notes: tuple[str, ...] = ()
    """What the user should hear about before ranks start."""


@dataclass(frozen=True)
class Machine:
    """What the machine on which launch runs shows of itself."""

    host: str
    cores: int
    cores_why: str
    devices: int
    devices_why: str


def this_machine(env: Mapping[str, str]) -> Machine:
    """Return what this machine shows to a process with ``env``."""
    return Machine(socket.gethostname(), *count_cores(), *count_devices(env))


def find_job(
    scheduler: str | None,
    env: Mapping[str, str],
    machine: Machine,
    site: Site | None = None,
    hostfile: str | None = None,
) -> Job:
    """Return the job that ``env`` is part of, or this machine where there is none.

    Args:
        scheduler: --scheduler; None: the one whose variables are set.
        env: this process's environment.
        machine: this machine.
        site: the cluster, where it is known.
        hostfile: --hostfile, which replaces the job's hosts.

    Raises:
        ConfigError: a variable or file of the job is missing or cannot be understood.
    """
    found = [name for name, variable in JOB_VARIABLES.items() if env.get(variable)]
    chosen = scheduler or (found[0] if found else "none")
    if chosen != "none" and chosen not in found:
        raise ConfigError(f"--scheduler {chosen}: {JOB_VARIABLES[chosen]} is not set, so this is no job of it")
    job = READERS[chosen](env, machine, site)
    if chosen == "none":
        job = replace(
            job,
            inside=found[0] if found else "",
            reasons={**job.reasons, "scheduler": "--scheduler none" if scheduler else "this machine"},
        )
    return _with_hostfile(job, hostfile, machine) if hostfile is not None else job


def _alone(env: Mapping[str, str], machine: Machine, site: Site | None) -> Job:
    return Job(
        hosts=(machine.host,), cores=(machine.cores,), devices=(machine.devices,), slots=(max(1, machine.devices),),
        reasons={"hosts": "this machine's name", "cores": machine.cores_why, "devices": machine.devices_why},
    )  # fmt: skip


def _pbs(env: Mapping[str, str], machine: Machine, site: Site | None) -> Job:
    path = env.get("PBS_NODEFILE", "")
    if not path:
        raise ConfigError(
            f"PBS job {env['PBS_JOBID']}, but PBS_NODEFILE is not set: launch in the job's own shell, "
            "or name the hosts by --hostfile FILE (--scheduler none starts ranks on this machine alone)"
        )
    inside = next((name for name in RANK_VARIABLES if name in env), "")
    if inside:
        raise ConfigError(
            f"this is already rank {env[inside]} of a launch in PBS job {env['PBS_JOBID']} ({inside}): call launch in "
            "the job's own shell, or use --scheduler none for ranks on this node alone"
        )
    lines = _hosts_in(path, "PBS_NODEFILE")
    strange = next((line for line in lines if len(line.split()) > 1), "")
    if strange:
        raise ConfigError(f"PBS_NODEFILE={path}: {strange!r} should be the name of one host")
    listed = Counter(lines)  # in the file's order
    hosts = tuple(listed)
    count = len(hosts)
    cores, cores_why = machine.cores, machine.cores_why
    if site and site.cores:
        cores, cores_why = site.cores, f"site {site.name}"
    elif env.get("NCPUS", "").isdigit() and machine.host.partition(".")[0] not in [h.partition(".")[0] for h in hosts]:
        cores, cores_why = int(env["NCPUS"]), "NCPUS"
    devices, devices_why = _devices(machine, site)
    if site and site.ranks_per_node:
        slots = [site.ranks_per_node] * count
    elif devices:
        slots = [devices] * count
    else:
        slots = list(listed.values())
    return Job(
        hosts=hosts, cores=(cores,) * count, devices=(devices,) * count, slots=tuple(slots),
        scheduler="pbs", id=env["PBS_JOBID"], hostfile=path if len(lines) == count else "",
        queue=env.get("PBS_QUEUE", ""), array_index=env.get("PBS_ARRAY_INDEX", ""),
        reasons={
            "scheduler": "PBS_JOBID", "hosts": f"PBS_NODEFILE {path}", "cores": cores_why, "devices": devices_why,
            "job": "PBS_JOBID", "queue": "PBS_QUEUE",
        },
    )  # fmt: skip


def _slurm(env: Mapping[str, str], machine: Machine, site: Site | None) -> Job:
    if env.get("SLURM_HET_SIZE"):
        raise ConfigError(
            f"SLURM_HET_SIZE={env['SLURM_HET_SIZE']}: this is a heterogeneous job, which launch cannot lay out; "
            "submit one with equal components, or call srun --het-group yourself"
        )
    if is_task(env):
        raise ConfigError(
            f"this is already task {env['SLURM_PROCID']} of step {env['SLURM_STEP_ID']} of SLURM job "
            f"{env['SLURM_JOB_ID']} (SLURM_STEP_ID): call launch outside srun, where it starts the step itself, "
            "or use --scheduler none for ranks on this node alone"
        )
    text = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    if not text:
        raise ConfigError(
            f"SLURM job {env['SLURM_JOB_ID']}, but SLURM_JOB_NODELIST is not set: launch in the job's own shell, "
            "or name the hosts by --hostfile FILE (--scheduler none starts ranks on this machine alone)"
        )
    hosts = expand_hosts(text, "SLURM_JOB_NODELIST")
    count = len(hosts)
    notes: list[str] = []
    cores, cores_why = (machine.cores,) * count, machine.cores_why
    if env.get("SLURM_JOB_CPUS_PER_NODE"):
        cores = _per_host("SLURM_JOB_CPUS_PER_NODE", env, count, notes)
        cores_why = "SLURM_JOB_CPUS_PER_NODE"
    elif site and site.cores:
        cores, cores_why = (site.cores,) * count, f"site {site.name}"
    devices, devices_why = _devices(machine, site)
    # The first is set on a job's nodes alone; the second in salloc's shell on a login node, perhaps as a100:4.
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        gpus = re.fullmatch(r"(?:[^,]*:)?(\d+)", env.get(name, ""))
        if gpus:
            devices, devices_why = int(gpus[1]), name
            break
    if site and site.ranks_per_node:
        slots = (site.ranks_per_node,) * count
    elif devices:
        slots = (devices,) * count
    elif env.get("SLURM_NTASKS") and env.get("SLURM_TASKS_PER_NODE"):
        # Without -n it would be the number of CPUs, which nobody asked for as ranks.
        slots = _per_host("SLURM_TASKS_PER_NODE", env, count, notes)
    else:
        slots = (1,) * count
    end = env.get("SLURM_JOB_END_TIME", "")
    restarts = env.get("SLURM_RESTART_COUNT", "")
    return Job(
        hosts=hosts, cores=cores, devices=(devices,) * count, slots=slots,
        scheduler="slurm", id=env["SLURM_JOB_ID"], queue=env.get("SLURM_JOB_PARTITION", ""),
        array_index=env.get("SLURM_ARRAY_TASK_ID", ""), restarts=int(restarts) if restarts.isdigit() else 0,
        ends_at=float(end) if end.isdigit() else None,
        reasons={
            "scheduler": "SLURM_JOB_ID", "hosts": "SLURM_JOB_NODELIST", "cores": cores_why, "devices": devices_why,
            "job": "SLURM_JOB_ID", "queue": "SLURM_JOB_PARTITION",
            **({"time_left": "SLURM_JOB_END_TIME"} if end.isdigit() else {}),
        },
        notes=tuple(notes),
    )  # fmt: skip


# A scheduler's reader turns variables and files into a Job; it joins the table here.
READERS: dict[str, Callable[[Mapping[str, str], Machine, Site | None], Job]] = {
    "none": _alone, "pbs": _pbs, "slurm": _slurm,
}  # fmt: skip


def _per_host(name: str, env: Mapping[str, str], count: int, notes: list[str]) -> tuple[int, ...]:
    counts = expand_counts(env[name], name)
    if len(counts) < count:
        raise ConfigError(f"{name}={env[name]} counts {len(counts)} nodes, but SLURM_JOB_NODELIST names {count}")
    if len(counts) > count:
        notes.append(
            f"{name}={env[name]} counts more than the {count} nodes of SLURM_JOB_NODELIST; the rest is left out"
        )
    return tuple(counts[:count])


def _devices(machine: Machine, site: Site | None) -> tuple[int, str]:
    if site and site.devices is not None and not (site.count_devices and machine.devices):
        return site.devices, f"site {site.name}"
    return machine.devices, machine.devices_why


def _hosts_in(path: str, name: str) -> list[str]:
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts = [line for line in lines if line]
    if not hosts:
        raise ConfigError(f"{name}={path} is empty: it should name one host a line")
    return hosts


def _with_hostfile(job: Job, path: str, machine: Machine) -> Job:
    """Return ``job`` on the hosts of a file: one a line, with ``slots=N`` or ``:N`` where ranks per host differ."""
    slots: dict[str, int] = {}
    for line in _hosts_in(path, "--hostfile"):
        name, *words = line.replace(":", " slots=").split()
        number = words[0].removeprefix("slots=") if words else ""
        if len(words) > 1 or (words and (not number.isdigit() or int(number) < 1)):
            raise ConfigError(f"--hostfile {path}: {line!r} should be HOST, HOST:RANKS or HOST slots=RANKS")
        slots[name] = slots.get(name, 0) + int(number or 0)
    known = {host.partition(".")[0]: i for i, host in enumerate(job.hosts)}
    if job.scheduler != "none":
        strangers = [name for name in slots if name.partition(".")[0] not in known]
        if strangers:
            raise ConfigError(
                f"--hostfile {path}: {', '.join(strangers[:5])} not in {job.scheduler.upper()} job {job.id}, "
                f"which has {', '.join(job.hosts[:5])}{', ...' * (len(job.hosts) > 5)}"
            )
    if job.scheduler == "slurm":  # srun numbers nodes, and ranks with them, in an order of its own
        slots = dict(sorted(slots.items(), key=lambda item: known[item[0].partition(".")[0]]))
    index = [known.get(name.partition(".")[0], 0) for name in slots]
    return replace(
        job, hosts=tuple(slots), cores=tuple(job.cores[i] for i in index), devices=tuple(job.devices[i] for i in index),
        slots=tuple(given or job.slots[i] for given, i in zip(slots.values(), index, strict=True)), hostfile="",
        reasons={**job.reasons, "hosts": f"--hostfile {path}"},
    )  # fmt: skip


def hold_back(job: Job, spares: int, left_out: frozenset[str] = frozenset()) -> Job:
    """Return ``job`` without ``spares`` of its hosts: those that have failed, and then the last ones.

    Args:
        job: the whole job.
        spares: --spare-nodes.
        left_out: short names of hosts that have failed.

    Raises:
        ConfigError: no host would be left.
    """
    if not spares and not left_out:
        return job
    good = [i for i, host in enumerate(job.hosts) if host.partition(".")[0] not in left_out]
    failed = len(job.hosts) - len(good)
    used = good[: max(0, len(good) - max(0, spares - failed))]
    if not used:
        raise ConfigError(
            f"--spare-nodes {spares}: {job.scheduler.upper()} job {job.id} has {len(job.hosts)} nodes"
            + (f", of which {', '.join(sorted(left_out))} failed" if left_out else "")
            + "; none would be left for ranks"
        )
    return replace(
        job, hosts=tuple(job.hosts[i] for i in used), cores=tuple(job.cores[i] for i in used),
        devices=tuple(job.devices[i] for i in used), slots=tuple(job.slots[i] for i in used), hostfile="", partial=True,
    )  # fmt: skip


def job_end(job: Job, before_exec: Callable[[], None] | None = None, within_s: float = 20) -> float | None:
    """Return when the walltime of ``job`` ends, in seconds since 1970, as qstat or squeue say; None: nobody does.

    Args:
        job: the scheduler's.
        before_exec: runs in the new process before it becomes one of those.
        within_s: seconds that it may take to answer.
    """
    import json
    import subprocess
    import time

    ask = {"pbs": ["qstat", "-f", "-F", "json", job.id], "slurm": ["squeue", "-h", "-j", job.id, "-o", "%e"]}
    try:
        text = subprocess.run(
            ask[job.scheduler], capture_output=True, text=True, timeout=within_s, check=True, preexec_fn=before_exec
        ).stdout
        if job.scheduler == "slurm":
            return time.mktime(time.strptime(text.split()[0], "%Y-%m-%dT%H:%M:%S"))
        (facts,) = json.loads(text)["Jobs"].values()
        hours, minutes, seconds = map(int, facts["Resource_List"]["walltime"].split(":"))
        return time.mktime(time.strptime(facts["stime"])) + 3600 * hours + 60 * minutes + seconds
    except (KeyError, ValueError, IndexError, OSError, subprocess.SubprocessError):
        return None


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
