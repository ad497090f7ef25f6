"""Options of type str hold what was written for them, although Hydra and YAML read 1e5 and 007 as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from antlr4 import CommonTokenStream, InputStream  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString, Transformer
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf import DictConfig, OmegaConf

from wordrun.common.section import field_types

NUMBER = re.compile(r"\d|true|false|inf|nan", re.IGNORECASE)
"""What every number and every truth value of Hydra's grammar contains."""
GROUP = str | list[str]
"""What chooses files, such as experiment=007."""
FUNCTIONS = ("choice", "shuffle", "tag", "str")
"""Functions of Hydra's grammar whose arguments become values; those of range and sort are numbers."""


def chosen(value: Any, text: str, kind: Any) -> Any:
    """Return what an option of type ``kind`` gets where ``text`` was written, which was read as ``value``."""
    kinds = _alternatives(kind)
    is_meant = type(value) in kinds and (type(value) is not int or str(value) == text)
    return text if str in kinds and not is_meant else value


def as_typed(overrides: Sequence[str], composed: DictConfig) -> list[str]:
    """Return ``overrides`` with quotes around numbers and truth values for options of type str.

    Args:
        overrides: also those of a sweep.
        composed: has the types of the options.
    """
    return [_as_typed(override, composed) if NUMBER.search(override) else override for override in overrides]


def _as_typed(override: str, composed: DictConfig) -> str:
    key, equals, _ = override.partition("=")
    try:
        plain, texts = _parsed(override, as_text=False), _parsed(override, as_text=True)
    except HydraException:  # reported by Hydra, which parses it again
        return override
    if not equals or (plain == texts and not isinstance(plain, ChoiceSweep)):
        return override
    new = _merged(plain, texts, _kind(composed, key.lstrip("+").partition("@")[0]))
    return override if new == plain else f"{key}={_written(new)}"


@lru_cache
def _parsed(override: str, *, as_text: bool) -> Any:
    """Return the value of an override, with the text of each number in quotes if ``as_text``."""
    stream = CommonTokenStream(_listening(OverrideLexer(InputStream(override))))
    visitor = _Visitor(as_text)
    visitor.visit(_listening(OverrideParser(stream)).override())
    return visitor.value


def _listening(recognizer: Any) -> Any:
    recognizer.removeErrorListeners()
    recognizer.addErrorListener(HydraErrorListener())
    return recognizer


class _Visitor(HydraOverrideVisitor):
    """Keeps an override's value as Hydra's parser makes it, or with texts in place of numbers."""

    def __init__(self, as_text: bool) -> None:
        super().__init__(create_functions())
        self.as_text = as_text
        self.value: Any = None

    def visitValue(self, ctx: Any) -> Any:  # noqa: N802
        """Return and keep the value."""
        self.value = super().visitValue(ctx)
        return self.value

    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802
        """Return a number, or what was written for it."""
        value, text = super().visitPrimitive(ctx), ctx.getText().strip()
        is_lossy = self.as_text and isinstance(value, int | float) and str(value) != text
        return QuotedString(text, Quote.double) if is_lossy else value

    def visitFunction(self, ctx: Any) -> Any:  # noqa: N802
        """Return the value of a function."""
        outside = self.as_text
        self.as_text = outside and ctx.getChild(0).getText() in FUNCTIONS
        try:
            return super().visitFunction(ctx)
        finally:
            self.as_text = outside


def _merged(plain: Any, texts: Any, kind: Any) -> Any:
    """Return ``plain`` with the ``texts`` of numbers where the type ``kind`` has a str."""
    if isinstance(plain, ChoiceSweep) and isinstance(texts, ChoiceSweep):
        values = [_merged(*pair, kind) for pair in zip(plain.list, texts.list, strict=True)]
        return ChoiceSweep(plain.tags, values, plain.simple_form, plain.shuffle)
    if isinstance(plain, list):
        return [_merged(*pair, inside(kind, None)) for pair in zip(plain, texts, strict=True)]
    if isinstance(plain, dict):
        return {name: _merged(value, texts[name], inside(kind, name)) for name, value in plain.items()}
    if isinstance(plain, QuotedString) or not isinstance(texts, QuotedString | str):
        return plain
    # Hydra's functions take quotes away, also those that were written.
    text = texts if isinstance(texts, QuotedString) else QuotedString(texts, Quote.double)
    is_text = str in _alternatives(kind) if isinstance(plain, str) else chosen(plain, text.text, kind) is text.text
    return text if is_text and NUMBER.search(text.text) else plain


def _written(value: Any) -> str:
    """Return ``value`` in Hydra's syntax."""
    if not isinstance(value, ChoiceSweep):
        return Transformer.str(value)
    text = ",".join(map(Transformer.str, value.list))
    if value.simple_form and not (value.tags or value.shuffle):
        return text
    text = f"shuffle(choice({text}))" if value.shuffle else f"choice({text})"
    return f"tag({','.join(sorted(value.tags))},{text})" if value.tags else text


def _kind(composed: DictConfig, key: str) -> Any:
    """Return the type of the option ``key``; Any if it is not known."""
    if "." not in key or key == "train.backend" or "/" in key:
        return GROUP
    try:
        node, outer = OmegaConf.select(composed, key), OmegaConf.select(composed, key.rpartition(".")[0])
    except Exception:  # such as an interpolation that cannot be resolved
        return Any
    of_node, of_outer = (OmegaConf.get_type(each) if OmegaConf.is_dict(each) else None for each in (node, outer))
    if is_dataclass(of_node):
        return of_node
    outside, _, name = key.rpartition(".")
    return inside(of_outer if is_dataclass(of_outer) or "." not in outside else _kind(composed, outside), name)


def inside(kind: Any, name: Any) -> Any:
    """Return the type of ``name`` in a dataclass or a dictionary of type ``kind``, or of the elements of a list."""
    for each in _alternatives(kind):
        if get_origin(each) in (dict, list):
            return get_args(each)[-1]
        if is_dataclass(each):
            try:
                return field_types(each).get(name, Any)  # type: ignore[arg-type]
            except NameError:  # a type that only a type checker knows
                return Any
    return Any


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
