"""The parts as a source of Hydra's config files: ``GROUP=NAME`` selects a part without a file of its own.

Hydra reads ``schema/GROUP/NAME``, the dataclass, which is imported then, and ``GROUP/NAME``, which puts it into the
config. Files under conf/ come first, so one of the same name can add presets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wordrun.common.errors import ConfigError, first_line
from wordrun.config import project
from wordrun.config.registry import KINDS, Part
from wordrun.config.schema import SECTIONS, SEVERAL, schemas

SCHEMA = "schema"
"""The folder of the dataclasses."""
_problems: list[str] | None = None
"""What is wrong with the parts read so far; None: the first problem is raised."""


@contextlib.contextmanager
def all_problems() -> Iterator[None]:
    """Within the ``with`` block, in which configs are composed, collect what is wrong with all of their parts.

    Raises:
        ConfigError: there are problems; the message names all of them.
    """
    global _problems
    outer, found = _problems, list[str]()
    _problems = found
    try:
        yield
    except Exception:
        if not found:  # else whatever Hydra says follows from them
            raise
    finally:
        _problems = outer
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))


class SearchPath(SearchPathPlugin):
    """Adds the project's conf/ and the parts to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add both, after wordrun's own files."""
        if folder := project.here().conf:
            search_path.append("project", f"file://{folder}")
        search_path.append("parts", f"{PartSource.scheme()}://")


class PartSource(ConfigSource):
    """Offers every registered part."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix of this source's address."""
        return "parts"

    def available(self) -> bool:
        """Return True: there are always parts."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return what Hydra reads under ``config_path``.

        Raises:
            ConfigError: the part cannot be imported, or its options are not valid.
        """
        *folders, group, name = config_path.removesuffix(".yaml").split("/")
        part = schemas(group)[name]
        try:
            content = _schema(part) if folders else OmegaConf.create(_option(group, name, part))
        except ConfigError as error:
            if _problems is None:
                raise
            _problems.append(str(error))
            content = OmegaConf.create()
        return ConfigResult(provider=self.provider, path=self.full_path(), config=content, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        """Return whether there are configs below ``config_path``."""
        folders = _folders(config_path)
        return folders in ([], [SCHEMA]) or (len(folders) < 3 and bool(self.list(config_path, ObjectType.CONFIG)))

    def is_config(self, config_path: str) -> bool:
        """Return whether ``config_path`` names a part, or the schema of one."""
        *folders, name = _folders(config_path)
        return bool(folders) and name in self.list("/".join(folders), ObjectType.CONFIG)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names below ``config_path``."""
        *folders, group = _folders(config_path) or [""]
        if folders in ([], [SCHEMA]) and group in (SECTIONS if folders else KINDS):
            return sorted(schemas(group)) if results_filter != ObjectType.GROUP else []
        inside = {"": [*KINDS, SCHEMA], SCHEMA: list(SECTIONS)}.get(group, []) if not folders else []
        return inside if results_filter != ObjectType.CONFIG else []


def _folders(config_path: str) -> list[str]:
    return [each for each in config_path.removesuffix(".yaml").split("/") if each]


def _option(kind: str, name: str, part: Part) -> dict[str, Any]:
    """Return a part with its defaults, under its name if the config can have several of its kind."""
    if kind in SEVERAL:
        return {"defaults": [f"/{SCHEMA}/{kind}/{name}@{name}"]}
    keys = ("name", "kind") if kind == "data" else ("name",)
    return {"defaults": [f"/{SCHEMA}/{kind}/{name}@_here_"], **dict.fromkeys(keys, part.name or name)}


def _schema(part: Part) -> DictConfig:
    """Return the dataclass with dictionaries that accept new keys, unlike the rest of the tree."""
    try:
        schema: DictConfig = OmegaConf.structured(part.options)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{part}: {error.full_key or 'options'}: {first_line(error)}") from None
    for value in schema.values():
        if isinstance(value, DictConfig):
            OmegaConf.set_struct(value, False)
    return schema
