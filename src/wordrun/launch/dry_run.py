"""What ``launch --dry-run`` and ``launch --info`` show, as text or JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from datetime import timedelta
from typing import Any

from wordrun.common.errors import short_lines
from wordrun.common.secrets import mask, mask_words
from wordrun.common.version import __version__
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, find_command, own_bin
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.record import facts
from wordrun.launch.request import Ranks
from wordrun.launch.site import Site

SHOWN = 8
"""Number of hosts that a dry run lists; --json lists all."""


def size(plan: LaunchPlan) -> str:
    """Return the number of ranks and hosts, for people to read."""
    return f"{plan.ranks.np} rank{'s' * (plan.ranks.np > 1)} on {len(plan.hosts)} host{'s' * (len(plan.hosts) > 1)}"


def dry_run(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return what would run: as JSON, or as shell commands that can be pasted, with the reasons as comments."""
    if as_json:
        return json.dumps(facts(plan), indent=2)
    launcher = f"{plan.launcher.name} {plan.launcher.path}".strip()
    lines = [
        f"# {size(plan)}: {plan.reasons['ranks']}",
        f"# site: {plan.site.name or 'unknown'} ({plan.reasons.get('site', 'not one of the known sites')})",
        f"# scheduler: {plan.job.scheduler} {plan.job.id} ({plan.reasons['scheduler']})".replace("  ", " "),
        f"# hosts: {' '.join(plan.hosts[:SHOWN])}{' ...' * (len(plan.hosts) > SHOWN)} ({plan.reasons['hosts']})",
        f"# cores: {plan.job.cores[0]} ({plan.reasons['cores']})",
        f"# devices: {plan.job.devices[0]} ({plan.reasons['devices']})",
        f"# launcher: {launcher} ({plan.launcher.why})",
        *(f"# note: {note}" for note in plan.job.notes),
    ]
    if note := plan.starter.note(shlex.join(mask_words(plan.options.command))):
        lines.append(f"# {note}")
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


def info(job: Job, site: Site, ranks: Ranks, launcher: Launcher | None, missing: str = "", *, as_json: bool) -> str:
    """Return the detected job, hosts, devices, launcher (or why there is none) and python, as JSON or a table."""
    path = os.pathsep.join(filter(None, (own_bin(), os.environ.get("PATH", ""))))
    found: dict[str, Any] = {
        "site": f"{site.name}: {site.description}" if site.name else None,
        "internet": site.internet_access or None,
        "scheduler": job.scheduler,
        "job": job.id or None,
        "queue": job.queue or None,
        "time_left": None if job.ends_at is None else str(timedelta(seconds=max(0, int(job.ends_at - time.time())))),
        "hosts": list(job.hosts),
        "cores": list(job.cores),
        "devices": list(job.devices),
        "ranks": ranks.np,
        "launcher": launcher.name if launcher else None,
        "launcher_path": launcher.path or None if launcher else None,
        "launcher_missing": short_lines(f"launcher: {missing}") if missing else [],
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "python_in_path": find_command("python", os.environ.get("PATH", path))[0] or None,
        "wordrun": __version__,
        "notes": list(job.notes),
        "reasons": {**job.reasons, "ranks": ranks.why, "launcher": launcher.why if launcher else ""},
    }
    return json.dumps(found, indent=2) if as_json else _table(found)


def _table(found: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # paths are to be read in full
    for name, value in found.items():
        if name not in ("reasons", "launcher_missing") and value not in (None, []):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            table.add_row(name, text, found["reasons"].get(name, ""))
    console = Console(highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join([capture.get().rstrip("\n"), *found["launcher_missing"]])
