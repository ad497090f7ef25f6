"""From overrides to one typed, checked Config, through Hydra; and from Hydra's errors to ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from wordrun.checks import check
from wordrun.config import BACKENDS, DTYPES, RENAMED, SCHEMAS, Config, ScheduleConfig
from wordrun.errors import ConfigError, UserError, first_line, nearest
from wordrun.log import LOGGER
from wordrun.run_id import new_run_id

# What Hydra and OmegaConf raise for a wrong override.
REFUSALS = (HydraException, OmegaConfBaseException, ValueError, YAMLError)
# What of Hydra's own settings a run looks at; the rest would be dropped without a word.
HYDRA_SETTINGS = ("hydra.run.", "hydra.searchpath", "hydra.sweep.", "hydra.sweep=", "hydra/launcher", "hydra/sweeper")


GROUPS = (*SCHEMAS, "experiment", "train.backend")


@dataclass(frozen=True)
class Tree:
    """Where the configuration tree begins; Hydra's --config-path, --config-name and --config-dir change it."""

    name: str = "config"
    path: str | None = None
    extra_dir: str | None = None


def compose(
    overrides: Sequence[str] = (), *, tree: Tree | None = None, ranks: int | None = None, per_node: int | None = None
) -> Config:
    """Return the Config that ``overrides`` (as on the command line) make, checked.

    Args:
        overrides: such as ``["data=sample", "train.max_iters=20"]``.
        tree: where the configuration tree begins, if not at wordrun's own.
        ranks: number of ranks, for the checks that depend on it; a Trainer makes those for itself.
        per_node: ranks on each node, if not all are on one.

    Raises:
        ConfigError: names every problem at once.
    """
    tree = tree or Tree()
    overrides = [_renamed(override) for override in overrides]
    unused = [o for o in overrides if _name(o).startswith("hydra") and not o.lstrip("+").startswith(HYDRA_SETTINGS)]
    if unused:
        raise ConfigError("\n".join(
            f"{o} has no effect on a run: of Hydra's own settings it uses hydra.run.dir and hydra.searchpath"
            for o in unused
        ))  # fmt: skip
    try:
        composed = _compose(list(overrides), tree)
    except REFUSALS as error:
        raise ConfigError("\n".join(_diagnose(list(overrides), tree, error, ranks, per_node))) from None
    # A continued run stays where it is, unless it is sent elsewhere.
    moves = any(_name(override) == "hydra.run.dir" for override in overrides)
    return to_config(composed, run_dir=None if moves else _run_to_continue(composed), ranks=ranks, per_node=per_node)


def _renamed(override: str) -> str:
    """Return ``override`` with the option's present name, and say so if it came with an old one."""
    key, equals, value = override.partition("=")
    old = _name(override)
    if old not in RENAMED:
        return override
    LOGGER.warning("%s is now called %s; the old name is accepted until the next release", old, RENAMED[old])
    return f"{key.replace(old, RENAMED[old])}{equals}{value}"


def _run_to_continue(composed: DictConfig) -> str | None:
    """Return the directory of the run that train.resume names by a path."""
    from wordrun.checkpoint.folder import CHECKPOINTS, locate

    wish = composed.train.resume
    if wish in (None, "auto"):
        return None
    try:
        run_dir, found = locate(Path(wish))
    except UserError as error:
        raise ConfigError(f"train.resume={wish}: {error}") from None
    # A checkpoint that was copied elsewhere has no run around it: a new one begins with it.
    return str(run_dir) if found[-1].path.parent == run_dir / CHECKPOINTS else None


def to_config(
    composed: DictConfig, *, run_dir: str | None = None, ranks: int | None = None, per_node: int | None = None
) -> Config:
    """Return the checked Config of a composed tree; ``run_dir`` defaults to ``hydra.run.dir``.

    Raises:
        ConfigError: names every unknown key and every impossible value.
    """
    problems = [message for _, message in _undeclared(composed)]
    if composed.get("run_dir"):
        problems.append(f"run_dir={composed.run_dir} cannot be set by itself: use hydra.run.dir={composed.run_dir}")
    try:
        directory = run_dir or str(composed.hydra.run.dir or "")
        if not directory:  # it would be the current directory
            problems.append("hydra.run.dir is empty: name a directory, or leave it out")
        with open_dict(composed):
            composed.pop("hydra", None)  # in a sweep, Hydra has taken it out already
        cfg = OmegaConf.to_object(composed)
        assert isinstance(cfg, Config)
        cfg.run_dir = directory
        check(cfg, ranks, per_node)
        if not cfg.optimizer.decay_lr:
            LOGGER.warning("optimizer.decay_lr=false is now schedule=constant; it is accepted until the next release")
            cfg.schedule = ScheduleConfig("constant")
        cfg.train.dtype = DTYPES[cfg.train.dtype]
    except ConfigError as error:
        problems += str(error).splitlines()
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key or 'config'}: {first_line(error)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return cast(Config, cfg)


def register() -> None:
    """Put the schema, and the alias group that lets ``train.backend=NAME`` choose a backend, into Hydra's store."""
    for name, resolver in (("run_id", run_id), ("data_home", data_home)):
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in SCHEMAS.items():
        for option, node in options.items():
            store.store(group=f"schema/{group}", name=option, node=_open(node))
    for backend in BACKENDS:
        content = {"defaults": [{"/backend": backend.lower()}, "_self_"], "train": {"backend": backend}}
        for spelling in dict.fromkeys((backend, backend.lower())):
            store.store(group="train.backend", name=spelling, package="_global_", node=content)


def _open(node: type[Any]) -> Any:
    """Return the schema ``node``; its dictionaries, unlike the rest of the tree, take new keys."""
    schema = OmegaConf.structured(node)
    for key in schema:
        if OmegaConf.is_dict(schema._get_node(key)):
            OmegaConf.set_struct(schema._get_node(key), False)
    return schema


def run_id() -> str:
    """Return the name of this run: ``launch``'s where it has chosen one, else a new one."""
    return os.environ.get("WORDRUN_RUN_ID") or new_run_id()


def data_home() -> str:
    """Return the folder that holds the data sets: ``$WORDRUN_DATA_HOME``, or the user's cache."""
    return os.environ.get("WORDRUN_DATA_HOME") or os.path.expanduser("~/.cache/wordrun")


def _compose(overrides: list[str], tree: Tree) -> DictConfig:
    register()
    if tree.extra_dir:
        overrides = [f"hydra.searchpath=[file://{os.path.abspath(tree.extra_dir)}]", *overrides]
    backup = GlobalHydra.instance().hydra  # a caller may be inside an application of its own
    GlobalHydra.instance().clear()
    start = (
        initialize_config_dir(os.path.abspath(tree.path), version_base="1.3")
        if tree.path
        else initialize_config_module("wordrun.conf", version_base="1.3")
    )
    try:
        with start:
            return hydra_compose(tree.name, overrides, return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = backup


def _undeclared(composed: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield name and message of each key that no dataclass declares.

    Hydra accepts ``+train.typo=1``, even on a typed config, and the value would be lost.
    """
    known = sorted(_keys(composed))

    def walk(node: DictConfig, prefix: str) -> Iterator[tuple[str, str]]:
        cls = OmegaConf.get_type(node)
        declared = {f.name for f in fields(cls)} if is_dataclass(cls) else None
        for key in node:
            name = f"{prefix}{key!s}"
            if name == "hydra":
                continue
            if declared is not None and key not in declared:
                yield name, f"unknown option '{name}'{nearest(name, known)}"
            elif OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, key):
                child = node._get_node(key)
                if isinstance(child, DictConfig):
                    yield from walk(child, f"{name}.")

    yield from walk(composed, "")


def _keys(composed: DictConfig) -> Iterator[str]:
    for section in (f.name for f in fields(Config)):
        node = composed.get(section)
        if isinstance(node, DictConfig):
            cls: Any = OmegaConf.get_type(node)
            yield from (f"{section}.{f.name}" for f in fields(cls))


def _diagnose(overrides: list[str], tree: Tree, whole: Exception, ranks: int | None, per_node: int | None) -> list[str]:
    """Return a message for every override that cannot be applied, and for what is wrong with the rest."""
    problems: list[str] = []
    good: list[str] = []
    try:
        base = _compose([], tree)
    except REFUSALS:
        return [f"the configuration tree itself does not compose: {whole}"]
    # Choices of files first: the options that they bring are then known.
    for override in sorted(overrides, key=lambda o: _name(o) not in GROUPS):
        try:
            base = _compose([*good, override], tree)
            good.append(override)
        except REFUSALS as error:
            problems.append(_translate(override, error, base))
    if not problems:
        return [first_line(whole)]
    try:
        to_config(base, ranks=ranks, per_node=per_node)
    except ConfigError as error:
        problems += str(error).splitlines()
    return problems


def _translate(override: str, error: Exception, base: DictConfig) -> str:
    """Return our message for the one ``override`` that Hydra refuses with ``error``."""
    key, _, value = override.partition("=")
    name, text = _name(override), str(error)
    if isinstance(error, YAMLError):
        return f"{override}: the file is no YAML: {' '.join(text.split())}"
    options = re.search(r"Available options in '[^']*':\n(.*)", text, re.DOTALL)
    if options:
        known = options[1].partition("Config search path:")[0].split()
        offered = list(BACKENDS) if name == "train.backend" else known
        kind = name.rpartition(".")[2]
        return f"{name}={value}: unknown {kind} '{value}'{nearest(value, offered)} ({', '.join(offered)})"
    if isinstance(error, OverrideParseException) and "=" in override:
        return f"""{override}: Hydra cannot read this value; put it into quotes twice: '{key}="{value}"'"""
    if "=" not in override:
        return f"'{override}' is no override: write KEY=VALUE, or --help for the options"
    reason = first_line(error.__cause__ or error)
    inside = re.search(r"In '([^']+)': \w+ raised while composing config:\s*(.*)", f"{text}\n{error.__cause__}")
    if inside:
        return f"{override}: in {inside[1]}.yaml: {inside[2]}"
    if name in GROUPS:
        return f"{override}: {reason} (choose one by {name}=NAME)"
    if "Ambiguous value" in text:
        return f"{override}: several values are a sweep: add -m, or put a list into brackets, {name}=[{value}]"
    known = sorted({*_keys(base), *GROUPS})
    if name not in known and name.partition(".")[0] != "hydra":
        return f"unknown option '{name}'{nearest(name, known)}"
    # "Value 'abc' of type 'str' could not be converted to Integer", "Value 'maybe' is not a valid bool"
    wanted = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    match = re.search(r"converted to (\w+)|not a valid (\w+)", f"{text} {error.__cause__}")
    if match:
        kind = match[1] or match[2]
        return f"{name}={value} should be {wanted.get(kind, kind)}"
    if value == "null":
        return f"{name}=null should have a value: leave it out for the default"
    return f"{override}: {reason}"


def _name(override: str) -> str:
    """Return the key that an override changes."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def as_yaml(cfg: Any) -> str:
    """Return ``cfg`` (a Config or a part of one) as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))
