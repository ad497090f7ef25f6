"""What ``--dry-run`` and ``--info`` print."""

from __future__ import annotations

import os
import shlex
import sys
import time
from datetime import timedelta
from typing import Any

import wordrun
from wordrun.launch.host import find_command, own_bin
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.ranks import Ranks
from wordrun.launch.record import facts, mask, mask_words
from wordrun.launch.site import Site

# Longer lists of hosts are cut; --json has them all.
SHOWN = 8


def dry_run(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return what would run: as JSON, or as shell lines that do the same when pasted, with the reasons beside them."""
    if as_json:
        return _json(facts(plan))
    ranks = f"{plan.ranks.np} rank{'s' * (plan.ranks.np > 1)} on {len(plan.hosts)} host{'s' * (len(plan.hosts) > 1)}"
    launcher = f"{plan.launcher.name} {plan.launcher.path}".strip()
    lines = [
        f"# {ranks}: {plan.reasons['ranks']}",
        f"# site: {plan.site.name or 'unknown'} ({plan.reasons.get('site', 'not one of the known sites')})",
        f"# scheduler: {plan.job.scheduler} {plan.job.id} ({plan.reasons['scheduler']})".replace("  ", " "),
        f"# hosts: {' '.join(plan.hosts[:SHOWN])}{' ...' * (len(plan.hosts) > SHOWN)} ({plan.reasons['hosts']})",
        f"# cores: {plan.job.cores[0]} ({plan.reasons['cores']})",
        f"# devices: {plan.job.devices[0]} ({plan.reasons['devices']})",
        f"# launcher: {launcher} ({plan.launcher.why})",
        *(f"# note: {note}" for note in plan.job.notes),
    ]
    if "OMP_NUM_THREADS" not in plan.env:
        lines.append(f"# OMP_NUM_THREADS: {plan.reasons['OMP_NUM_THREADS']}")
    if plan.env_unset:
        lines.append(f"unset {' '.join(plan.env_unset)}  # set by an earlier launcher")
    for name, value in plan.env.items():
        why = plan.reasons.get(name)
        lines.append(f"export {name}={shlex.quote(mask(name, value))}" + (f"  # {why}" if why else ""))
    for path, text in plan.files.items():
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(path))}")
        lines.append(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}  # the launcher's host file")
    return "\n".join([*lines, shlex.join(mask_words(plan.argv))])


def info(job: Job, site: Site, ranks: Ranks, launcher: Launcher, *, as_json: bool) -> str:
    """Return the job, hosts, devices, launcher and python that were found: as JSON, or as a table."""
    path = os.pathsep.join(filter(None, (own_bin(), os.environ.get("PATH", ""))))
    found: dict[str, Any] = {
        "site": f"{site.name}: {site.description}" if site.name else None,
        "internet": site.way_out if site.name else None,
        "scheduler": job.scheduler,
        "job": job.id or None,
        "queue": job.queue or None,
        "time_left": None if job.ends_at is None else str(timedelta(seconds=max(0, int(job.ends_at - time.time())))),
        "hosts": list(job.hosts),
        "cores": list(job.cores),
        "devices": list(job.devices),
        "ranks": ranks.np,
        "launcher": launcher.name,
        "launcher_path": launcher.path or None,
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "python_in_path": find_command("python", os.environ.get("PATH", path))[0] or None,
        "wordrun": wordrun.__version__,
        "notes": list(job.notes),
        "reasons": {**job.reasons, "ranks": ranks.why, "launcher": launcher.why},
    }
    if as_json:
        return _json(found)
    return _table(found)


def _json(content: dict[str, Any]) -> str:
    import json

    return json.dumps(content, indent=2)


def _table(found: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.items():
        if name == "reasons" or value in (None, []):
            continue
        text = ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
        table.add_row(name, text, found["reasons"].get(name, ""))
    console = Console(highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
