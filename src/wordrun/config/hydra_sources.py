"""Where Hydra finds configs: the user's files and the registered parts, as sources in Hydra's search path.

What is written for an option of type str is kept as it is written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wordrun.common.errors import ConfigError, first_line
from wordrun.config import project
from wordrun.config.messages import wrong_type
from wordrun.config.registry import KINDS, Part
from wordrun.config.schema import SECTIONS, SEVERAL, schemas
from wordrun.config.strings import chosen, inside

RESOLVER = "written"
MARK = re.compile(rf'\$\{{{RESOLVER}:"([^"]*)","([^"]*)"\}}')


class YamlFiles(ConfigSource):
    """A folder of config files.

    A file does not know the types of its options. So where YAML would change a scalar, as in 1e5, the composed tree has
    a mark, ${written:"1e5","experiment/NAME.yaml"}, until ``replace_marks``.
    """

    @staticmethod
    def scheme() -> str:
        """Return the prefix of this source's address."""
        return "yaml"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return what is in a file.

        Raises:
            ConfigError, YAMLError: it cannot be read, is not valid YAML, or is too large.
        """
        file = Path(self.path, self._normalize_file_name(config_path))
        texts = project.read_yaml(file, yaml.BaseLoader)
        content = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(content, dict):
            name = re.sub(r'["\\$]', "?", f"{file.parent.name}/{file.name}")
            # Hydra reads the defaults before there are types.
            content = {
                key: value if key == "defaults" else _marked(value, _text_of(texts, key), name)
                for key, value in content.items()
            }
        with file.open(encoding="utf-8") as stream:
            header = self._get_header_dict(stream.read(512))
        return ConfigResult(self.provider, f"file://{self.path}", OmegaConf.create(content), header)

    def available(self) -> bool:
        """Return whether there is such a folder."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Return whether ``config_path`` is a folder."""
        return os.path.isdir(os.path.join(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        """Return whether ``config_path`` is a file."""
        return os.path.isfile(os.path.join(self.path, self._normalize_file_name(config_path)))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names below ``config_path``."""
        found = list[str]()
        for name in os.listdir(os.path.join(self.path, config_path)):
            self._list_add_result(found, os.path.join(config_path, name), name, results_filter)
        return sorted({*found})


def _text_of(texts: Any, key: Any) -> Any:
    """Return what is written for ``key`` in a mapping, also by merging others (<<); None: not found."""
    if not isinstance(texts, dict) or str(key) in texts:
        return texts.get(str(key)) if isinstance(texts, dict) else None
    merged = texts.get("<<", [])
    found = (_text_of(each, key) for each in (merged if isinstance(merged, list) else [merged]))
    return next((each for each in found if each is not None), None)


def _marked(value: Any, text: Any, file: str) -> Any:
    """Return ``value`` with a mark where ``text`` was written, and is not its text."""
    if isinstance(value, dict):
        return {key: _marked(each, _text_of(text, key), file) for key, each in value.items()}
    if isinstance(value, list) and isinstance(text, list):
        return [_marked(each, own, file) for each, own in zip(value, text, strict=True)]
    is_lossy = isinstance(value, int | float) and isinstance(text, str) and str(value) != text
    return f'${{{RESOLVER}:"{text}","{file}"}}' if is_lossy else value


def register() -> None:
    """Register the sources with Hydra, and what a mark stands for before it is replaced, as in a sweep's folder."""
    OmegaConf.register_new_resolver(RESOLVER, lambda text, file: text, replace=True)
    for plugin in (PartSource, YamlFiles, SearchPath):
        Plugins.instance().register(plugin)


def replace_marks(composed: DictConfig) -> None:
    """Replace each mark by the text or by YAML's value, as the type of the option demands.

    Raises:
        ConfigError: an option has another type; the message names all that have.
    """
    problems = list[str]()

    def walk(values: Any, node: Any, prefix: str, kind: Any) -> None:
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            of_key = inside(kind, key)
            if isinstance(value, dict | list):
                own = OmegaConf.get_type(node[key])  # of a part's options, rather than of their base class
                walk(value, node[key], f"{prefix}{key}.", own if is_dataclass(own) else of_key)
            elif isinstance(value, str) and (mark := MARK.fullmatch(value)):
                try:
                    node[key] = chosen(OmegaConf.create(f"a: {mark[1]}").a, mark[1], of_key)
                except OmegaConfBaseException as error:
                    problems.append(f"in {mark[2]}: {wrong_type(f'{prefix}{key}', mark[1], error) or error}")

    walk(OmegaConf.to_container(composed), composed, "", OmegaConf.get_type(composed))
    if problems:
        raise ConfigError("\n".join(problems))


SCHEMA = "schema"
"""The folder of the dataclasses."""
_problems: ContextVar[list[str] | None] = ContextVar("problems", default=None)
"""Problems of the parts that Hydra has read within an ``all_problems`` block; None: outside such a block."""


@contextlib.contextmanager
def all_problems() -> Iterator[None]:
    """Collect what is wrong with the parts of the configs that are composed within the ``with`` block.

    Raises:
        ConfigError: there are problems; the message names all of them.
    """
    found = list[str]()
    outside = _problems.set(found)
    try:
        yield
    except Exception:
        if not found:  # otherwise Hydra's error is a consequence of these problems
            raise
    finally:
        _problems.reset(outside)
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))


def read_by_wordrun(folder: str) -> str:
    """Return the address under which ``YamlFiles`` reads a folder; other addresses stay."""
    folder = folder.removeprefix("file://")
    return folder if "://" in folder else f"{YamlFiles.scheme()}://{folder}"


class SearchPath(SearchPathPlugin):
    """Adds the project's conf/ and the parts to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add both, after wordrun's own files; let wordrun read the user's folders."""
        for each in search_path.get_path():
            each.path = read_by_wordrun(each.path)
        if folder := project.here().conf:
            search_path.append("project", read_by_wordrun(str(folder)))
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
            if (found := _problems.get()) is None:
                raise
            found.append(str(error))
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
    """Return the config that selects a part; if there can be several parts of its kind, it is keyed by its name."""
    if kind in SEVERAL:
        return {"defaults": [f"/{SCHEMA}/{kind}/{name}@{name}"]}
    keys = ("name", "kind") if kind == "data" else ("name",)
    return {"defaults": [f"/{SCHEMA}/{kind}/{name}@_here_"], **dict.fromkeys(keys, part.name or name)}


def _schema(part: Part) -> DictConfig:
    """Return the part's schema; its dictionaries accept new keys, unlike the rest of the tree."""
    try:
        schema: DictConfig = OmegaConf.structured(part.options)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{part}: {error.full_key or 'options'}: {first_line(error)}") from None
    for value in schema.values():
        if isinstance(value, DictConfig):
            OmegaConf.set_struct(value, False)
    return schema
