"""The facts about a launch, without secrets: for ``launch.json``, ``--dry-run`` and ``--info``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from wordrun.common.errors import REQUEUE
from wordrun.common.files import read_json, replace
from wordrun.common.run_dir import DIED, RECORD, in_use
from wordrun.common.secrets import mask, mask_words
from wordrun.common.version import __version__
from wordrun.launch.plan import LaunchPlan


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
        # Rank 0 moves the file into its run directory and leaves a link, so replace the link's target. Only the user
        # may read it: arguments may hold secrets that their names do not show.
        replace(Path(os.path.realpath(self.path)), json.dumps(self.content, indent=2) + "\n", mode=0o600)


def _run_dir(record: str) -> Path | None:
    """Return the run directory to which wordrun has moved the record, leaving a link; None: it has not."""
    return Path(os.path.realpath(record)).parent if os.path.islink(record) else None


def continued_without(plan: LaunchPlan, hosts: Collection[str]) -> str:
    """Return how a run has ended well after the loss of ``hosts``, for the last message; empty: none was lost."""
    if not hosts:
        return ""
    run_dir = _run_dir(plan.env["WORDRUN_LAUNCH_RECORD"])
    recoveries = read_json(run_dir / RECORD).get("recoveries") if run_dir else None
    last = recoveries[-1] if recoveries else {}
    resumed = f": resumed from {last['source']} at step {last['resumed_step']}" if last.get("source") else ""
    return f"finished without {', '.join(sorted(hosts))}, lost during the run{resumed}"


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
