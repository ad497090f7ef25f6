"""From the options and this machine to a launch plan."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from wordrun.errors import ConfigError
from wordrun.launch import address, record
from wordrun.launch.host import check_command, local_host, own_bin
from wordrun.launch.job import Job, hold_back
from wordrun.launch.launchers import choose
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.plan import LaunchPlan, build
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.request import Decided, Options, Ranks
from wordrun.launch.schedulers import SCHEDULERS, find_job
from wordrun.launch.site import UNKNOWN, Site


def make_plan(
    options: Options, left_out: frozenset[str] = frozenset(), same: record.Identity | None = None
) -> LaunchPlan:
    """Return the plan that ``options`` lead to on this machine.

    Args:
        options: the command line.
        left_out: short names of hosts that are not to be used.
        same: the run that is launched again; None: whatever the environment and the job say.

    Raises:
        ConfigError: the options contradict each other or the machine.
        CommandError: the command does not exist or cannot be run.
    """
    job, site, ranks, launcher = look_around(options, left_out)
    plan = build(job, options, ranks, launcher, _decide(options, job, ranks, site, same), os.environ, site)
    check_command(options.command[0], plan.environment(os.environ).get("PATH", os.defpath))
    return plan


def look_around(options: Options, left_out: frozenset[str] = frozenset()) -> tuple[Job, Site, Ranks, Launcher]:
    """Return the job, the site, the ranks that are asked for, and the launcher that starts them."""
    env = os.environ
    host = local_host(env)
    site, why = UNKNOWN, ""
    # Without a scheduler no site would change anything, and reading all of them takes a while.
    if options.site or options.info or any(env.get(each.variable) for each in SCHEDULERS.values()):
        from wordrun.launch import site_files

        site, why = site_files.find(options.site, host.name, env)
    job = hold_back(find_job(options.scheduler, env, host, site, options.hostfile), options.spare_nodes, left_out)
    if site.name:
        job = replace(job, reasons={**job.reasons, "site": why})
    ranks = decide_ranks(options, job)
    shared = [each for each in zip(job.hosts, ranks.layout, job.devices, strict=False) if each[1] > each[2] > 0]
    if shared:
        name, n, have = shared[0]
        note = f"{n} ranks share {have} device{'s' * (have > 1)} on {name} ({ranks.why}); NCCL allows one rank each"
        job = replace(job, notes=(*job.notes, note))
    return job, site, ranks, choose(options.launcher, ranks.np, env, job, site)


def _decide(options: Options, job: Job, ranks: Ranks, site: Site, same: record.Identity | None) -> Decided:
    """Decide what all ranks must agree on."""
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    asked = dict(options.env)
    folder = os.path.join(os.getcwd(), "outputs", "launches")
    run = same or record.choose_run(os.environ, job, record.mask_words(options.command), folder)
    name = record.file_name(folder, run.run_id)
    master, why = ("", "") if "MASTER_ADDR" in asked else _address(options, job, ranks, site)
    # Ranks on other hosts can report only through a folder that they share with this one.
    if ranks.nodes > 1 or not job.is_local:
        status_dir = os.path.join(folder, f"{name}.status")
    else:
        status_dir = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-launch-{launch_id}")
    return Decided(
        launch_id=launch_id,
        run_id=run.run_id,
        run_why=run.why,
        resume_why=run.resume,
        name=name,
        port=address.usable_port(asked["MASTER_PORT"]) if "MASTER_PORT" in asked else address.free_port(),
        cwd=os.getcwd(),
        status_dir=status_dir,
        own_bin=own_bin(),
        master_addr=master,
        master_why=why,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        terminal=_terminal(),
    )


def _address(options: Options, job: Job, ranks: Ranks, site: Site) -> tuple[str, str]:
    """Return MASTER_ADDR (empty: this host) and why; a host that has no address stops the launch here."""
    here, master, why = socket.gethostname(), "", ""
    if ranks.nodes > 1:
        master, why, problem = address.decide(job.hosts, site, here, address.resolve)
        if problem and not options.dry_run:
            raise ConfigError(f"{job.reasons['hosts']}: {problem}")
        why = f"{why} (NOTE: {problem})" if problem else why
    if SCHEDULERS[job.scheduler].checks_names and not options.dry_run:
        absent = address.unresolved(job.hosts[: ranks.nodes], here, address.is_unknown)
        if absent:
            raise ConfigError(
                f"{job.reasons['hosts']}: {', '.join(absent[:5])}{', ...' * (len(absent) > 5)} cannot be resolved "
                "here: correct the list, or, if only the launcher knows these names, set the first host's address by "
                "--env MASTER_ADDR=ADDRESS"
            )
    return master, why


def _terminal() -> str:
    try:
        size = os.get_terminal_size(1)
    except OSError:
        return ""
    return f"{size.columns}x{size.lines}"
