"""What a launch will run, and why: the plan, made from the options, the job and this machine."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from wordrun.common import cgroup
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.secrets import mask_words
from wordrun.launch import address
from wordrun.launch.environment import environment, is_stale
from wordrun.launch.job import Job, hold_back, local_host
from wordrun.launch.launchers import choose
from wordrun.launch.launchers.base import Launcher, find_command, own_bin
from wordrun.launch.limits import check_crowd
from wordrun.launch.login_node import check_nodes, login_note
from wordrun.launch.options import Options
from wordrun.launch.rank_starter import RankStarter, starter_of
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.request import Decided, Identity, Ranks, Request
from wordrun.launch.run_identity import choose_run, file_name, records_folder
from wordrun.launch.schedulers import SCHEDULERS, find_job
from wordrun.launch.site import UNKNOWN, Site

# Variables that describe a process, a host or Open MPI itself, and are not forwarded to other hosts.
NOT_FORWARDED = re.compile(r"_|PWD|OLDPWD|SHLVL|HOSTNAME|(OMPI|OPAL|PMIX|PRTE)_.*")
# Variables that rank_env.sh cannot pass on: dash drops those whose names are no identifiers, such as bash's exported
# functions; the others in this expression are set by shells themselves.
NOT_BY_SHELLS = re.compile(
    r"(?![A-Za-z_][A-Za-z0-9_]*\Z).*|BASH(?!_ENV$)\w*|COMP_WORDBREAKS|EPOCH(SECONDS|REALTIME)|HISTCMD|IFS|LINENO"
    r"|OPT(IND|ARG|ERR)|POSIXLY_CORRECT|PPID|PS4|S?RANDOM|SECONDS|SHELLOPTS",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Request):
    """A request with the command line and environment that fulfil it."""

    launcher: Launcher
    starter: RankStarter
    """Decides what the launcher starts: the ranks themselves, or processes that start them."""
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
    request, starter = Request(job, options, ranks, decided, site), starter_of(options)
    started = starter.request(request, launcher)  # what the launcher starts; ``request`` is what the user asked for
    unset = {name for name in env if is_stale(name) or name in site.unset}
    exported = [
        name for name in env if not (name in unset or NOT_BY_SHELLS.fullmatch(name) or NOT_FORWARDED.fullmatch(name))
    ]
    env_set, reasons = environment(request, launcher, env, launcher.variables(started))
    env_set = starter.environment(env_set)
    request, started = (replace(each, env=env_set, exported=tuple(exported)) for each in (request, started))
    kept = {name: value for name, value in env.items() if name not in unset}
    argv = launcher.argv(past_the_shell(started, launcher, {**kept, **env_set}))
    path = request.hosts_file
    # The file of hosts is written only if the command line or a variable names it.
    is_named = any(word.endswith(path) for word in (*argv, *env_set.values()))
    return LaunchPlan(
        **vars(request),
        launcher=launcher,
        starter=starter,
        argv=argv,
        env_unset=tuple(sorted(unset - set(env_set))),
        reasons={**job.reasons, "ranks": ranks.why, "launcher": launcher.why, **reasons},
        files={path: launcher.hosts_text(started)} if is_named else {},
    )


def past_the_shell(request: Request, launcher: Launcher, env: Mapping[str, str]) -> Request:
    """Return the request with a command that sets those variables of ``env`` that the shell does not pass on."""
    lost = [f"{name}={value}" for name, value in env.items() if NOT_BY_SHELLS.fullmatch(name)]
    if not lost or not launcher.in_between:
        return request
    command = ("/usr/bin/env", "--", *lost, *request.options.command)
    return replace(request, options=replace(request.options, command=command))


def on_one_host(plan: LaunchPlan, node: int, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan, from the environment ``env``, for one process more on one of a plan's hosts."""
    name = f"{plan.decided.name or plan.decided.run.run_id}-{node}"
    options = replace(plan.options, launcher_args=(*plan.launcher.single, *plan.options.launcher_args), spare_nodes=0)
    job = replace(plan.job.only([node]), partial=True)
    one = replace(plan, job=job, options=options, ranks=Ranks((1,), ""), decided=replace(plan.decided, name=name))
    starts = past_the_shell(plan.starter.request(one, plan.launcher), plan.launcher, plan.environment(env))
    argv = plan.launcher.argv(starts)
    return replace(one, argv=argv, files={starts.hosts_file: plan.launcher.hosts_text(starts)})


class CommandError(UserError):
    """The command cannot be started."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def make_plan(options: Options, left_out: frozenset[str] = frozenset(), same: Identity | None = None) -> LaunchPlan:
    """Return the launch plan for ``options`` on this machine.

    Args:
        options: the command line.
        left_out: short names of hosts to leave out.
        same: the run to relaunch; None: determined by the environment and the job.

    Raises:
        ConfigError: the options contradict each other or the machine.
        CommandError: the command does not exist or cannot be run.
    """
    job, site, ranks = look_around(options, left_out)
    starter = starter_of(options)
    starter.check(options)
    count = starter.processes(options, job, ranks)
    launcher = starter.launcher(choose(options.launcher, count, os.environ, job, site, options))
    if launcher.note:
        job = replace(job, notes=(*job.notes, launcher.note))
    plan = build(job, options, ranks, launcher, _decide(options, job, ranks, site, same), os.environ, site)
    check_command(options.command[0], plan.environment(os.environ).get("PATH", os.defpath))
    return plan


def look_around(options: Options, left_out: frozenset[str] = frozenset()) -> tuple[Job, Site, Ranks]:
    """Return the job, the site, and the requested ranks."""
    env = os.environ
    host = local_host(env)
    site, why = UNKNOWN, ""
    # Without a scheduler no site would change anything, and reading all site files takes a while.
    if options.site or options.info or any(env.get(each.variable) for each in SCHEDULERS.values()):
        from wordrun.launch import site_files

        site, why = site_files.find(options.site, host.name, env)
    whole = find_job(options.scheduler, env, host, site, options.hostfile)
    job = hold_back(whole, options.spare_nodes, left_out)
    if site.name:
        job = replace(job, reasons={**job.reasons, "site": why})
    check_nodes(options, job, host.name, env)
    ranks = decide_ranks(options, job)
    if options.spare_nodes and starter_of(options).keeps_spare_nodes:
        job = replace(hold_back(whole, 0, left_out), reasons=job.reasons, notes=job.notes)
    shared = [each for each in zip(job.hosts, ranks.layout, job.devices, strict=False) if each[1] > each[2] > 0]
    if shared:
        name, n, have = shared[0]
        note = f"{n} ranks share {have} device{'s' * (have > 1)} on {name} ({ranks.why}); NCCL allows one per device"
        job = replace(job, notes=(*job.notes, note))
    # Only Python programs are assumed to need torch's memory.
    runs_python = re.search(r"python|\.py\b|wordrun", " ".join(options.command))
    crowded = check_crowd(options, job, ranks, cgroup.memory() if runs_python else None)
    notes = tuple(filter(None, (crowded, login_note(options, job, host.name, env))))
    if notes:
        job = replace(job, notes=(*job.notes, *notes))
    return job, site, ranks


def _decide(options: Options, job: Job, ranks: Ranks, site: Site, same: Identity | None) -> Decided:
    """Decide what all ranks must agree on."""
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    asked = dict(options.env)
    folder = records_folder(options.command, os.environ)
    run = same or choose_run(os.environ, job, mask_words(options.command), folder)
    name = file_name(folder, run.run_id)
    master, why = ("", "") if "MASTER_ADDR" in asked else _address(options, job, ranks, site)
    # Ranks on other hosts can report only through a shared folder, which the working directory is.
    if ranks.nodes > 1 or not job.is_local:
        status_dir = os.path.join(os.getcwd(), f".wordrun-launch-{launch_id}")
    else:
        status_dir = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-launch-{launch_id}")
    return Decided(
        launch_id=launch_id,
        run=run,
        name=name,
        cwd=os.getcwd(),
        folder=folder,
        status_dir=status_dir,
        own_bin=own_bin(),
        master_addr=master,
        master_why=why,
        terminal=_terminal(),
        port=address.usable_port(asked["MASTER_PORT"]) if "MASTER_PORT" in asked else address.free_port(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _address(options: Options, job: Job, ranks: Ranks, site: Site) -> tuple[str, str]:
    """Return MASTER_ADDR (empty: this host) and why; raise a ConfigError if a host cannot be resolved."""
    here, master, why = socket.gethostname(), "", ""
    if ranks.nodes > 1:
        master, why, problem = address.of_first(job.hosts, site, here)
        if problem and not options.dry_run:
            raise ConfigError(f"{job.reasons['hosts']}: {problem}")
        why = f"{why} (NOTE: {problem})" if problem else why
    if SCHEDULERS[job.scheduler].checks_names and not options.dry_run:
        absent = address.unresolved(job.hosts[: ranks.nodes], here, address.is_unknown)
        if absent:
            names = f"{', '.join(absent[:5])}{', ...' * (len(absent) > 5)} cannot be resolved here"
            remedy = "if only the launcher knows these names, set the first host's address by --env MASTER_ADDR=ADDRESS"
            raise ConfigError(f"{job.reasons['hosts']}: {names}: correct the list, or, {remedy}")
    return master, why


def _terminal() -> str:
    try:
        columns, lines = os.get_terminal_size(1)
        return f"{columns}x{lines}@{socket.gethostname()}:{os.ttyname(1)}"
    except OSError:
        return ""


def check_command(word: str, path: str) -> None:
    """Raise a CommandError, with a shell's exit status, if ``word`` cannot be run with the PATH ``path``."""
    runnable, found = find_command(word, path)
    if runnable:
        return
    if not found:
        directory = " (it is a directory)" if os.path.isdir(word) else ""
        where = "no such file" if "/" in word else "not in PATH"
        raise CommandError(f"{word}: command not found{directory or f': {where}'}", 127)
    if found.endswith(".py"):
        raise CommandError(f"{word} is not an executable file; did you mean: launch python {word}", 126)
    if "/" in word:
        raise CommandError(f"{word} is not executable: chmod +x {word}", 126)
    raise CommandError(f"{word}: command not found: no executable in PATH (there is a file {found}; chmod +x?)", 127)
