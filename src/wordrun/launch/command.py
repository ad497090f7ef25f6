"""From job, options and launcher to the one Plan that is run: pure functions, nothing is looked up here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wordrun.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.launcher import Launcher
from wordrun.launch.options import Options

RANK_ENV = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_env.sh")

# What earlier launchers leave behind: read by a rank, each of these makes it take itself for another one.
STALE = frozenset([
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID",
    # the names by which a user changes what a bare PALS mpiexec does
    "PALS_NRANKS", "PALS_PPN", "PALS_DEPTH", "PALS_CPU_BIND", "PALS_MEM_BIND", "PALS_HOSTFILE", "PALS_HOSTLIST",
    "PALS_ENVLIST", "PALS_ENVALL", "PALS_TRANSFER", "PALS_LABEL", "PALS_LINE_BUFFER", "PALS_EXCLUSIVE", "PALS_WDIR",
    "PALS_PATH", "PALS_UMASK", "PALS_PMI", "PALS_RLIMITS", "PALS_ABORT_ON_FAILURE", "PALS_PROCINFO_FILE",
    "PALS_SSTARTUP",
    # an outer launch's own
    "WORDRUN_LAUNCHER", "WORDRUN_LAUNCHER_PATH", "WORDRUN_LAUNCH_ID", "WORDRUN_RUN_ID", "WORDRUN_WORLD_SIZE",
    "WORDRUN_HOSTS", "WORDRUN_LAUNCH_RECORD", "WORDRUN_STATUS_DIR", "WORDRUN_TERMINAL",
])  # fmt: skip
STALE_PREFIXES = ("ROLE_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")


@dataclass(frozen=True)
class Decided:
    """What is decided once per launch, outside the ranks, because they could not agree on it."""

    launch_id: str
    run_id: str
    port: int
    cwd: str
    status_dir: str
    """Where ranks report a failing exit status; made when the ranks start."""
    own_bin: str
    """Directory of the ``python`` that has wordrun."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of this machine."""
    terminal: str = ""
    """COLUMNSxLINES of the terminal that launch writes to, if it is one."""


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are and where."""

    np: int
    nodes: int
    ppn: int
    why: str


@dataclass(frozen=True)
class Plan:
    """All that is needed to start the ranks, and why it is so."""

    argv: tuple[str, ...]
    command: tuple[str, ...]
    env_set: Mapping[str, str]
    env_unset: tuple[str, ...]
    np: int
    ppn: int
    hosts: tuple[str, ...]
    launcher: Launcher
    job: Job
    decided: Decided
    reasons: Mapping[str, str]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which ``argv`` is started from one that has ``env``."""
        kept = {name: value for name, value in env.items() if name not in self.env_unset}
        return {**kept, **self.env_set}


def decide_ranks(options: Options, job: Job) -> Ranks:
    """Return the layout that -n, -N and --ppn ask for; any two decide the third, none takes the job's slots.

    Raises:
        ConfigError: they contradict each other or the job; says what would fit.
    """
    have = len(job.hosts)
    place = "this machine" if job.scheduler == "none" else f"job {job.id}"
    np, nodes, ppn = options.np, options.nodes, options.ppn
    asked = " ".join(f"{name} {value}" for name, value in (("-n", np), ("-N", nodes), ("--ppn", ppn)) if value)
    if nodes is not None and nodes > have:
        raise ConfigError(f"{asked}: {place} is {have} node{'s' * (have > 1)}; -N {have}, or no -N, would fit")
    if ppn is not None and np is not None:
        needed = -(-np // ppn)
        if np % ppn or needed > have or (nodes is not None and nodes * ppn != np):
            whole = f"{needed} nodes of {ppn}" if np % ppn == 0 else f"no whole number of nodes of {ppn}"
            fits = (nodes or have) * ppn
            raise ConfigError(
                f"{asked}: {np} ranks fill {whole}, and {place} has {nodes or have}; "
                f"-n {fits} --ppn {ppn} would fit, or -n {np} without --ppn"
            )
        return Ranks(np, needed, ppn, f"{asked}")
    if ppn is not None:
        nodes = nodes or have
        return Ranks(nodes * ppn, nodes, ppn, f"{asked}: {ppn} on each of {nodes}")
    if np is not None:
        nodes = nodes or min(have, np)
        if np % nodes:
            raise ConfigError(f"{asked}: {np} ranks do not divide into {nodes} nodes; -n {nodes * (np // nodes + 1)}")
        return Ranks(np, nodes, np // nodes, asked)
    nodes = nodes or have
    slots = job.slots[:nodes]
    why = f"one per device ({sum(slots)} found)" if any(job.devices[:nodes]) else "no device, so one process"
    return Ranks(sum(slots), nodes, max(slots), f"{asked}: {why}" if asked else why)


def build(
    job: Job, options: Options, ranks: Ranks, launcher: Launcher, decided: Decided, env: Mapping[str, str]
) -> Plan:
    """Return the Plan that starts ``options.command`` as ``ranks``.

    Raises:
        ConfigError: the launcher cannot do what an option asks.
    """
    hosts = job.hosts[: ranks.nodes]
    env_set, reasons = _environment(job, options, ranks, launcher, decided, env)
    reasons = {
        **job.reasons,
        "ranks": ranks.why,
        "launcher": launcher.why,
        **reasons,
    }
    return Plan(
        argv=BUILDERS[launcher.kind](job, options, ranks, launcher, env_set),
        command=options.command,
        env_set=env_set,
        env_unset=tuple(sorted(name for name in env if is_stale(name) and name not in env_set)),
        np=ranks.np, ppn=ranks.ppn, hosts=hosts, launcher=launcher, job=job, decided=decided, reasons=reasons,
    )  # fmt: skip


def is_stale(name: str) -> bool:
    """Say whether a variable is one that an earlier launcher set for its own ranks."""
    return name in STALE or name.startswith(STALE_PREFIXES)


def threads(cores: int, ppn: int, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Return OMP_NUM_THREADS for a rank (None: leave it as it is), and why."""
    if "OMP_NUM_THREADS" in env:
        return None, f"kept: OMP_NUM_THREADS={env['OMP_NUM_THREADS']} was exported"
    return str(max(1, cores // ppn)), f"{cores} cores for {ppn} rank{'s' * (ppn > 1)} of this node"


def _environment(
    job: Job, options: Options, ranks: Ranks, launcher: Launcher, decided: Decided, env: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that every rank finds, and why they have their values."""
    hosts = job.hosts[: ranks.nodes]
    one_host = len(hosts) == 1
    values = {
        "MASTER_ADDR": "127.0.0.1" if one_host else hosts[0],
        "MASTER_PORT": str(decided.port),
        "WORDRUN_LAUNCHER": launcher.kind,
        "WORDRUN_LAUNCHER_PATH": launcher.path,
        "WORDRUN_LAUNCH_ID": decided.launch_id,
        "WORDRUN_RUN_ID": decided.run_id,
        "WORDRUN_WORLD_SIZE": str(ranks.np),
        "WORDRUN_HOSTS": ",".join(hosts),
        "WORDRUN_LAUNCH_RECORD": os.path.join(decided.cwd, "outputs", "launches", f"{decided.run_id}.json"),
    }
    reasons = {
        "MASTER_ADDR": "all ranks are on one host" if one_host else "first host of the job",
        "MASTER_PORT": "free just now, drawn at random",
    }
    omp, reasons["OMP_NUM_THREADS"] = threads(min(job.cores[: ranks.nodes]), ranks.ppn, env)
    if omp:
        values["OMP_NUM_THREADS"] = omp
    if launcher.kind == "local":
        values |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        del values["WORDRUN_LAUNCHER_PATH"]
    else:
        values["WORDRUN_STATUS_DIR"] = decided.status_dir
        reasons["WORDRUN_STATUS_DIR"] = "a failing rank leaves its exit status here"
        if "PYTHONUNBUFFERED" not in env:
            values["PYTHONUNBUFFERED"] = "1"
            reasons["PYTHONUNBUFFERED"] = "ranks write to a pipe; the lines before a crash should not be lost"
    loopback = next((name for name in decided.interfaces if name in ("lo", "lo0")), "")
    if one_host and ranks.np > 1 and loopback and "GLOO_SOCKET_IFNAME" not in env:
        values["GLOO_SOCKET_IFNAME"] = loopback
        reasons["GLOO_SOCKET_IFNAME"] = "one host: gloo needs no host name that resolves"
    if decided.terminal and (launcher.kind != "local" or options.idle_timeout):
        values["WORDRUN_TERMINAL"] = decided.terminal
        reasons["WORDRUN_TERMINAL"] = "ranks cannot see the terminal that launch writes to"
    if decided.own_bin not in env.get("PATH", "").split(os.pathsep):
        values["PATH"] = os.pathsep.join(filter(None, (decided.own_bin, env.get("PATH", ""))))
        reasons["PATH"] = "so that `python` is the one that has wordrun"
    for name, value in options.env:
        values[name], reasons[name] = value, "--env"
    return values, reasons


Builder = Callable[[Job, Options, Ranks, Launcher, Mapping[str, str]], "tuple[str, ...]"]


def _hydra(job: Job, options: Options, ranks: Ranks, launcher: Launcher, env: Mapping[str, str]) -> tuple[str, ...]:
    # Hydra passes its whole environment on (-genvall is its default).
    binding = ("-bind-to", options.cpu_bind) if options.cpu_bind else ()
    # Inside a scheduler's job Hydra would ask that one for hosts and start ranks there.
    alone = ("-rmk", "user", "-launcher", "fork") if job.inside else ()
    return (launcher.path, "-n", str(ranks.np), *alone, *binding, *options.launcher_args, *_rank(options))


def _openmpi(job: Job, options: Options, ranks: Ranks, launcher: Launcher, env: Mapping[str, str]) -> tuple[str, ...]:
    # Its own default binds a rank to one core, whatever OMP_NUM_THREADS says.
    binding = ("--bind-to", options.cpu_bind or "none")
    crowd = ("--map-by", "slot:OVERSUBSCRIBE") if ranks.ppn > min(job.cores) else ()
    exported = [word for name in sorted(env) for word in ("-x", name)]
    return (
        launcher.path, "-n", str(ranks.np), *binding, *crowd, *exported, *options.launcher_args, *_rank(options),
    )  # fmt: skip


def _torchrun(job: Job, options: Options, ranks: Ranks, launcher: Launcher, env: Mapping[str, str]) -> tuple[str, ...]:
    _no_binding(options, "torchrun")
    return (
        launcher.path, "-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0",
        "--nproc-per-node", str(ranks.np), "--rdzv-backend", "static", "--max-restarts", "0",
        "--master-addr", env["MASTER_ADDR"], "--master-port", env["MASTER_PORT"],
        *options.launcher_args, "--no-python", "/bin/sh", RANK_ENV, *options.command,
    )  # fmt: skip


def _local(job: Job, options: Options, ranks: Ranks, launcher: Launcher, env: Mapping[str, str]) -> tuple[str, ...]:
    _no_binding(options, "a single process")
    if options.launcher_args:
        raise ConfigError("--launcher-args has no launcher to go to: a single process is started without one")
    return options.command


# Who starts the ranks, and how. A new launcher joins here, and its variables in rank_env.sh.
BUILDERS: dict[str, Builder] = {"hydra": _hydra, "openmpi": _openmpi, "torchrun": _torchrun, "local": _local}


def _no_binding(options: Options, what: str) -> None:
    if options.cpu_bind:
        raise ConfigError(f"--cpu-bind {options.cpu_bind}: {what} has no CPU binding; use --launcher hydra or openmpi")


def _rank(options: Options) -> tuple[str, ...]:
    if ":" in options.command:
        raise ConfigError(
            "the word ':' in the command would begin a second program for mpiexec: quote the command "
            "(sh -c '...') or use --launcher torchrun"
        )
    return ("/bin/sh", RANK_ENV, *options.command)
