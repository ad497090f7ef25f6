"""Composes the tree of config files, using Hydra, which takes 0.1 s; what it chose is kept for the next composition.

Sweeps, studies and the search for wrong overrides compose many configs that differ in a few values. Hydra composes the
first of them; for the others, the values are changed in a copy, which takes a tenth of the time.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import pickle
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from wordrun import project
from wordrun.registry import KINDS, parts

CHOICE = re.compile(r"(?!hydra=)(\w+|train\.backend)=[^$]*")
"""An override that chooses files, such as ``model=gpt2``."""
VALUE = re.compile(r"(?!hydra\.(?!run\.dir=)|train\.backend=)\w+(\.\w+)+=[^$]*", re.DOTALL)
"""One that changes a value, and refers to no other value, since its place among the overrides would matter."""


_HYDRA = threading.RLock()
"""Held while Hydra composes: its state is that of the whole process."""


@dataclass(frozen=True)
class Tree:
    """The root of the configuration tree; Hydra's --config-path, --config-name and --config-dir change it."""

    name: str = "config"
    path: str | None = None
    extra_dir: str | None = None


def composed_tree(overrides: Sequence[str], tree: Tree) -> DictConfig:
    """Return the tree with ``overrides``; below ``hydra``, it may lack a record of those that only change a value.

    Raises:
        HydraException, OmegaConfBaseException, TypeError, ValueError, YAMLError: an override is invalid.
    """
    chosen = tuple(override for override in overrides if CHOICE.fullmatch(override))
    values = [override for override in overrides if VALUE.fullmatch(override)]
    if len(chosen) + len(values) < len(overrides) or not _only_own(tree):
        return _by_hydra(overrides, tree)
    try:
        with _HYDRA:  # who waits here for another thread may need the same tree
            kept = _kept(chosen, tree, _changed())
        cfg: DictConfig = pickle.loads(kept)
        OmegaConf.update(cfg, "hydra.runtime.cwd", os.getcwd())  # nothing else depends on it
        for value in OverridesParser.create().parse_overrides(values):
            if value.is_sweep_override():
                return _by_hydra(overrides, tree)
            OmegaConf.update(cfg, value.key_or_group, value.value(), merge=True)
    except Exception:
        if not values:  # Hydra would say the same again
            raise
        # For the error that names the override.
        return _by_hydra(overrides, tree)
    return cfg


def _only_own(tree: Tree) -> bool:
    """Return whether all files and parts are wordrun's own: others may change from one composition to the next."""
    foreign = (part for kind in KINDS for part in parts(kind).values() if part.origin)
    return tree == Tree() and project.here().conf is None and not any(foreign)


def _changed() -> int:
    """Return when a config file has last changed, since one edits them in a checkout [ns]."""
    files = Path(str(importlib.resources.files("wordrun.conf"))).glob("*/*.yaml")
    return max((file.stat().st_mtime_ns for file in files), default=0)


@functools.lru_cache(maxsize=256)
def _kept(chosen: tuple[str, ...], tree: Tree, changed: int) -> bytes:
    return pickle.dumps(_by_hydra(chosen, tree))


def _by_hydra(overrides: Sequence[str], tree: Tree) -> DictConfig:
    extra = [f"hydra.searchpath=[file://{os.path.abspath(tree.extra_dir)}]"] if tree.extra_dir else []
    with _HYDRA:
        backup = GlobalHydra.instance().hydra  # the caller may itself be a Hydra application
        GlobalHydra.instance().clear()
        start = (
            hydra.initialize_config_dir(os.path.abspath(tree.path), version_base="1.3")
            if tree.path
            else hydra.initialize_config_module("wordrun.conf", version_base="1.3")
        )
        try:
            with start:
                return hydra.compose(tree.name, [*extra, *overrides], return_hydra_config=True)
        finally:
            GlobalHydra.instance().hydra = backup
