"""The help of ``wordrun train``: a one-screen overview, and the options of each config group."""

from __future__ import annotations

import importlib.resources
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.config.arguments import describe, help_width
from wordrun.config.registry import backends
from wordrun.config.schema import SECTIONS, SEVERAL, Config, parts_in, schemas
from wordrun.track.base import LEGEND

EXAMPLES = """\
Examples:
  wordrun data=sample train=smoke                a few steps, as a check
  launch -n 2 python -m wordrun train.backend=DDP data=shakespeare
--cfg job prints the config. Runs go to outputs/ (or hydra.run.dir=DIR)."""
EXPERIMENT = "experiment"
GROUPS = (*SECTIONS, EXPERIMENT)
METRICS = "metrics"


def overview(folders: Iterable[Path]) -> str:
    """Return the config groups, the user's own choices in them (``folders`` have their files), and examples."""
    folders = list(folders)
    groups = " ".join("train.backend" if group == "backend" else group for group in GROUPS)
    lines = ["Options: KEY=VALUE or GROUP=NAME; `wordrun --help GROUP` lists them. Groups:", _wrapped(groups)]
    own = [f"{group}={name}" for group in GROUPS for name in sorted(_own_names(group, folders))]
    return "\n".join([*lines, *([_wrapped(" ".join(own), "Your own: ")] if own else []), EXAMPLES])


def names_of(group: str, folders: Sequence[Path]) -> str:
    """Return what can be chosen in a group, as a line of help."""
    key = "train.backend" if group == "backend" else group
    text = f"{key}=[NAME,...]: " if group in SEVERAL else f"{key}=NAME: "
    return _wrapped(" ".join(choices(group, folders)), text)


def choices(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names that can be chosen in a group; ``folders`` are the user's own."""
    if group == "backend":
        return backends()
    names = {file.stem for file in (_wordruns() / group).glob("*.yaml")}
    names |= set(schemas(group)) if group in SECTIONS else set()
    return sorted(names | _own_names(group, folders))


def _own_names(group: str, folders: Sequence[Path]) -> set[str]:
    found = {file.stem for folder in folders for file in (folder / group).glob("*.yaml")}
    return found | ({name for name, part in schemas(group).items() if part.origin} if group in SECTIONS else set())


def _wrapped(text: str, title: str = "  ") -> str:
    return textwrap.fill(
        text,
        help_width(),
        initial_indent=title,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def changed_groups(cfg: Config, plain: Config, overrides: Sequence[str]) -> list[str]:
    """Return the config groups that ``overrides`` name or that they make differ between ``cfg`` and ``plain``.

    An experiment among them comes first, as ``experiment=NAME``.
    """
    keys = {override.partition("=")[0].lstrip("+").removeprefix("train.backend") for override in overrides}
    named = {key.partition(".")[0] for key in keys}
    plain = replace(plain, train=replace(plain.train, backend=cfg.train.backend))  # has a group of its own
    changed = [group for group in SECTIONS if group in named or getattr(cfg, group) != getattr(plain, group)]
    return [*(word for word in overrides if word.startswith(f"{EXPERIMENT}=")), *changed]


def options_of(cfg: Config, groups: Sequence[str], folders: Sequence[Path] = (), *, names: bool = False) -> str:
    """Return the options of ``groups`` with their values in ``cfg`` and meanings; of ``metrics``, their meanings.

    ``folders`` are the user's own, whose experiments are shown too. With ``names``, begin with what can be chosen.

    Raises:
        ConfigError: there is no such group.
    """
    parts = parts_in(cfg)
    return "\n\n".join(text for group in groups for text in _group(parts, group, folders, names))


def _group(parts: dict[str, Any], group: str, folders: Sequence[Path], names: bool) -> Iterator[str]:
    if group == METRICS:
        yield "\n".join(f"  {name:<12} {meaning}" for name, meaning in LEGEND.items())
    group, _, chosen = group.partition("=")
    if group == EXPERIMENT:
        where = dict.fromkeys(folder.resolve() for folder in (_wordruns(), *folders))
        for file in sorted(file for folder in where for file in (folder / group).glob(f"{chosen or '*'}.yaml")):
            about = _first_comment(file)
            yield textwrap.fill(f"{group}={file.stem}{': ' * bool(about)}{about}", help_width(), break_on_hyphens=False)
        return
    group = group.removeprefix("train.")  # a backend is chosen by train.backend=NAME
    if group not in SECTIONS:
        raise ConfigError(f"--help {group}: unknown group{nearest(group, GROUPS)} ({', '.join(GROUPS)})")
    if names:
        yield names_of(group, folders)
    chosen_parts = {name: node for name, node in parts.items() if name.partition(".")[0] == group}
    for name, node in chosen_parts.items():
        yield "\n".join([_about(name, type(node)), *describe(node, f"{name}.", width=35)])
    if not chosen_parts:  # nothing is selected by default
        for name, part in schemas(group).items():
            schema = part.options
            yield "\n".join([_about(f"{group}=[{name}]", schema), *describe(schema(), f"{group}.{name}.", width=35)])


def _about(name: str, options: type[Any]) -> str:
    """Return the docstring of the dataclass ``options``, as a paragraph."""
    return textwrap.fill(f"{name}: {' '.join((options.__doc__ or '').split())}", help_width(), break_on_hyphens=False)


def _first_comment(file: Path) -> str:
    """Return the comment at the beginning of a config file, up to its first indented line, which is an example."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# @"))
    return " ".join(line[2:] for line in takewhile(lambda line: re.match(r"# \S", line), lines))


def _wordruns() -> Path:
    """Return the folder of wordrun's own config files."""
    return Path(str(importlib.resources.files("wordrun.conf")))
