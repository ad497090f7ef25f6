"""Prompts and answers in rows of files: .jsonl, .json, .csv and .parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from wordrun.common.errors import ConfigError, nearest
from wordrun.data.contents import ROWS
from wordrun.data.prepare.sources.base import BadRowError, Document, WorkItem, required
from wordrun.data.prepare.sources.files import FileSource, Row, field, rows

LOOKED_AT = 100
"""Number of first rows in which each field of data.template must occur at least once."""


class PairSource(FileSource):
    """The files given by data.path, with a prompt and an answer in each row."""

    def items(self) -> list[WorkItem]:
        """Return the work items of the files.

        Raises:
            ConfigError: a file has no rows, or its first rows lack a field of data.template.
        """
        items = super().items()
        for item in items:
            if item.kind not in ROWS:
                raise ConfigError(
                    f"data.path={item.path} is not a .jsonl file or another one with rows (.json, .csv, .parquet), "
                    "which data.kind=pairs needs",
                    page="finetune.md#fine-tune",
                )
        if names := self.data.other_fields():
            self._check_fields(items[0], names)
        return items

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the prompt and the answer of each pair in turn, with the text of data.template around them."""
        for row, where in rows(item):
            try:
                yield from self._pair(row, where)
            except BadRowError as error:
                yield error.as_document()

    def _pair(self, row: Row, where: str) -> list[Document]:
        prompt = field(row, self.data.prompt_key, where, "data.prompt_key", may_be_empty=True)
        answer = field(row, self.data.answer_key, where, "data.answer_key")
        before, after = self.data.turn(prompt, partial(_text_of, row, where))
        texts = [Document(required(before, where, "prompt"))] if before else []
        texts.append(Document(required(answer + after, where, "answer"), answers=True))
        return [replace(document, begins=number == 0) for number, document in enumerate(texts)]

    def _check_fields(self, item: WorkItem, names: list[str]) -> None:
        """Raise a ConfigError if none of the first lines of ``item`` has one of the fields ``names``."""
        missing, known = names, set[str]()
        for row, _ in islice(rows(item), LOOKED_AT):
            if not isinstance(row, BadRowError):
                missing = [name for name in missing if _value(row, name) is None]
                known |= {*row}
        if missing and known:
            raise ConfigError(
                f"data.template={self.data.template!r}: no line of {item.path} has the field "
                f"{' or '.join(f'{name}{nearest(name, known)}' for name in missing)} (the fields are "
                f"{', '.join(sorted(known))}; write {{{{ and }}}} for braces that are text)",
                page="finetune.md#fine-tune",
            )


def _value(row: Any, name: str) -> Any:
    """Return the value of the field ``name`` of a line; NAME.KEY stands for KEY in the field NAME. None: no value."""
    if isinstance(row, dict) and name in row:
        return row[name]
    key, dot, rest = name.partition(".")
    if isinstance(row, list):
        inner = row[int(key)] if key.isdecimal() and int(key) < len(row) else None
        return _value(inner, rest) if dot else inner
    return _value(row[key], rest) if dot and isinstance(row, dict) and key in row else None


def _text_of(row: Any, where: str, name: str) -> str:
    """Return the text of the field ``name`` of a line; a number or a boolean is written as in JSON."""
    value = _value(row, name)
    if value is None:
        raise BadRowError("without a field", f"{where} lacks the field {name}, which data.template has")
    if isinstance(value, dict | list):
        keys = ", ".join(value) if isinstance(value, dict) else f"0 to {len(value) - 1}"
        raise ConfigError(
            f"{where} has no text in the field {name} of data.template: name one of its values, {{{name}.KEY}} ({keys})"
        )
    return value if isinstance(value, str) else json.dumps(value)
