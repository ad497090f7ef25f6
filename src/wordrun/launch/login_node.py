"""Messages on a login node, where launch can start processes, but has no job's nodes to start them on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.schedulers import SUBMITTERS
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.site import Site

# Names of login nodes, such as polaris-login-02, login12 and aurora-uan-0009.
LOGIN = r"login|\buan"


def login_note(options: Options, job: Job, host: str, env: Mapping[str, str]) -> str:
    """Return a note if processes would start on a login node; empty: it is not one, or the user has chosen this."""
    if not _may_be(options, job) or not re.search(LOGIN, host):
        return ""
    site, scheduler = _find(options, host, env)
    if scheduler is None:
        return ""
    instead = f"launch --submit or {scheduler.interactive} for nodes"
    return f"no {scheduler.name.upper()} job: this looks like {_name(site)}, and the processes start here ({instead})"


def check_nodes(options: Options, job: Job, host: str, env: Mapping[str, str]) -> None:
    """Check that only one node, this machine, is requested if there is no job.

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
    """Return whether launch uses just this machine because it is in no job, and not because an option says so."""
    return job.is_local and not (job.inside or options.scheduler or options.hostfile)


def _find(options: Options, host: str, env: Mapping[str, str]) -> tuple[Site, Scheduler | None]:
    """Return the site, and its scheduler or else one whose command is in PATH; None: there is none."""
    from wordrun.launch import site_files  # imported here to keep launch fast

    site, _ = site_files.find(options.site, host, env)
    in_path = (each for each in SUBMITTERS.values() if shutil.which(each.submitter, path=env.get("PATH")))
    return site, SUBMITTERS.get(site.scheduler) or next(in_path, None)
