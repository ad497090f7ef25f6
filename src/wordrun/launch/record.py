"""The facts about a launch, without secrets: for ``launch.json``, ``--dry-run`` and ``--info``."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from wordrun.common.errors import REQUEUE, short_lines
from wordrun.common.files import read_json, replace
from wordrun.common.run_dir import DIED, RECORD, in_use
from wordrun.common.secrets import mask, mask_words
from wordrun.common.version import __version__
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, find_command, own_bin
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.request import Ranks
from wordrun.launch.site import Site

# Longer host lists are truncated; --json prints all hosts.
SHOWN = 8


def facts(plan: LaunchPlan) -> dict[str, Any]:
    """Return everything known about a launch before it starts, ready for JSON."""
    return {
        "launch": ["launch", *mask_words(plan.options.typed)],
        "command": mask_words(plan.options.command),
        "argv": mask_words(plan.argv),
        "np": plan.ranks.np,
        "ppn": plan.ranks.ppn,
        "hosts": list(plan.hosts),
        "site": plan.site.name or None,
        "scheduler": plan.job.scheduler,
        "job": plan.job.id or None,
        "restarts": plan.job.restarts,
        "launcher": plan.launcher.name,
        "launcher_path": plan.launcher.path or None,
        "env_set": {name: mask(name, value) for name, value in plan.env.items()},
        "env_unset": list(plan.env_unset),
        "cwd": plan.decided.cwd,
        "launch_id": plan.decided.launch_id,
        "run_id": plan.env["WORDRUN_RUN_ID"],
        "reasons": dict(plan.reasons),
        **({"code": code} if (code := _frozen_code(os.environ)) else {}),
    }


def _frozen_code(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts about the copy of the code that a submitted job runs; empty: it runs the original."""
    try:
        with open(env["WORDRUN_CODE"], encoding="utf-8", errors="surrogateescape") as file:
            return dict(json.load(file))
    except (KeyError, OSError, ValueError):
        return {}


class Record:
    """The launch's record, written when it starts and again when it ends."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.path = plan.env["WORDRUN_LAUNCH_RECORD"]
        system = os.uname()
        self.content = {
            **facts(plan),
            "versions": {
                "wordrun": __version__,
                "python": sys.version.split()[0],
                "platform": f"{system.sysname} {system.release} {system.machine}",
            },
            "start": _now(),
            "end": None,
            "exit_status": None,
        }

    def begin(self) -> None:
        """Write the file for the first time; raises OSError."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._write()

    def note(self, **facts: Any) -> None:
        """Add ``facts`` to the file; raises OSError."""
        self.content |= facts
        self._write()

    def end(self, status: int, failure: str = "", not_shown: Sequence[str] = ()) -> None:
        """Add the end time, the exit status, which rank failed, and the launcher's lines that were not shown."""
        self.content |= {"end": _now(), "exit_status": status, "failure": failure or None, "not_shown": list(not_shown)}
        self._write()
        _close_run(_run_dir(self.path), self.content["end"])

    def _write(self) -> None:
        # Rank 0 moves the file into its run directory and leaves a link, so replace the link's target.
        replace(Path(os.path.realpath(self.path)), json.dumps(self.content, indent=2) + "\n")


def _run_dir(record: str) -> Path | None:
    """Return the run directory to which wordrun has moved the record, leaving a link; None: it has not."""
    return Path(os.path.realpath(record)).parent if os.path.islink(record) else None


def _close_run(run_dir: Path | None, end: str) -> None:
    """Record that a run died if its record says that it is running, but no process uses its directory.

    A rank 0 that is killed, or aborted by C++ code, cannot write that itself.

    Raises:
        OSError: the record cannot be written.
    """
    file = run_dir / RECORD if run_dir else None
    if file is None or in_use(file.parent):
        return
    content = read_json(file)
    if content.get("exit_reason") == "running":
        replace(file, json.dumps(content | {"exit_reason": DIED, "end": end}, indent=2) + "\n")


def _now() -> str:
    """Return the local time with its offset, in ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def how_to_continue(plan: LaunchPlan, status: int) -> str:
    """Return what to tell the user after a launch that ended with ``status``; empty: nothing."""
    words = [*facts(plan)["launch"], *mask_words(plan.options.command)]
    again = f"  WORDRUN_RUN_ID={plan.env['WORDRUN_RUN_ID']} WORDRUN_RESUME=auto {shlex.join(words)}"
    where = "" if plan.job.is_local else ", submit this job's script again, or call in another job"
    record = plan.env.get("WORDRUN_LAUNCH_RECORD", "")
    run_dir = _run_dir(record)
    if status == REQUEUE:
        saved = f"stopped early, with its state saved (exit status {REQUEUE})"
        return saved if run_dir else f"{saved}; to continue{where}:\n{again}"
    if status == 0 or run_dir is None or not (run_dir / "checkpoints" / "latest").exists():
        return ""
    content = read_json(run_dir / RECORD)
    if str(content.get("exit_reason")).startswith("stopped by") or content.get("complete"):
        return ""  # the run itself has said how to continue, or there is nothing to continue
    return f"to continue from the last checkpoint{where}:\n{again}"


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
