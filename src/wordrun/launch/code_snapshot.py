"""Copies the code for a submitted job, so that edits while the job waits do not affect it.

The job runs in a folder with copies of the project's files. Everything else in their folders (files that git ignores,
outputs/, Python environments) is a link to the original, so that relative paths work as before.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlparse

from wordrun.common import git
from wordrun.common.errors import ConfigError
from wordrun.launch.messages import say

# An untracked file above this size [bytes] is more likely data than code.
LARGEST_UNTRACKED = 10e6
# Maximum total size of the copied files [bytes].
LARGEST = 500e6
# A folder without git and with more files than this is not a project; it may be a home directory.
MOST_FILES = 20_000
# What is copied from a folder without git.
CODE = (
    ".py",
    ".yaml",
    ".yml",
    ".toml",
    ".json",
    ".cfg",
    ".ini",
    ".sh",
    ".jinja",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".h",
    ".cuh",
    ".pyx",
)
SKIPPED = {".git", "__pycache__", "outputs", "node_modules"}


@dataclass(frozen=True)
class CodeSnapshot:
    """A copy of the code."""

    cwd: str
    """Where the job runs: the copy of the working directory."""
    path: tuple[str, ...]
    """Folders to put first in PYTHONPATH."""
    facts: dict[str, object]
    """The commit, and the files that were changed since or are untracked."""
    record: str
    """A file with these facts."""


def take_snapshot(folder: str, cwd: str, wordrun: str, env: Mapping[str, str]) -> CodeSnapshot | None:
    """Copy the project around ``cwd`` into ``folder``, and wordrun's code if that is a checkout outside the project.

    Args:
        folder: a new folder below ``cwd``.
        cwd: the working directory: the project is the git repository around it, or else this folder.
        wordrun: wordrun's checkout; empty: it is installed, so that nobody edits it.
        env: the environment, whose PYTHONPATH may name folders of the project.

    Returns:
        The copy; None if ``cwd`` is not a git repository and has too many files to be a project.

    Raises:
        ConfigError: a file is too large, or cannot be copied.
    """
    found, problem = git.ask(cwd, "rev-parse", "--show-toplevel")
    say(f"all files of code below {cwd} are copied: {problem}" if problem else "")
    top = found.strip("\n") or cwd
    listed = _files(top)
    if listed is None:
        return None
    code = os.path.join(folder, "code")
    facts: dict[str, object] = {"folder": top, "frozen": code, **_state(top)}
    within = [each for each in _editable() if _inside(each, top)]
    given = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each and _inside(each, top)]
    path = [_moved(each, top, code) for each in given]
    path += [_source(_moved(each, top, code), each) for each in within]
    try:
        copy(top, code, listed)
        if wordrun and not _inside(wordrun, top):
            own = os.path.join(folder, "wordrun")
            copy(wordrun, own, _files(wordrun, "src", "conf") or [])
            facts["wordrun"] = {"folder": wordrun, "frozen": own, **_state(wordrun)}
            path.append(_with_conf(own))
        elif wordrun:
            path.append(_with_conf(_moved(wordrun, top, code)))
        record = os.path.join(folder, "code.json")
        with open(record, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(facts, file, indent=2)
    except OSError as error:
        raise ConfigError(
            f"cannot copy the code to {folder}: {error.filename or ''}: {error.strerror}; --no-freeze runs the original"
        ) from None
    return CodeSnapshot(_moved(cwd, top, code), tuple(dict.fromkeys(path)), facts, record)


def describe(snapshot: CodeSnapshot | None) -> str:
    """Return which code a job runs, as text."""
    if snapshot is None:
        return "code: as it is when the job starts"
    untracked = snapshot.facts["untracked"]
    assert isinstance(untracked, list)
    names = ", ".join([*untracked[:5], *(["..."] if untracked[5:] else [])])
    return f"code: a copy in {os.path.relpath(snapshot.cwd)}{f', with untracked {names}' if names else ''}"


def copy(origin: str, target: str, names: Iterable[str]) -> None:
    """Copy the files ``names`` from ``origin`` to ``target``, and link everything else in their folders; see above.

    Raises:
        ConfigError: they are too large together.
        OSError: a file cannot be read or written.
    """
    sizes = {name: os.lstat(os.path.join(origin, name)).st_size for name in names}
    if sum(sizes.values()) > LARGEST:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise ConfigError(
            f"{origin} has {sum(sizes.values()) / 1e6:.0f} MB of code, more than the {LARGEST / 1e6:.0f} MB that "
            f"--submit copies; the largest files are {shown}; --no-freeze runs the original",
            page="jobs.md#the-code-that-a-job-runs",
        )
    folders = {""}
    for name in sizes:
        parts = os.path.dirname(name).split("/")
        folders |= {"/".join(parts[: count + 1]) for count in range(len(parts))}
    for each in sorted(folders):
        os.makedirs(os.path.join(target, each), exist_ok=True)
    for name in sizes:
        shutil.copy2(os.path.join(origin, name), os.path.join(target, name), follow_symlinks=False)
    for each in folders:
        for entry in os.scandir(os.path.join(origin, each)):
            link = os.path.join(target, each, entry.name)
            if not os.path.lexists(link) and entry.name not in (".git", "__pycache__"):
                os.symlink(entry.path, link)


def _files(top: str, *parts: str) -> list[str] | None:
    """Return the project's files relative to ``top``, only those below ``parts`` if given; None: too many.

    Raises:
        ConfigError: an untracked file is too large.
    """
    if not git.ask(top, "rev-parse", "--is-inside-work-tree").text:
        return _walk(top, parts)
    tracked = _listed(top, "ls-files", "-z", "--cached", "--recurse-submodules", "--", *parts)
    untracked = _untracked(top)
    for name in untracked:
        size = os.lstat(os.path.join(top, name)).st_size
        if size > LARGEST_UNTRACKED and not parts:
            raise ConfigError(
                f"{name} is untracked and has {size / 1e6:.0f} MB, too much for a copy of the code: "
                "add it to .gitignore (the job then sees the original), or use --no-freeze"
            )
    wanted = [name for name in untracked if not parts or name.split("/")[0] in parts]
    here = (name for name in dict.fromkeys([*tracked, *wanted]) if os.path.lexists(os.path.join(top, name)))
    return [name for name in here if os.path.islink(os.path.join(top, name)) or os.path.isfile(os.path.join(top, name))]


def _walk(top: str, parts: tuple[str, ...]) -> list[str] | None:
    """Return the code below a folder without git; None: there are too many files."""
    found, count = [], 0
    for root, folders, names in os.walk(top):
        here = os.path.relpath(root, top)
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED
            and not name.startswith(".")
            and not _is_environment(os.path.join(root, name))
            and (here != "." or not parts or name in parts)
        ]
        count += len(names)
        if count > MOST_FILES:
            return None
        found += [os.path.normpath(os.path.join(here, name)) for name in names if name.endswith(CODE)]
    return found


def _state(top: str) -> dict[str, object]:
    """Return the commit of a repository, and the files that differ from it."""
    commit, problem = git.ask(top, "rev-parse", "HEAD")
    dirty = git.changed(top)[0] if commit else []
    return {"commit": commit.strip() or None, "dirty": dirty, "untracked": [] if problem else _untracked(top)}


def _untracked(top: str) -> list[str]:
    """Return the untracked files of a repository, except outputs and Python environments."""
    names = _listed(top, "ls-files", "-z", "--others", "--exclude-standard")
    return [name for name in names if "outputs" not in name.split("/")[:-1] and not _environment(top, name)]


def _listed(top: str, *words: str) -> list[str]:
    text, problem = git.ask(top, *words)
    if problem:
        raise ConfigError(f"cannot copy the code: {problem}; --no-freeze runs the original")
    return [name for name in text.split("\0") if name]


def _environment(top: str, name: str) -> bool:
    """Return whether the file ``name`` is in a Python environment."""
    first = name.split("/")[0]
    return first != name and _is_environment(os.path.join(top, first))


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("pyvenv.cfg", "conda-meta"))


def _editable() -> list[str]:
    """Return the folders of packages that are installed in editable mode."""
    found = []
    for each in importlib.metadata.distributions():
        try:
            facts = json.loads(each.read_text("direct_url.json") or "{}")
        except ValueError:
            continue
        if facts.get("dir_info", {}).get("editable"):
            found.append(unquote(urlparse(facts["url"]).path))
    return found


def _inside(path: str, top: str) -> bool:
    path, top = os.path.realpath(path), os.path.realpath(top)
    return path == top or path.startswith(f"{top}/")


def _moved(path: str, top: str, code: str) -> str:
    """Return what ``path`` below ``top`` is in the copy."""
    return os.path.normpath(os.path.join(code, os.path.relpath(os.path.realpath(path), os.path.realpath(top))))


def _source(moved: str, origin: str) -> str:
    """Return the folder of an editable package that Python has to search."""
    return os.path.join(moved, "src") if os.path.isdir(os.path.join(origin, "src")) else moved


def _with_conf(root: str) -> str:
    """Return wordrun's source folder in a copy of its checkout, after completing the package with its conf/.

    In a checkout, the editable installation maps conf/ into the package, and it would find the original conf/.
    """
    conf = os.path.join(root, "src", "wordrun", "conf")
    if not os.path.lexists(conf):
        os.symlink(os.path.join("..", "..", "conf"), conf)
    return os.path.join(root, "src")
