"""``launch.json``: what was run, when, where and how it ended, without secrets."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wordrun
from wordrun.files import replace
from wordrun.launch.plan import LaunchPlan

# KEY in API_KEY and apikey2, but not TOKEN in tokenizer and TOKENIZERS_PARALLELISM.
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
HIDDEN = "***"


def mask(name: str, value: str) -> str:
    """Return ``value``, or asterisks if ``name`` is that of a secret."""
    return HIDDEN if SECRET.search(name) else value


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the command line ``words`` with the values of secret NAME=VALUE words hidden."""
    masked = []
    for word in words:
        name, equals, value = word.partition("=")
        named = equals and re.fullmatch(r"[-+~\w./@]+", name)
        masked.append(f"{name}={mask(name, value)}" if named else word)
    return masked


def facts(plan: LaunchPlan) -> dict[str, Any]:
    """Return all that is known of a launch before it starts, ready for JSON."""
    return {
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
    }


class Record:
    """The launch's record; written at its start and again at its end."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.path = plan.env["WORDRUN_LAUNCH_RECORD"]
        system = os.uname()
        self.content = {
            **facts(plan),
            "versions": {
                "wordrun": wordrun.__version__,
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

    def end(self, status: int) -> None:
        """Complete the file with the end of the launch."""
        self.content |= {"end": _now(), "exit_status": status}
        self._write()

    def _write(self) -> None:
        # Rank 0 moves the file into its run directory and leaves a link: the real file is the one to replace.
        replace(Path(os.path.realpath(self.path)), json.dumps(self.content, indent=2) + "\n")


def _now() -> str:
    """Return the local time with its offset, in ISO 8601."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return f"{stamp[:-2]}:{stamp[-2:]}"
