"""Where parts and config files from outside wordrun come from: installed packages, and the user's project.

A project is a folder with ``wordrun.yaml``, or with the table ``[tool.wordrun]`` in ``pyproject.toml``: the working
directory, or the nearest one above it. ``module`` in either names the module that registers the project's parts. Its
folder ``conf`` has the project's config files.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, first_line
from wordrun.common.suggestions import nearest

GROUP = "wordrun"
"""The entry points of installed packages that name a module which registers parts."""
SETTINGS = ("module",)
MOST_BYTES = 1_000_000
MOST_VALUES = 100_000
"""Limits of a YAML file; ten lines with aliases of aliases can stand for 10^10 values."""


@dataclass(frozen=True)
class Project:
    """A folder with its own parts or config files."""

    folder: Path
    source: str = ""
    """The file, or the table in a file, that declares it; empty: none does, and only its conf/ is used."""
    module: str | None = None
    """Registers the project's parts when it is imported."""

    @property
    def conf(self) -> Path | None:
        """The folder of its config files, which are added to wordrun's."""
        own = self.folder / "conf"
        is_wordruns = (self.folder / "src" / "wordrun" / "__init__.py").exists()  # in a checkout of wordrun itself
        return own if own.is_dir() and not is_wordruns else None


def here() -> Project:
    """Return the project of the working directory; its folder and ``src/`` are on ``sys.path`` from then on.

    Raises:
        ConfigError: the file that declares it is not valid.
    """
    try:
        project = _project(Path.cwd())
    except FileNotFoundError:  # the working directory has been removed
        return Project(Path("/"))
    # `python -m wordrun` has the folder on sys.path; a console script has only its own folder.
    for path in (str(project.folder / "src"), str(project.folder)) if project.source else ():
        if os.path.isdir(path) and path not in sys.path:
            sys.path.insert(0, path)
    return project


@cache
def _project(folder: Path) -> Project:
    for each in (folder, *folder.parents):
        with contextlib.suppress(PermissionError):
            if found := _declared(each):
                return found
    return Project(folder)


def _declared(folder: Path) -> Project | None:
    """Return the project that ``folder`` is, if a file in it says so."""
    for source, settings in _declarations(folder):
        if unknown := [key for key in settings if key not in SETTINGS]:
            known = f"{nearest(str(unknown[0]), SETTINGS)} ({', '.join(SETTINGS)})"
            raise ConfigError(f"{source}: unknown key '{unknown[0]}'{known}")
        module = settings.get("module")
        if not (module is None or isinstance(module, str)):
            raise ConfigError(f"{source}: module={module} should be the name of a module, such as mypackage.parts")
        return Project(folder, source, module)
    return None


def _declarations(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings in each file that declares ``folder`` to be a project, with what to call them."""
    found = []
    if (file := folder / "wordrun.yaml").is_file():
        import yaml

        try:
            settings = read_yaml(file)
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
        found.append((str(file), {} if settings is None else settings))
    if (file := folder / "pyproject.toml").is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
        if "tool.wordrun" in text:  # else do not wait for the parser
            found += [(f"[tool.wordrun] in {file}", table) for table in _tables(file, text)]
    for source, settings in found:
        if not isinstance(settings, dict):
            raise ConfigError(f"{source}: expected KEY: VALUE, such as module: mypackage.parts")
    if len(found) > 1:
        raise ConfigError(f"{found[0][0]} and {found[1][0]} both declare the project: remove one of them")
    return found


def read_yaml(file: Path, loader: Any = None) -> Any:
    """Return what is in a YAML file of the user's, in bounded time and memory; ``loader``: default yaml.SafeLoader.

    Raises:
        ConfigError: it cannot be read, or its aliases stand for too much.
        YAMLError: it is not valid.
    """
    import yaml

    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"{file} has {size:,} bytes, more than the {MOST_BYTES:,} that a config file may have")
        with file.open(encoding="utf-8") as stream:
            reader = (loader or yaml.SafeLoader)(stream)
            node = reader.get_single_node()
        if (count := _values(node, {})) > MOST_VALUES:
            raise ConfigError(
                f"{file}: its aliases (*NAME) stand for {count:.3g} values, more than "
                f"the {MOST_VALUES:,} that a config file may have"
            )
        return reader.construct_document(node) if node else None
    except RecursionError:
        raise ConfigError(f"{file} contains itself (by *NAME), or is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _values(node: Any, known: dict[int, int]) -> int:
    """Return how many values a YAML ``node`` has with aliases replaced; ``known``: those of others by their id."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        inside = [each for entry in node.value for each in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_values(each, known) for each in inside)
    return known[id(node)]


def _tables(file: Path, text: str) -> list[dict[str, Any]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {first_line(error)}") from None
    return [tool["wordrun"]] if "wordrun" in tool else []


def check_config_files(folders: Iterable[Path], own_parts: Callable[[str], Iterable[str]]) -> None:
    """Check that no config file of the user has the name of a file or a part of wordrun, which would hide it.

    Args:
        folders: the user's, with files GROUP/NAME.yaml.
        own_parts: returns the names of wordrun's own parts in a config group.

    Raises:
        ConfigError: some have; the message names all of them.
    """
    own = importlib.resources.files("wordrun.conf")
    taken = [
        f"{file}: {file.parent.name}={file.stem} is one of wordrun's own: rename the file"
        for folder in folders
        for file in sorted(folder.glob("*/*.yaml"))
        if own.joinpath(file.parent.name, file.name).is_file() or file.stem in own_parts(file.parent.name)
    ]
    if taken:
        raise ConfigError("\n".join(taken))


def ignored_root(conf: Path, name: str) -> str:
    """Return a warning if the user's folder ``conf`` has a file with the name of wordrun's root file; else nothing."""
    root = conf / name
    if not root.is_file():
        return ""
    return (
        f"{root} is not read, because wordrun's own {name} is the root of the config: move its settings to "
        f"{conf}/experiment/NAME.yaml, and choose them with experiment=NAME"
    )


def modules() -> list[tuple[str, str]]:
    """Return the modules that register parts from outside wordrun, each with what names it.

    Raises:
        ConfigError: a declaration is not valid.
    """
    project = here()  # first, because an installed package may be the project's own
    return [*_installed(), *([(project.module, project.source)] if project.module else [])]


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = []
    for point in entry_points(group=GROUP):
        whose = f"the entry point {point.name} = {point.value} of {point.dist.name if point.dist else 'a package'}"
        if point.attr:
            raise ConfigError(f"{whose}: it should name a module that calls wordrun.register, without a colon")
        found.append((point.module, whose))
    return tuple(found)
