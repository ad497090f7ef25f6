"""Prompts and answers in .jsonl files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from wordrun.common.errors import ConfigError
from wordrun.data.prepare.sources.base import Document, WorkItem, cleaned
from wordrun.data.prepare.sources.files import FileSource, field, lines


class PairSource(FileSource):
    """The .jsonl files given by data.path, with a prompt and an answer on each line."""

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the prompt and the answer of each pair in turn, with the text of data.template around them."""
        if item.kind not in ("jsonl", "packed"):
            raise ConfigError(
                f"data.path={item.path} is not a .jsonl file, which data.kind=pairs needs", page="finetune.md#fine-tune"
            )
        for line, where in lines(item):
            prompt = field(line, self.data.prompt_key, where, "data.prompt_key")
            answer = field(line, self.data.answer_key, where, "data.answer_key")
            if not answer:
                raise ConfigError(f"{where} has an empty answer: remove the line")
            before, after = self.data.turn(prompt)
            texts = [*cleaned([before]), *(replace(document, answers=True) for document in cleaned([answer + after]))]
            yield from (replace(document, begins=number == 0) for number, document in enumerate(texts))
