"""Composes overrides into one typed, validated Config, using Hydra."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from wordrun.common.errors import ConfigError, first_line
from wordrun.common.log import LOGGER
from wordrun.common.run_dir import CHECKPOINTS, locate, new_run_id
from wordrun.common.secrets import has_login, is_secret
from wordrun.common.section import Section
from wordrun.common.validation import too_large
from wordrun.config import hydra_sources, project
from wordrun.config.fallbacks import settled
from wordrun.config.messages import INVALID_OVERRIDE, VALUE, diagnose, name_of, option_names, unknown_option
from wordrun.config.registry import backends
from wordrun.config.rules import check
from wordrun.config.schema import (
    OLDER,
    SECTIONS,
    Config,
    as_dict,
    parts_in,
    schemas,
    with_accumulation,
)
from wordrun.config.strings import as_typed
from wordrun.data.tokenizers.options import TokenizerConfig
from wordrun.model.options import ModelConfig
from wordrun.train.optim.options import MuonConfig
from wordrun.train.options import DTYPES, ScheduleConfig

# Hydra's own settings that a run uses; others would be silently ignored.
HYDRA_SETTINGS = (
    "hydra.run.",
    "hydra.searchpath",
    "hydra.sweep.",
    "hydra.sweep=",
    "hydra/launcher",
    "hydra.launcher.",
    "hydra/sweeper",
    "hydra.sweeper.",
)


@dataclass(frozen=True)
class Tree:
    """The root of the configuration tree; Hydra's --config-path, --config-name and --config-dir change it."""

    name: str = "config"
    path: str | None = None
    extra_dir: str | None = None


def compose(
    overrides: Sequence[str] = (),
    *,
    tree: Tree | None = None,
    ranks: int | None = None,
    per_node: int | None = None,
    checked: bool = True,
) -> Config:
    """Return the validated Config for command-line ``overrides``.

    Args:
        overrides: such as ``["data=sample", "train.max_iters=20"]``.
        tree: the root of the configuration tree; None: wordrun's own.
        ranks: number of ranks, for checks that depend on it; None skips them, as a Trainer runs them itself.
        per_node: ranks per node; None: all on one node.
        checked: False accepts a config that cannot be trained, such as a model without its data, to show its options.

    Raises:
        ConfigError: if the config is invalid; the message names every problem.
    """
    tree = tree or Tree()
    for flag, folder in (("--config-dir", tree.extra_dir), ("--config-path", tree.path)):
        if folder and not os.path.isdir(folder):
            raise ConfigError(f"{flag} {folder} is not a folder")
    folders = [Path(folder) for folder in (project.here().conf, tree.extra_dir) if folder]
    project.check_config_files(folders, _own_parts)
    for conf in () if tree.path else folders:
        if ignored := project.ignored_root(conf, f"{tree.name}.yaml"):
            LOGGER.warning("%s", ignored)
    overrides = [renamed(override) for override in overrides]
    unused = [o for o in overrides if name_of(o).startswith("hydra") and not o.lstrip("+").startswith(HYDRA_SETTINGS)]
    if unused:
        why = "has no effect on a run, which uses only hydra.run.dir and hydra.searchpath of Hydra's settings"
        raise ConfigError("\n".join(f"{override} {why}" for override in unused))
    try:
        overrides, composed, replaced = settled(overrides, partial(_compose, tree=tree))
    except INVALID_OVERRIDE as error:
        problems, others, rejected = diagnose(list(overrides), partial(_compose, tree=tree), error)
        # ``others`` has the default in place of a rejected group, so problems with that group would mislead.
        about = re.compile(rf"\b({'|'.join(rejected)})=" if rejected else "(?!)")
        problems += [problem for problem in _problems_of(others, ranks, per_node) if not about.search(problem)]
        raise ConfigError("\n".join(problems)) from None
    if replaced:
        LOGGER.warning("%s", replaced)
    # A resumed run stays in its directory unless another one is given.
    stays = checked and not any(name_of(override) == "hydra.run.dir" for override in overrides)
    run_dir = _run_to_continue(composed) if stays else None
    return to_config(composed, run_dir=run_dir, ranks=ranks, per_node=per_node, checked=checked)


def _problems_of(composed: DictConfig | None, ranks: int | None, per_node: int | None) -> list[str]:
    """Return what is wrong with the values of a composed tree; nothing if ``composed`` is None."""
    try:
        if composed is not None:
            to_config(composed, ranks=ranks, per_node=per_node)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _own_parts(group: str) -> Iterator[str]:
    """Yield the names of wordrun's own parts in a config group; none if there is no such group."""
    if group in SECTIONS:
        yield from (name for name, part in schemas(group).items() if not part.origin)


def renamed(override: str) -> str:
    """Return ``override`` with an old option name replaced by the new one."""
    key, equals, value = override.partition("=")
    old = name_of(override)
    return f"{key.replace(old, OLDER.get(old, old))}{equals}{value}"


def _run_to_continue(composed: DictConfig) -> str | None:
    """Return the directory of the run that train.resume points to, if any."""
    source = composed.train.resume
    if source in (None, "auto"):
        return None
    if str(source).lower() == "true":
        raise ConfigError(
            "train.resume=true does not name a run: use train.resume=outputs/latest for the newest run, or "
            "train.resume=auto for the newest checkpoint in hydra.run.dir"
        )
    try:
        run_dir, checkpoint = locate(Path(source))
    except ConfigError as error:
        raise ConfigError(f"train.resume={source}: {error}") from None
    # A checkpoint copied elsewhere belongs to no run and starts a new one.
    return str(run_dir) if checkpoint is None or checkpoint.parent == run_dir / CHECKPOINTS else None


def to_config(
    composed: DictConfig,
    *,
    run_dir: str | None = None,
    ranks: int | None = None,
    per_node: int | None = None,
    checked: bool = True,
) -> Config:
    """Return the Config of a composed tree, validated if ``checked``; ``run_dir`` defaults to ``hydra.run.dir``.

    Raises:
        ConfigError: if there are unknown keys or invalid values; the message names all of them.
    """
    hydra_sources.replace_marks(composed)
    problems = list(_undeclared(composed))
    if composed.get("run_dir"):
        problems.append(f"run_dir={composed.run_dir} cannot be set directly: use hydra.run.dir={composed.run_dir}")
    try:
        directory = run_dir or str(composed.hydra.run.dir or "")
        if not directory:  # would be the current directory
            problems.append("hydra.run.dir is empty: set a directory, or omit the option")
        with open_dict(composed):
            composed.pop("hydra", None)  # in a sweep, Hydra has already removed it
        cfg = OmegaConf.to_object(composed)
        assert isinstance(cfg, Config)
        problems += _too_large(parts_in(cfg))
        cfg = with_accumulation(replace(cfg, run_dir=directory, secrets=dict(_secrets(composed))))
        if checked:
            check(cfg, ranks, per_node)
        if not problems:
            return _without_old_values(cfg)
    except ConfigError as error:
        problems += str(error).splitlines()
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key or 'config'}: {first_line(error)}")
    raise ConfigError("\n".join(problems))


def _too_large(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield a message for each whole number in options, or a container of them, that no library can take."""
    if isinstance(values, int) and (problem := too_large(prefix, values)):
        yield problem
    entries = vars(values) if isinstance(values, Section) else values
    for name, each in entries.items() if isinstance(entries, dict) else ():
        yield from _too_large(each, f"{prefix}.{name}" if prefix else name)
    for each in entries if isinstance(entries, list) else ():
        yield from _too_large(each, prefix)


def _secrets(composed: DictConfig) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each option whose value has that of a secret environment variable, and how it is written.

    Such an option interpolates the variable, or another option that does. A URL with a login is secret as a whole.
    """
    written = OmegaConf.to_container(composed)
    names = set(re.findall(r"\$\{oc\.env:\s*['\"]?(\w+)", str(written)))
    values = [os.environ[name] for name in names if is_secret(name, os.environ.get(name, "")) and os.environ.get(name)]

    def walk(written: Any, value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(written, dict):
            for name, each in written.items():
                yield from walk(each, value[name], (*path, name))
        elif "${" in str(written) and (has_login(str(value)) or any(secret in str(value) for secret in values)):
            yield path, written

    if names:
        yield from walk(written, OmegaConf.to_container(composed, resolve=True), ())


def _without_old_values(cfg: Config) -> Config:
    """Return ``cfg`` with wordrun's values in place of nanoGPT's."""
    if not cfg.optimizer.decay_lr:
        LOGGER.warning("optimizer.decay_lr=false means schedule=constant")
        cfg = replace(cfg, schedule=ScheduleConfig("constant"))
    return replace(cfg, train=replace(cfg.train, dtype=DTYPES.get(cfg.train.dtype, cfg.train.dtype)))


def register() -> None:
    """Register with Hydra the schemas, the parts, and an alias group: ``train.backend=NAME`` selects a backend.

    Raises:
        ConfigError: parts from outside wordrun cannot be registered.
    """
    # A sweep's config keeps its ID, which all of its points share.
    for name, is_kept in (("run_id", False), ("sweep_id", True)):
        OmegaConf.register_new_resolver(
            name, lambda: os.environ.get("WORDRUN_RUN_ID") or new_run_id(), replace=True, use_cache=is_kept
        )
    OmegaConf.register_new_resolver("data_home", data_home, replace=True)
    OmegaConf.register_new_resolver("by_width", by_width, replace=True)
    OmegaConf.register_new_resolver("with_muon", with_muon, replace=True)
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # once only: storing takes a seventh of the time of composing
        # The base class: Hydra merges the options of any tokenizer into it, but not into those of tokenizer=char.
        store.store(name="schema", node=Config(tokenizer=TokenizerConfig()))
    hydra_sources.register()
    stored = {name.removesuffix(".yaml") for name in store.repo.get("train.backend", ())}
    for backend in backends():
        content = {"defaults": [{"/backend": backend.lower()}, "_self_"], "train": {"backend": backend}}
        for spelling in {backend, backend.lower()} - stored:
            store.store(group="train.backend", name=spelling, package="_global_", node=content)


def by_width(rate: float, otherwise: float, *, _root_: DictConfig) -> float:
    """Return ``rate``, meant for n_embd=768, scaled to the model's width; ``otherwise`` if the model does not scale."""
    model = OmegaConf.to_object(_root_.model)
    factor = model.rate_factor() if isinstance(model, ModelConfig) else None
    return otherwise if factor is None else rate * factor


def with_muon(*, _root_: DictConfig) -> bool:
    """Return whether the optimizer is Muon."""
    options: Any = OmegaConf.get_type(_root_.optimizer)
    return issubclass(options, MuonConfig)


def data_home() -> str:
    """Return the data set directory: ``$WORDRUN_DATA_HOME``, or the user's cache."""
    return os.environ.get("WORDRUN_DATA_HOME") or os.path.expanduser("~/.cache/wordrun")


def _compose(overrides: list[str], tree: Tree) -> DictConfig:
    """Return what Hydra composes.

    Raises:
        Exception: one of INVALID_OVERRIDE; an override is invalid.
    """
    register()
    overrides = as_typed(searched(overrides, tree.extra_dir), OmegaConf.create())
    try:
        composed = _compose_once(overrides, tree)
        if (implied := _implied(composed)) and not any(name_of(override) == "tokenizer" for override in overrides):
            overrides = [*implied, *overrides]
            composed = _compose_once(overrides, tree)
    except INVALID_OVERRIDE:  # also of 1e3 for an option of type int | str, if nothing else is wrong
        others = [override for override in overrides if not VALUE.fullmatch(override)]
        if others == overrides or (quoted := as_typed(overrides, _compose_once(others, tree))) == overrides:
            raise
        return _compose_once(quoted, tree)
    # Only the composed tree has the types of the options.
    quoted = as_typed(overrides, composed)
    return composed if quoted == overrides else _compose_once(quoted, tree)


def _implied(composed: DictConfig) -> tuple[str, ...]:
    """Return the overrides that the model in ``composed`` implies, unless a tokenizer is chosen."""
    return getattr(OmegaConf.get_type(composed, "model"), "implies", ())


def _compose_once(overrides: list[str], tree: Tree) -> DictConfig:
    with hydra_sources.all_problems():
        backup = GlobalHydra.instance().hydra  # the caller may itself be a Hydra application
        GlobalHydra.instance().clear()
        start = (
            hydra.initialize_config_dir(os.path.abspath(tree.path), version_base="1.3")
            if tree.path
            else hydra.initialize_config_module("wordrun.conf", version_base="1.3")
        )
        try:
            with start:
                composed = hydra.compose(tree.name, overrides, return_hydra_config=True)
                hydra_sources.replace_marks(composed)
                return composed
        finally:
            GlobalHydra.instance().hydra = backup


def typed(overrides: Sequence[str], point: Sequence[str], tree: Tree) -> list[str]:
    """Return the ``overrides`` of a sweep as Hydra reads them without loss; ``point``: those of its first point.

    What the first point needs instead of the default model and optimizer replaces them in all points.
    """
    words, composed, _ = settled(point, partial(_compose, tree=tree))
    kept = [override for override in overrides if override in words or override not in point]
    added = [word for word in words if word not in point]
    return as_typed(searched([*added, *kept], tree.extra_dir), composed)


def searched(overrides: Sequence[str], extra_dir: str | None) -> list[str]:
    """Return ``overrides`` with one search path, in which wordrun rather than Hydra reads the files of folders.

    Hydra would lose what is written for options of type str.
    """
    own = [override for override in overrides if name_of(override) == "hydra.searchpath"]
    folders: list[Any] = []
    try:
        for override in own[-1:]:
            value: Any = OverridesParser.create().parse_override(override).value()
            folders += value
    except (HydraException, TypeError):  # reported by Hydra
        return list(overrides)
    folders += [os.path.abspath(extra_dir)] if extra_dir else []
    if not folders:
        return list(overrides)
    path = [QuotedString(hydra_sources.read_by_wordrun(folder), Quote.double) for folder in folders]
    return [f"hydra.searchpath={Transformer.str(path)}", *(each for each in overrides if each not in own)]


def _undeclared(composed: DictConfig) -> Iterator[str]:
    """Yield a message for each key that no dataclass declares.

    Hydra accepts ``+train.typo=1`` even on a typed config, and would ignore the value.
    """
    known = sorted(option_names(composed))

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        cls = OmegaConf.get_type(node)
        declared = {f.name for f in fields(cls)} if is_dataclass(cls) else None
        for key in node:
            name = f"{prefix}{key!s}"
            unset = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, str(key))
            if declared is not None and key not in declared and name != "hydra":
                yield unknown_option(name, known)
            elif name != "hydra" and not unset and isinstance(node[key], DictConfig):
                yield from walk(node[key], f"{name}.")

    yield from walk(composed, "")


def shown(overrides: Sequence[str], tree: Tree, package: str | None, *, resolve: bool) -> str:
    """Return the composed tree, or the ``package`` of it, as Hydra's --cfg job prints it."""
    composed = settled([renamed(override) for override in overrides], partial(_compose, tree=tree)).composed
    HydraConfig.instance().set_config(composed)
    with open_dict(composed):
        composed.pop("hydra")
    part = OmegaConf.select(composed, package) if package not in (None, "_global_") else composed
    if part is None:
        raise ConfigError(f"--package {package}: the config has none")
    if not OmegaConf.is_config(part):
        return f"{part}\n"
    header = f"# @package {package}\n" if part is not composed else ""
    return header + OmegaConf.to_yaml(part, resolve=resolve)


def as_yaml(cfg: Config) -> str:
    """Return ``cfg`` as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(as_dict(cfg)))  # from the dataclass itself it takes twice as long
