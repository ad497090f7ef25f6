"""The environment variables that launch sets for the ranks, each with its reason, and those that it removes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

from wordrun.common.exit_reports import UNFINISHED
from wordrun.common.network import interface_for_gloo
from wordrun.common.slurm import compact_counts
from wordrun.launch.job import Job, short
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.request import LONGEST, Request
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import fill

# Variables that an outer launch sets for its ranks; each launcher lists its own in ``stale``.
OWN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORDRUN_LAUNCHER",
    "WORDRUN_LAUNCHER_PATH",
    "WORDRUN_LAUNCH_ID",
    "WORDRUN_RUN_ID",
    "WORDRUN_WORLD_SIZE",
    "WORDRUN_LAYOUT",
    "WORDRUN_HOSTS",
    "WORDRUN_LAUNCH_RECORD",
    "WORDRUN_STATUS_DIR",
    "WORDRUN_TERMINAL",
    "WORDRUN_PTY",
    "WORDRUN_IGNORE_USR1",
    "WORDRUN_HANG_S",
    "WORDRUN_GENERATION",
    "WORDRUN_FAULTS",
    "WORDRUN_DEVICES",
    UNFINISHED,
)
STALE = frozenset([*OWN, *(name for launcher in LAUNCHERS.values() for name in launcher.stale)])
STALE_PREFIXES = tuple(name for name in STALE if name.endswith("_"))
# A value and its reason (may be empty).
Setting = tuple[str, str]
# Contains the sitecustomize.py of --hang.
SITE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dist", "hang", "site")
# With these, MPI_Finalize of MPICH and its kin, and of Open MPI, does not wait for the other ranks. mpi4py calls it at
# a program's end also after an exception, while the others wait in a collective. (Without any MPI_Finalize, as by
# MPI4PY_RC_FINALIZE=0, Hydra and Open MPI would kill all ranks that have not ended when the first one ends.)
FINALIZE = {"MPIR_CVAR_NO_COLLECTIVE_FINALIZE": "1", "OMPI_MCA_async_mpi_finalize": "1"}
# Which network UCX and libfabric's providers for TCP use.
FOR_MPICH = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def is_stale(name: str) -> bool:
    """Return whether ``name`` is a variable that launchers set for their own ranks."""
    return name in STALE or name.startswith(STALE_PREFIXES)


def threads(cores: int, job: Job, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Return OMP_NUM_THREADS for a rank with ``cores`` cores (None: leave it unchanged), and why."""
    given, scheduler = env.get("OMP_NUM_THREADS"), job.inside or job.scheduler
    why = f"cores per rank; a host has {min(job.threads)}: {job.reasons.get('threads') or job.reasons.get('cores', '')}"
    if given is None:
        return str(cores), why
    if SCHEDULERS[scheduler].has_set("OMP_NUM_THREADS", env):
        return str(cores), f"{why}, instead of {scheduler.upper()}'s {given}"
    return None, f"kept: OMP_NUM_THREADS={given} was exported"


def environment(
    request: Request, launcher: Launcher, env: Mapping[str, str], of_launcher: Mapping[str, Setting]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables to set for every rank, with ``of_launcher``, and the reasons for their values."""
    site, reasons = request.site, {}
    settings = {**_meeting(request), **of_launcher, **dict(_convenience(request, launcher, env))}
    omp, reasons["OMP_NUM_THREADS"] = threads(launcher.cores_per_rank(request), request.job, env)
    if omp:
        settings["OMP_NUM_THREADS"] = omp, reasons["OMP_NUM_THREADS"]
    if request.job.scheduler == site.scheduler:
        settings |= _of_site(request, env)
    settings |= {name: (value, "--env") for name, value in request.options.env}
    if request.options.hang is not None:
        given = settings["PYTHONPATH"][0] if "PYTHONPATH" in settings else env.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (SITE, given)))
        settings["PYTHONPATH"] = path, "--hang: its sitecustomize watches the collectives"
        settings["WORDRUN_HANG_S"] = f"{request.options.hang:g}", ""
        if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & {*env, *settings}:
            settings["TORCH_FR_BUFFER_SIZE"] = "2000", "--hang: torch records the last collectives"
    reasons |= {name: why for name, (_, why) in settings.items() if why}
    return {name: value for name, (value, _) in settings.items()}, reasons


def _meeting(request: Request) -> dict[str, Setting]:
    """Return the variables that identify the launch, and the address and port at which the ranks meet."""
    job, ranks, decided = request.job, request.ranks, request.decided
    address, why = decided.master_addr or job.hosts[0], decided.master_why or "first host of the job"
    if ranks.nodes == 1:
        address, why = "127.0.0.1", "all ranks are on one host"
    hosts = ",".join(request.hosts)
    counted = f"{request.devices} ({job.reasons.get('devices', 'counted')})"
    return {
        "MASTER_ADDR": (address, why),
        "MASTER_PORT": (str(decided.port), "a free port, chosen at random"),
        "WORDRUN_LAUNCH_ID": (decided.launch_id, ""),
        "WORDRUN_RUN_ID": (decided.run.run_id, decided.run.why),
        "WORDRUN_WORLD_SIZE": (str(ranks.np), ""),
        "WORDRUN_LAYOUT": (compact_counts(ranks.layout), ""),
        "WORDRUN_LAUNCH_RECORD": (decided.path("json"), ""),
        # With this variable, ranks that see no device stop, instead of training on CPUs unnoticed.
        **({"WORDRUN_DEVICES": (counted, "")} if request.devices else {}),
        # Host names are informational; ten thousand of them would not fit into a variable.
        **({"WORDRUN_HOSTS": (hosts, "")} if len(hosts) <= LONGEST else {}),
        **({"WORDRUN_RESUME": ("auto", decided.run.resume)} if decided.run.resume else {}),
    }


def _convenience(request: Request, launcher: Launcher, env: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    """Yield defaults that make programs behave well on several ranks; a variable that the user has exported stays."""
    decided, watched = request.decided, request.options.idle_timeout
    yield "WORDRUN_LAUNCHER", (launcher.name, "")
    if request.options.trains and launcher.in_between:
        yield "WORDRUN_IGNORE_USR1", ("1", "SIGUSR1 is ignored until wordrun handles it, and after the last step")
    if launcher.in_between and "PYTHONUNBUFFERED" not in env:
        yield "PYTHONUNBUFFERED", ("1", "ranks write to a pipe; the lines before a crash should not be lost")
    if watched and "PYTHONFAULTHANDLER" not in env:
        yield "PYTHONFAULTHANDLER", ("1", "--idle-timeout: stuck ranks print their stacks")
    loopback = next((name for name in decided.interfaces if name in ("lo", "lo0")), "")
    if request.ranks.nodes == 1 and request.ranks.np > 1 and loopback:
        # The others are for MPICH; in a scheduler's job they would hide the fabric from UCX and libfabric.
        networks = ["GLOO_SOCKET_IFNAME", *(FOR_MPICH if request.job.is_local else ())]
        if request.job.is_local and not (request.options.hostfile or request.options.launcher_args):
            networks += launcher.interface_variables  # a hostfile's hosts may be other machines
        for name in networks:
            if name not in env:
                yield name, (loopback, "single host: no other host can connect to the ranks")
    # wordrun's ranks choose an interface each, on their host (dist.setup).
    chooses = request.options.runs_wordrun or "GLOO_SOCKET_IFNAME" in env
    here = short(request.hosts[0]) == short(socket.gethostname())
    if request.ranks.nodes > 1 and here and not chooses and (interface := interface_for_gloo(request.hosts[1:])):
        yield "GLOO_SOCKET_IFNAME", (interface, "this host's name resolves to a loopback address")
    if request.ranks.np > 1 and launcher.in_between:
        for name in (name for name in FINALIZE if name not in env):
            yield name, (FINALIZE[name], "a failed rank ends instead of waiting for the others in MPI_Finalize")
    if request.ranks.np > 1 and not request.devices and "ACCELERATE_USE_CPU" not in env:
        yield (
            "ACCELERATE_USE_CPU",
            ("true", "no devices: without it, each rank of an Accelerate program would train separately"),
        )
    lightning = {"DEVICES": request.ranks.layout[0], "NUM_NODES": request.ranks.nodes}
    given = any(f"PL_TRAINER_{name}" in env for name in lightning)
    if request.ranks.np > 1 and not request.devices and len({*request.ranks.layout}) == 1 and not given:
        for name, value in lightning.items():
            why = "no devices: a Lightning Trainer without it would train separately on each rank"
            yield f"PL_TRAINER_{name}", (str(value), why)
    if decided.terminal and (launcher.in_between or watched):
        yield "WORDRUN_TERMINAL", (decided.terminal, "ranks cannot see the terminal that launch writes to")
    if decided.own_bin not in env.get("PATH", "").split(os.pathsep):
        path = os.pathsep.join(filter(None, (decided.own_bin, env.get("PATH", ""))))
        yield "PATH", (path, "so that `python` is the one that has wordrun")


def _of_site(request: Request, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the site's variables, except any that the user, rather than the scheduler, exported."""
    site, scheduler = request.site, SCHEDULERS[request.job.scheduler]
    words = {"devices": str(request.devices), "devices_reversed": ",".join(map(str, reversed(range(request.devices))))}
    proxies = {name: (value, "compute nodes reach the internet through it") for name, value in site.proxies.items()}
    asked = {**site.env, **proxies}
    if not site.internet:
        asked["WANDB_MODE"] = ("offline", "compute nodes have no internet")
    return {
        name: (fill(value, **words), f"site {site.name}: {why}")
        for name, (value, why) in asked.items()
        if name not in env or scheduler.has_set(name, env)
    }
