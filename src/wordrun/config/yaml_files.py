"""Reads the user's config files for Hydra: what is written for an option of type str is kept as it is written."""

from __future__ import annotations

import os
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wordrun.common.errors import ConfigError
from wordrun.config.messages import wrong_type
from wordrun.config.project import read_yaml
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
        texts = read_yaml(file, yaml.BaseLoader)
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
    """Register what a mark stands for before it is replaced, as in the name of a sweep's folder."""
    OmegaConf.register_new_resolver(RESOLVER, lambda text, file: text, replace=True)


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
