"""Build a launch plan from the options and this machine."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wordrun.common import cgroup
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.run_id import new_run_id
from wordrun.launch import address
from wordrun.launch.job import Job, hold_back, local_host
from wordrun.launch.launchers import LAUNCHERS, choose
from wordrun.launch.launchers.base import find_command, own_bin
from wordrun.launch.launchers.local import Alone, Local
from wordrun.launch.plan import LaunchPlan, build
from wordrun.launch.ranks import check_crowd, decide_ranks
from wordrun.launch.record import mask_words
from wordrun.launch.request import Decided, Identity, Options, Ranks
from wordrun.launch.schedulers import SCHEDULERS, SUBMITTERS, find_job
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.site import UNKNOWN, Site


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
    if options.elastic:
        _check_elastic(options)
    started = min(ranks.nodes + options.spare_nodes, len(job.hosts)) if options.elastic else ranks.np
    launcher = choose(options.launcher, started, os.environ, job, site, options)
    if options.elastic and isinstance(launcher, Local):
        launcher = Alone(why="a single guardian needs no mpiexec")
    if launcher.note:
        job = replace(job, notes=(*job.notes, launcher.note))
    plan = build(job, options, ranks, launcher, _decide(options, job, ranks, site, same), os.environ, site)
    check_command(options.command[0], plan.environment(os.environ).get("PATH", os.defpath))
    return plan


def _check_elastic(options: Options) -> None:
    """Refuse what --elastic cannot do.

    Raises:
        ConfigError: names the option and the remedy.
    """
    if options.cpu_bind:
        raise ConfigError(f"--cpu-bind {options.cpu_bind}: with --elastic, guardians bind the ranks; leave it out")
    if options.launcher and not LAUNCHERS[options.launcher].starts_guardians:
        raise ConfigError(f"--launcher {options.launcher}: with --elastic, guardians start the ranks; leave it out")
    if options.sweeps:
        raise ConfigError("--elastic: a sweep launches its points itself; use it with the command of a single run")


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
    refuse_nodes(options, job, host.name, env)
    ranks = decide_ranks(options, job)
    if options.elastic and options.spare_nodes:  # guardians wait on the spare nodes, too
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


def records_folder(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the folder for the records of launches: of wordrun's runs here, of others in the user's home."""
    own = os.path.join(os.getcwd(), "outputs", "launches")
    if os.path.isdir(own) or re.search(r"(^|[\s/])wordrun(\s|$)", " ".join(command)):
        return own
    state = env.get("XDG_STATE_HOME", "")
    base = state if os.path.isabs(state) else os.path.expanduser("~/.local/state")
    return os.path.join(base, "wordrun", "launches")


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
    runnable, plain = find_command(word, path)
    if runnable:
        return
    if not plain:
        directory = " (it is a directory)" if os.path.isdir(word) else ""
        where = "no such file" if "/" in word else "not in PATH"
        raise CommandError(f"{word}: command not found{directory or f': {where}'}", 127)
    if plain.endswith(".py"):
        raise CommandError(f"{word} is not an executable file; did you mean: launch python {word}", 126)
    if "/" in word:
        raise CommandError(f"{word} is not executable: chmod +x {word}", 126)
    raise CommandError(f"{word}: command not found: no executable in PATH (there is a file {plain}; chmod +x?)", 127)


def choose_run(env: Mapping[str, str], job: Job, command: Sequence[str], folder: str) -> Identity:
    """Return the run: the one in WORDRUN_RUN_ID, one that this job began before it was requeued, or a new one.

    Args:
        env: this process's environment. In a rank, WORDRUN_RUN_ID is the rank's own run and is ignored.
        job: the scheduler's job.
        command: what the ranks run, without secrets.
        folder: the folder with the records of launches.

    Raises:
        ConfigError: WORDRUN_RUN_ID cannot be part of a file name.
    """
    named = exported_id(env)
    if named:
        return Identity(named, "WORDRUN_RUN_ID was exported")
    if job.restarts:
        begun = _begun_before(job, command, folder)
        count = f"{job.reasons.get('restarts', 'restarts')}={job.restarts}"
        if begun:
            return Identity(begun, f"begun by this job before it was requeued ({count})", f"requeued: {count}")
    return Identity(new_run_id())


def exported_id(env: Mapping[str, str]) -> str:
    """Return the run ID that the user or a job script has exported; empty: none.

    Raises:
        ConfigError: it cannot be part of a file name.
    """
    run_id = env.get("WORDRUN_RUN_ID", "")
    if not run_id or "WORDRUN_LAUNCH_ID" in env:
        return ""
    if not re.fullmatch(r"\w[\w.-]*", run_id, re.ASCII):
        raise ConfigError(
            f"WORDRUN_RUN_ID={run_id}: it is part of file names, so only letters, digits and _ . - are allowed"
        )
    return run_id


def file_name(folder: str, run_id: str) -> str:
    """Return the base name of this launch's files in ``folder``: the run's ID, numbered from its second launch on."""
    name, number = run_id, 1
    while glob.glob(os.path.join(glob.escape(folder), f"{name}.*")):
        number += 1
        name = f"{run_id}-{number}"
    return name


def _begun_before(job: Job, command: Sequence[str], folder: str) -> str:
    """Return the first run of ``command`` that earlier attempts of ``job`` began and this one has not resumed yet.

    One script may launch the same command several times.
    """
    tries: dict[str, int] = {}
    for path in glob.glob(os.path.join(glob.escape(folder), "*.json")):
        try:
            with open(path) as file:
                facts = json.load(file)
        except (OSError, ValueError):
            continue  # the run directory is gone, or the file is being written
        if facts.get("job") == job.id and facts.get("command") == list(command):
            run_id = facts["run_id"]
            tries[run_id] = max(tries.get(run_id, 0), facts.get("restarts", 0))
    return next((run_id for run_id in sorted(tries) if tries[run_id] < job.restarts), "")


# Names of login nodes, such as polaris-login-02, login12 and aurora-uan-0009.
LOGIN = r"login|\buan"


def login_note(options: Options, job: Job, host: str, env: Mapping[str, str]) -> str:
    """Return a note if processes are about to start on a login node; empty: it is none, or the user has chosen so."""
    if not _may_be(options, job) or not re.search(LOGIN, host):
        return ""
    site, scheduler = _find(options, host, env)
    if scheduler is None:
        return ""
    instead = f"launch --submit or {scheduler.interactive} for nodes"
    return f"no {scheduler.name.upper()} job: this looks like {_name(site)}, and the processes start here ({instead})"


def refuse_nodes(options: Options, job: Job, host: str, env: Mapping[str, str]) -> None:
    """Refuse more nodes than there are without a job.

    Raises:
        ConfigError: there is a scheduler; the message says how to get the nodes from it.
    """
    if not _may_be(options, job) or (options.nodes or 1) <= len(job.hosts):
        return
    site, scheduler = _find(options, host, env)
    if scheduler is None:
        return
    asked, none, shell = f"-N {options.nodes}", f"no {scheduler.name.upper()} job", scheduler.interactive
    if not (site.name or re.search(LOGIN, host)):  # such as a workstation with a scheduler's commands
        fits = "this machine is 1 node; -N 1, or no -N, would fit"
        raise ConfigError(f"{asked}: {fits} (there is {none}: add --submit, or use {shell})")
    submit = f"launch --submit {asked} --walltime H:MM:SS -- COMMAND submits one"
    shell = f"{shell} {scheduler.nodes_of_shell.format(nodes=options.nodes)} starts a shell in one"
    raise ConfigError(
        f"{asked}: {none}: this looks like {_name(site)}; {submit}; {shell}", page="launch.md#in-a-slurm-or-pbs-job"
    )


def _name(site: Site) -> str:
    return f"{site.name}'s login node" if site.name else "a login node"


def _may_be(options: Options, job: Job) -> bool:
    """Return whether only the absence of a job is why there is just this machine."""
    return job.is_local and not (job.inside or options.scheduler or options.hostfile)


def _find(options: Options, host: str, env: Mapping[str, str]) -> tuple[Site, Scheduler | None]:
    """Return the site, and its scheduler or else one whose command is in PATH; None: there is none."""
    from wordrun.launch import site_files  # imported here to keep launch fast

    site, _ = site_files.find(options.site, host, env)
    in_path = (each for each in SUBMITTERS.values() if shutil.which(each.submitter, path=env.get("PATH")))
    return site, SUBMITTERS.get(site.scheduler) or next(in_path, None)
