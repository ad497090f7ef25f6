"""What a result may depend on besides its config: the versions of programs, and the commit of this code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch

from wordrun.runs.record import read_json
from wordrun.version import __version__


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "wordrun": __version__, "python": platform.python_version(), "torch": str(torch.__version__),
        "numpy": numpy.__version__, "platform": platform.platform(),
    }  # fmt: skip


def git_commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` if it has been changed since."""
    if code := os.environ.get("WORDRUN_CODE"):  # a submitted job runs a copy, which is no repository
        facts = read_json(Path(code))
        facts = facts.get("wordrun", facts)
        if Path(str(facts.get("frozen"))) in Path(__file__).parents:
            commit = facts.get("commit")
            return f"{commit}{'-dirty' * bool(facts.get('dirty'))}" if commit else None
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # An installed wheel may be in an environment inside another project's repository.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        answer = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
