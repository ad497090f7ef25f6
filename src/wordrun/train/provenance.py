"""What a result may depend on besides its config: versions of programs, and commits of wordrun and the project."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy
import torch

from wordrun.common import git
from wordrun.common.files import read_json
from wordrun.common.log import LOGGER
from wordrun.common.version import __version__
from wordrun.config import project


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "wordrun": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def commits() -> dict[str, str | None]:
    """Return the commits of wordrun and of the project, each with ``-dirty`` if files have been changed since.

    The project is the repository around the working directory, or around the project that it belongs to, unless that
    is wordrun's own; ``project_repository`` is its folder. None: there is no repository.
    """
    file, here = Path(__file__), Path(project.here().folder)
    # A submitted job runs copies, which are not repositories.
    copy = read_json(Path(os.environ["WORDRUN_CODE"])) if os.environ.get("WORDRUN_CODE") else {}
    mine = copy.get("wordrun", copy)
    own = _frozen(mine) if _is_in(file, mine) else _own_commit(file)
    if not _is_in(here, copy):
        return _named(own, *_project(here, file, own))
    return _named(own) if _is_in(file, copy) and mine is copy else _named(own, _frozen(copy), copy.get("folder"))


def _named(own: str | None, project: str | None = None, folder: object = None) -> dict[str, str | None]:
    where = {"project_repository": str(folder)} if project and folder else {}
    return {"wordrun_commit": own, "project_commit": project, **where}


def _is_in(path: Path, facts: dict[str, Any]) -> bool:
    """Return whether ``path`` is in the copy of a repository that ``facts`` describe."""
    return "frozen" in facts and Path(facts["frozen"]).resolve() in (path.resolve(), *path.resolve().parents)


def _frozen(facts: dict[str, Any]) -> str | None:
    """Return the commit of a repository of which a job runs a copy."""
    commit = facts.get("commit")
    return f"{commit}{'-dirty' * bool(facts.get('dirty'))}" if commit else None


def _own_commit(file: Path) -> str | None:
    """Return the commit of the repository that tracks ``file``; a wheel may be installed inside another repository."""
    tracked = git.ask(file.parent, "ls-files", "--error-unmatch", file.name).text
    return _commit(file.parent) if tracked else None


def _project(folder: Path, file: Path, own: str | None) -> tuple[str | None, Path | None]:
    """Return the commit of the repository around ``folder``, and where it is, unless it tracks ``file``."""
    root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    if root is None or (own is not None and root in file.parents):
        return None, None
    return _commit(root), root


def _commit(folder: Path) -> str | None:
    """Return the commit of a repository, with ``-dirty``; None, with a warning if git does not read it: unknown."""
    commit, problem = git.ask(folder, "rev-parse", "HEAD")
    dirty, unknown = git.changed(folder) if commit else ([], "")
    if problem or unknown:
        LOGGER.warning("run.json does not have the commit of the code: %s", problem or unknown)
        return None
    return f"{commit.strip()}{'-dirty' * bool(dirty)}" if commit else None
