"""What a launch will run, and why: its command line and its ranks' environment. This module looks nothing up."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from wordrun.common.ends import UNFINISHED
from wordrun.common.slurm import compact_counts
from wordrun.launch.elastic.wire import VARIABLE
from wordrun.launch.job import Job
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.request import LONGEST, Decided, Options, Ranks, Request
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN, Site, fill

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
    VARIABLE,
)
STALE = frozenset([*OWN, *(name for launcher in LAUNCHERS.values() for name in launcher.stale)])
STALE_PREFIXES = tuple(name for name in STALE if name.endswith("_"))
# Variables of a process, a host or Open MPI itself, which are not forwarded to other hosts.
NOT_FORWARDED = re.compile(r"_|PWD|OLDPWD|SHLVL|HOSTNAME|(OMPI|OPAL|PMIX|PRTE)_.*")
# A value and its reason (may be empty).
Setting = tuple[str, str]
# Contains the sitecustomize.py of --hang.
SITE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dist", "hang", "site")
# Variables that rank_env.sh cannot pass on: dash drops those whose names are no identifiers, such as bash's exported
# functions, and shells set those at the end themselves.
NOT_BY_SHELLS = re.compile(
    r"(?![A-Za-z_][A-Za-z0-9_]*\Z).*|BASH(?!_ENV$)\w*|COMP_WORDBREAKS|EPOCH(SECONDS|REALTIME)|HISTCMD|IFS|LINENO"
    r"|OPT(IND|ARG|ERR)|POSIXLY_CORRECT|PPID|PS4|S?RANDOM|SECONDS|SHELLOPTS",
    re.DOTALL,
)
# With these, MPI_Finalize of MPICH and its kin, and of Open MPI, does not wait for the other ranks. mpi4py calls it at
# a program's end also after an exception, while the others wait in a collective. (Without any MPI_Finalize, as by
# MPI4PY_RC_FINALIZE=0, Hydra and Open MPI would kill all ranks that have not ended when the first one ends.)
FINALIZE = {"MPIR_CVAR_NO_COLLECTIVE_FINALIZE": "1", "OMPI_MCA_async_mpi_finalize": "1"}
# Which network UCX and libfabric's providers for TCP use.
FOR_MPICH = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Request):
    """A request with the command line and environment that fulfil it."""

    launcher: Launcher
    argv: tuple[str, ...]
    env_unset: tuple[str, ...]
    """Variables to remove before setting ``env``."""
    reasons: Mapping[str, str]
    files: Mapping[str, str]
    """Files that must exist before the launcher starts, with their contents."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for ``argv``, derived from ``env``."""
        kept = {name: value for name, value in env.items() if name not in self.env_unset}
        return {**kept, **self.env}


def build(
    job: Job,
    options: Options,
    ranks: Ranks,
    launcher: Launcher,
    decided: Decided,
    env: Mapping[str, str],
    site: Site = UNKNOWN,
) -> LaunchPlan:
    """Return the plan that starts ``options.command`` as ``ranks``, computed from the arguments alone.

    Raises:
        ConfigError: the launcher cannot do what an option asks.
    """
    request = Request(job, options, ranks, decided, site)
    starts = _guarded(request, launcher) if options.elastic else request
    unset = {name for name in env if is_stale(name) or name in site.unset}
    exported = [
        name for name in env if not (name in unset or NOT_BY_SHELLS.fullmatch(name) or NOT_FORWARDED.fullmatch(name))
    ]
    env_set, reasons = environment(request, launcher, env, launcher.variables(starts))
    if options.elastic:
        env_set.pop("WORDRUN_STATUS_DIR", "")  # guardians report over a connection
        env_set.pop("WORDRUN_LAYOUT")  # rank_env.sh starts one guardian per host
        env_set[VARIABLE] = ""  # known when launch listens
    request, starts = (replace(each, env=env_set, exported=tuple(exported)) for each in (request, starts))
    kept = {name: value for name, value in env.items() if name not in unset}
    argv = launcher.argv(_past_the_shell(starts, launcher, {**kept, **env_set}))
    path = request.hosts_file
    is_named = any(word.endswith(path) for word in (*argv, *env_set.values()))
    return LaunchPlan(
        **vars(request),
        launcher=launcher,
        argv=argv,
        env_unset=tuple(sorted(unset - set(env_set))),
        reasons={**job.reasons, "ranks": ranks.why, "launcher": launcher.why, **reasons},
        files={path: launcher.hosts_text(starts)} if is_named else {},
    )


def _guarded(request: Request, launcher: Launcher) -> Request:
    """Return the request for a guardian on each node, which starts the node's ranks; no launcher should bind it."""
    command = (sys.executable, "-m", "wordrun.launch.elastic.guardian")
    bind = "none" if launcher.binds_one else None
    own = launcher.keep_going if request.options.spare_nodes else ()
    options = replace(
        request.options, command=command, cpu_bind=bind, launcher_args=(*own, *request.options.launcher_args)
    )
    return replace(request, options=options, ranks=Ranks((1,) * len(request.guarded), "a guardian per node"))


def _past_the_shell(request: Request, launcher: Launcher, env: Mapping[str, str]) -> Request:
    """Return the request with a command that sets those variables of ``env`` that the shell does not pass on."""
    lost = [f"{name}={value}" for name, value in env.items() if NOT_BY_SHELLS.fullmatch(name)]
    if not lost or not launcher.in_between:
        return request
    command = ("/usr/bin/env", "--", *lost, *request.options.command)
    return replace(request, options=replace(request.options, command=command))


def guardian_again(plan: LaunchPlan, node: int, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan, from ``env``, for another guardian on a host on which the first one has been lost."""
    name = f"{plan.decided.name or plan.decided.run.run_id}-{node}"
    options = replace(plan.options, launcher_args=(*plan.launcher.single, *plan.options.launcher_args), spare_nodes=0)
    alone = replace(plan.job.only([node]), partial=True)
    one = replace(plan, job=alone, options=options, ranks=Ranks((1,), ""), decided=replace(plan.decided, name=name))
    starts = _past_the_shell(_guarded(one, plan.launcher), plan.launcher, plan.environment(env))
    argv = plan.launcher.argv(starts)
    return replace(one, argv=argv, files={starts.hosts_file: plan.launcher.hosts_text(starts)})


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
    """Return the variables that identify the launch and tell its ranks where to meet."""
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
        # Ranks that see no device then do not train on CPUs unnoticed.
        **({"WORDRUN_DEVICES": (counted, "")} if request.devices else {}),
        # The names are informational, and ten thousand of them would not fit into a variable.
        **({"WORDRUN_HOSTS": (hosts, "")} if len(hosts) <= LONGEST else {}),
        **({"WORDRUN_RESUME": ("auto", decided.run.resume)} if decided.run.resume else {}),
    }


def _convenience(request: Request, launcher: Launcher, env: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    """Yield defaults that make ranks behave as expected, unless the user has exported these variables."""
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
            networks += launcher.interface_variables  # hosts of the user's own may be others
        for name in networks:
            if name not in env:
                yield name, (loopback, "single host: no other host can connect to the ranks")
    if request.ranks.np > 1 and launcher.in_between:
        for name in (name for name in FINALIZE if name not in env):
            yield name, (FINALIZE[name], "a rank that fails ends, rather than wait for the others in MPI_Finalize")
    if request.ranks.np > 1 and not request.devices and "ACCELERATE_USE_CPU" not in env:
        yield (
            "ACCELERATE_USE_CPU",
            ("true", "no devices: without it, each rank of an Accelerate program would train by itself"),
        )
    lightning = {"DEVICES": request.ranks.layout[0], "NUM_NODES": request.ranks.nodes}
    given = any(f"PL_TRAINER_{name}" in env for name in lightning)
    if request.ranks.np > 1 and not request.devices and len({*request.ranks.layout}) == 1 and not given:
        for name, value in lightning.items():
            why = "no devices: a Trainer of Lightning that leaves it out would train by itself on each rank"
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
