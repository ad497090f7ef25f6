"""From job, options and launcher to the one Plan that is run: pure functions, nothing is looked up here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wordrun.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.launcher import Launcher
from wordrun.launch.options import Options
from wordrun.launch.site import Site, fill

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
    # and what srun does
    "SLURM_HOSTFILE",
    # an outer launch's own
    "WORDRUN_LAUNCHER", "WORDRUN_LAUNCHER_PATH", "WORDRUN_LAUNCH_ID", "WORDRUN_RUN_ID", "WORDRUN_WORLD_SIZE",
    "WORDRUN_HOSTS", "WORDRUN_LAUNCH_RECORD", "WORDRUN_STATUS_DIR", "WORDRUN_TERMINAL",
])  # fmt: skip
# Linux starts no program with a word or variable longer than 128 KiB. 10,000 hosts' names are that, and ranks can do
# without: the names are for people.
LONGEST = 100_000
# What a user exports for the ranks, where a launcher passes on only what it is told to.
FOR_RANKS = (
    "CCL_", "FI_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH", "TRITON_", "UCX_", "WANDB_",
    "WORDRUN_",
)  # fmt: skip
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
    master_addr: str = ""
    """Name or address at which the first of several hosts is reached."""
    master_why: str = ""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of this machine."""
    terminal: str = ""
    """COLUMNSxLINES of the terminal that launch writes to, if it is one."""
    name: str = ""
    """What this launch's files under outputs/launches are called; empty: as the run."""
    run_why: str = ""
    """Why the run is not a new one."""
    resume_why: str = ""
    """Why the ranks are told to go on from what the run has left."""

    def path(self, suffix: str) -> str:
        """Return the path of one of this launch's files."""
        return os.path.join(self.cwd, "outputs", "launches", f"{self.name or self.run_id}.{suffix}")


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are and where."""

    layout: tuple[int, ...]
    """Ranks on each of the first hosts of the job."""
    why: str

    @property
    def np(self) -> int:
        """All ranks."""
        return sum(self.layout)

    @property
    def nodes(self) -> int:
        """Hosts that have ranks."""
        return len(self.layout)

    @property
    def ppn(self) -> int:
        """Ranks on the fullest host."""
        return max(self.layout)

    @property
    def even(self) -> bool:
        """Say whether all hosts have the same number."""
        return len(set(self.layout)) == 1


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
    site: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that have to be there before the launcher starts, and what is in them."""

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
    place = "this machine" if job.scheduler == "none" else f"{job.scheduler.upper()} job {job.id}"
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
        return _checked((ppn,) * needed, asked, job)
    if ppn is not None:
        nodes = nodes or have
        return _checked((ppn,) * nodes, f"{asked}: {ppn} on each of {nodes}", job)
    if np is not None:
        return Ranks(_spread(np, nodes, job, asked, place), asked)
    nodes = nodes or have
    slots = job.slots[:nodes]
    why = f"one per device ({sum(slots)} found)" if any(job.devices[:nodes]) else "no device, so one process"
    if job.scheduler != "none" and not any(job.devices[:nodes]):
        why = f"{'+'.join(map(str, slots)) if nodes < 9 else sum(slots)} by the scheduler or the site"
    return Ranks(slots, f"{asked}: {why}" if asked else why)


def _spread(np: int, nodes: int | None, job: Job, asked: str, place: str) -> tuple[int, ...]:
    """Return the ranks of each host for ``np`` ranks: the fewest hosts whose slots hold them, filled in order.

    With -N, or where the slots are too few, all hosts share the ranks evenly, as far as their cores go. Devices are not
    shared unless --ppn says so.
    """
    slots, room = job.slots[: nodes or None], _room(job)[: nodes or None]
    shared = job.scheduler != "none" and any(job.devices)
    if shared:
        room = slots
    if np < (nodes or 1):
        raise ConfigError(f"{asked}: {np} ranks cannot be on {nodes} nodes; -N {np}, or -n {nodes}, would fit")
    if np <= sum(slots) and not (nodes and np % nodes == 0 and all(np // nodes <= most for most in room)):
        layout: list[int] = []
        for at, most in enumerate(slots):
            # Of the hosts that -N asks for none stays empty.
            kept_back = nodes - at - 1 if nodes else 0
            layout.append(min(most, np - sum(layout) - kept_back))
            if sum(layout) == np:
                return tuple(layout)
    hosts = len(slots)
    layout = [np // hosts + (host < np % hosts) for host in range(min(hosts, np))]
    if any(ranks > most for ranks, most in zip(layout, room, strict=False)):
        may_share = np % hosts == 0 and all(np // hosts <= most for most in _room(job)[:hosts])
        raise ConfigError(
            f"{asked}: {place} has room for {sum(room)} ranks on {hosts} node{'s' * (hosts > 1)} "
            f"({_list(room)}{'' if shared else ' by devices and cores'}); -n {sum(room)} would fit"
            + (f", or -n {np} --ppn {np // hosts} to let ranks share devices" if shared and may_share else "")
        )
    return tuple(layout)


def _checked(layout: tuple[int, ...], why: str, job: Job) -> Ranks:
    room = _room(job)[: len(layout)]
    if any(ranks > most for ranks, most in zip(layout, room, strict=True)):
        raise ConfigError(
            f"{why}: {job.scheduler.upper()} job {job.id} has room for {_list(room)} ranks on its nodes, "
            f"by devices and cores; --ppn {min(room)} would fit"
        )
    return Ranks(layout, why)


def _room(job: Job) -> tuple[float, ...]:
    """Return the most ranks of each host: on a machine of one's own there is no limit."""
    if job.scheduler == "none":
        return (float("inf"),) * len(job.hosts)
    return tuple(max(slots, cores) for slots, cores in zip(job.slots, job.cores, strict=True))


def _list(numbers: Sequence[float]) -> str:
    return "+".join(map(str, numbers)) if len(numbers) < 9 else f"{numbers[0]}+...+{numbers[-1]}"


@dataclass(frozen=True)
class Request:
    """All that a launcher's command line follows from."""

    job: Job
    options: Options
    ranks: Ranks
    launcher: Launcher
    decided: Decided
    site: Site | None
    env: Mapping[str, str]
    """The environment that is set for the ranks."""
    exported: tuple[str, ...] = ()
    """What the user has exported for them instead, or besides."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have ranks."""
        return self.job.hosts[: self.ranks.nodes]

    @property
    def cores_per_rank(self) -> int:
        """Cores that each rank can have, on the host where they are fewest."""
        if self.launcher.kind == "pals" and self.site and not self.options.cpu_bind:
            bound = self.site.bound_cores(self.ranks.ppn)
            if bound is not None:
                return bound
        pairs = zip(self.job.cores, self.ranks.layout, strict=False)
        return max(1, min(cores // ranks for cores, ranks in pairs))


def build(
    job: Job, options: Options, ranks: Ranks, launcher: Launcher, decided: Decided, env: Mapping[str, str],
    site: Site | None = None,
) -> Plan:  # fmt: skip
    """Return the Plan that starts ``options.command`` as ``ranks``.

    Raises:
        ConfigError: the launcher cannot do what an option asks.
    """
    request = Request(job, options, ranks, launcher, decided, site, {})
    env_set, reasons = _environment(request, env)
    unset = {name for name in env if is_stale(name)} | {name for name in (site.unset if site else ()) if name in env}
    known = {*site.env, *site.proxies} if site else set()
    exported = (name for name in env if (name in known or name.startswith(FOR_RANKS)) and name not in unset)
    request = replace(request, env=env_set, exported=tuple(exported))
    reasons = {
        **job.reasons,
        "ranks": ranks.why,
        "launcher": launcher.why,
        **reasons,
    }
    argv = BUILDERS[launcher.kind](request)
    hosts_file = decided.path("hosts")
    return Plan(
        argv=argv,
        command=options.command,
        env_set=env_set,
        env_unset=tuple(sorted(unset - set(env_set))),
        np=ranks.np, ppn=ranks.ppn, hosts=request.hosts, launcher=launcher, job=job, decided=decided, reasons=reasons,
        site=site.name if site else None,
        files={hosts_file: _hosts_text(request)}
        if any(word.endswith(hosts_file) for word in (*argv, env_set.get("SLURM_HOSTFILE", "")))
        else {},
    )  # fmt: skip


def is_stale(name: str) -> bool:
    """Say whether a variable is one that an earlier launcher set for its own ranks."""
    return name in STALE or name.startswith(STALE_PREFIXES)


def threads(cores: int, scheduler: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Return OMP_NUM_THREADS for a rank that has ``cores`` (None: leave it as it is), and why."""
    told = env.get("OMP_NUM_THREADS")
    # PBS sets it to all threads of the node, which is nobody's wish.
    if told is not None and not (scheduler == "pbs" and told == env.get("NCPUS")):
        return None, f"kept: OMP_NUM_THREADS={told} was exported"
    instead = f", instead of PBS's {told}" if told else ""
    return str(cores), f"cores of a rank{instead}"


def _environment(request: Request, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that every rank finds, and why they have their values."""
    job, ranks, launcher, decided = request.job, request.ranks, request.launcher, request.decided
    one_host = ranks.nodes == 1
    values = {
        "MASTER_ADDR": "127.0.0.1" if one_host else decided.master_addr or job.hosts[0],
        "MASTER_PORT": str(decided.port),
        "WORDRUN_LAUNCHER": launcher.kind,
        "WORDRUN_LAUNCHER_PATH": launcher.path,
        "WORDRUN_LAUNCH_ID": decided.launch_id,
        "WORDRUN_RUN_ID": decided.run_id,
        "WORDRUN_WORLD_SIZE": str(ranks.np),
        "WORDRUN_LAUNCH_RECORD": decided.path("json"),
    }
    hosts = ",".join(request.hosts)
    if len(hosts) <= LONGEST:
        values["WORDRUN_HOSTS"] = hosts
    reasons = {
        "MASTER_ADDR": "all ranks are on one host" if one_host else decided.master_why or "first host of the job",
        "MASTER_PORT": "free just now, drawn at random",
    }
    if decided.run_why:
        reasons["WORDRUN_RUN_ID"] = decided.run_why
    if decided.resume_why:
        values["WORDRUN_RESUME"], reasons["WORDRUN_RESUME"] = "auto", decided.resume_why
    omp, reasons["OMP_NUM_THREADS"] = threads(request.cores_per_rank, job.scheduler, env)
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
    if request.options.idle_timeout and "PYTHONFAULTHANDLER" not in env:
        values["PYTHONFAULTHANDLER"] = "1"
        reasons["PYTHONFAULTHANDLER"] = "--idle-timeout: stuck ranks print their stacks"
    loopback = next((name for name in decided.interfaces if name in ("lo", "lo0")), "")
    if one_host and ranks.np > 1 and loopback and "GLOO_SOCKET_IFNAME" not in env:
        values["GLOO_SOCKET_IFNAME"] = loopback
        reasons["GLOO_SOCKET_IFNAME"] = "one host: gloo needs no host name that resolves"
    if decided.terminal and (launcher.kind != "local" or request.options.idle_timeout):
        values["WORDRUN_TERMINAL"] = decided.terminal
        reasons["WORDRUN_TERMINAL"] = "ranks cannot see the terminal that launch writes to"
    if decided.own_bin not in env.get("PATH", "").split(os.pathsep):
        values["PATH"] = os.pathsep.join(filter(None, (decided.own_bin, env.get("PATH", ""))))
        reasons["PATH"] = "so that `python` is the one that has wordrun"
    if launcher.kind == "srun":
        values["SRUN_CPUS_PER_TASK"] = str(request.cores_per_rank)
        reasons["SRUN_CPUS_PER_TASK"] = "as -c: SLURM 22.05 to 23.02 read nothing else, and two values would be fatal"
        if not ranks.even:
            values["SLURM_HOSTFILE"] = decided.path("hosts")
            reasons["SLURM_HOSTFILE"] = "a line for each rank, for --distribution=arbitrary"
    if request.site and job.scheduler == request.site.scheduler:
        _add_site(request.site, request, env, values, reasons)
    for name, value in request.options.env:
        values[name], reasons[name] = value, "--env"
    return values, reasons


def _add_site(
    site: Site, request: Request, env: Mapping[str, str], values: dict[str, str], reasons: dict[str, str]
) -> None:
    """Add the site's variables, except those that the user exported."""
    devices = min(request.job.devices[: request.ranks.nodes])
    words = {"devices": str(devices), "devices_reversed": ",".join(map(str, reversed(range(devices))))}
    asked = {**site.env, **{name: (value, "compute nodes go out by it") for name, value in site.proxies.items()}}
    if not site.internet:
        asked["WANDB_MODE"] = ("offline", "compute nodes have no internet")
    for name, (value, why) in asked.items():
        # The scheduler's own list of devices is nobody's wish.
        if name not in env or name == "CUDA_VISIBLE_DEVICES":
            values[name], reasons[name] = fill(value, **words), f"site {site.name}: {why}"


Builder = Callable[[Request], "tuple[str, ...]"]


def _hydra(r: Request) -> tuple[str, ...]:
    # Hydra passes its whole environment on (-genvall is its default).
    binding = ("-bind-to", r.options.cpu_bind) if r.options.cpu_bind else ()
    # Inside a scheduler's job Hydra would ask that one for hosts and start ranks there.
    where: tuple[str, ...] = ("-rmk", "user", "-launcher", "fork") if r.job.inside else ()
    if _elsewhere(r):
        where = ("-f", r.decided.path("hosts"), *(("-ppn", str(r.ranks.ppn)) if r.ranks.even else ()))
    return (r.launcher.path, "-n", str(r.ranks.np), *where, *binding, *r.options.launcher_args, *_rank(r.options))


def _openmpi(r: Request) -> tuple[str, ...]:
    where = ("-N", str(r.ranks.ppn)) if r.ranks.even else ()
    where = (*where, "--hostfile", r.decided.path("hosts")) if _elsewhere(r) else ()
    # Its own default binds a rank to one core, whatever OMP_NUM_THREADS says.
    binding = ("--bind-to", r.options.cpu_bind or "none")
    crowd = ("--map-by", "slot:OVERSUBSCRIBE") if r.ranks.ppn > min(r.job.cores) and not where else ()
    # mpirun hands on what -x names, and on other hosts nothing else.
    inherited = ("LD_LIBRARY_PATH", "PATH", *r.exported) if where else ()
    exported = [word for name in sorted({*r.env, *inherited}) for word in ("-x", name)]
    return (
        r.launcher.path, "-n", str(r.ranks.np), *where, *binding, *crowd, *exported, *r.options.launcher_args,
        *_rank(r.options),
    )  # fmt: skip


def _pals(r: Request) -> tuple[str, ...]:
    binding = r.options.cpu_bind or (r.site.cpu_binding(r.ranks.ppn) if r.site else "")
    # Depth is the distance from one rank's first core to the next one's.
    depth = ("--depth", str(r.cores_per_rank)) if binding == "depth" else ()
    bound = (*depth, "--cpu-bind", binding) if binding else ()
    if not r.ranks.even and any(ranks != r.ranks.ppn for ranks in r.ranks.layout[:-1]):
        raise ConfigError(
            f"{r.ranks.why}: PALS fills its hosts in order with --ppn ranks each; of {_list(r.ranks.layout)} only the "
            "last could have fewer: use --ppn"
        )
    whole = r.ranks.nodes == len(r.job.hosts) and r.job.hostfile
    return (
        r.launcher.path, "--envall", "--line-buffer", "-n", str(r.ranks.np), "--ppn", str(r.ranks.ppn),
        "--hostfile", r.job.hostfile if whole else r.decided.path("hosts"), *bound, *r.options.launcher_args,
        *_rank(r.options),
    )  # fmt: skip


def _srun(r: Request) -> tuple[str, ...]:
    devices = min(r.job.devices[: r.ranks.nodes])
    args = r.site.srun_args if r.site and r.site.launcher == "srun" else ("--gpu-bind=none",) if devices else ()
    args = tuple(fill(word, devices=devices) for word in args if devices or ("gpu" not in word and "gres" not in word))
    if r.options.cpu_bind:
        args = (*(word for word in args if not word.startswith("--cpu-bind")), f"--cpu-bind={r.options.cpu_bind}")
    # srun may take any of the job's nodes; rank 0 has to be where MASTER_ADDR says.
    hosts = ",".join(r.hosts)
    part = r.ranks.nodes < len(r.job.hosts) or r.options.hostfile or r.job.partial
    if not r.ranks.even:  # srun would level the numbers out
        where: tuple[str, ...] = ("-c", str(r.cores_per_rank), "--distribution=arbitrary")
    else:
        chosen = (f"--nodelist={hosts if len(hosts) <= LONGEST else r.decided.path('hosts')}",) if part else ()
        where = (f"--ntasks-per-node={r.ranks.ppn}", "-c", str(r.cores_per_rank), *chosen)
    return (
        r.launcher.path, "-u", "-N", str(r.ranks.nodes), "-n", str(r.ranks.np), *where, *args,
        "--kill-on-bad-exit=1", "--wait=60", "--disable-status",
        f"--job-name={step_name(r.decided)}", *r.options.launcher_args, "/bin/sh", RANK_ENV, *r.options.command,
    )  # fmt: skip


def _torchrun(r: Request) -> tuple[str, ...]:
    _no_binding(r.options, "torchrun")
    if r.ranks.nodes > 1:
        raise ConfigError(
            "--launcher torchrun starts ranks on one host: leave it out for the scheduler's own launcher, or -N 1"
        )
    return (
        r.launcher.path, "-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0",
        "--nproc-per-node", str(r.ranks.np), "--rdzv-backend", "static", "--max-restarts", "0",
        "--master-addr", r.env["MASTER_ADDR"], "--master-port", r.env["MASTER_PORT"],
        *r.options.launcher_args, "--no-python", "/bin/sh", RANK_ENV, *r.options.command,
    )  # fmt: skip


def step_name(decided: Decided) -> str:
    """Return the name by which SLURM knows the step of this launch."""
    return f"wordrun-{decided.launch_id}"


def _hosts_text(r: Request) -> str:
    between = {"hydra": ":", "openmpi": " slots="}.get(r.launcher.kind)
    if between is None:
        times = r.ranks.layout if r.launcher.kind == "srun" and not r.ranks.even else (1,) * len(r.hosts)
        return "".join(f"{host}\n" * n for host, n in zip(r.hosts, times, strict=True))
    return "".join(f"{host}{between}{ranks}\n" for host, ranks in zip(r.hosts, r.ranks.layout, strict=True))


def _elsewhere(r: Request) -> bool:
    """Say whether the launcher has to be told the hosts: not on a machine of one's own."""
    return r.job.scheduler == "pbs" or len(r.job.hosts) > 1 or r.options.hostfile is not None


def _local(r: Request) -> tuple[str, ...]:
    options = r.options
    _no_binding(options, "a single process")
    if options.launcher_args:
        raise ConfigError("--launcher-args has no launcher to go to: a single process is started without one")
    return options.command


# Who starts the ranks, and how. A new launcher joins here, and its variables in rank_env.sh.
BUILDERS: dict[str, Builder] = {
    "pals": _pals, "srun": _srun, "hydra": _hydra, "openmpi": _openmpi, "torchrun": _torchrun, "local": _local,
}  # fmt: skip


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
