"""Conversations, or prompts and answers, in rows of files: .jsonl, .json, .csv and .parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.data.chat_template import CHATML, ChatTemplate, TemplateRefusalError, template_of, template_source
from wordrun.data.contents import ROWS
from wordrun.data.prepare.sources.base import BadRowError, Document, WorkItem, required
from wordrun.data.prepare.sources.files import FileSource, Row, field, rows
from wordrun.data.tokenizers.base import Tokenizer

LOOKED_AT = 100
"""Number of first rows in which each field of data.template must occur at least once, and which show the form of rows.
"""
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "ipython"), "tool"),
}
"""OpenAI's roles, and those of ShareGPT's conversations, by OpenAI's names."""
Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatSource(FileSource):
    """The files given by data.path, with a conversation, or with a prompt and an answer, in each row."""

    template: ChatTemplate | None = None
    """The template of conversations; None: the tokenizer is not known yet."""

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
                    f"which data.kind={self.data.kind} needs",
                    page="finetune.md#fine-tune",
                )
        if self.data.kind == "pairs" and (names := self.data.other_fields()):
            self._check_fields(items[0], names)
        return items

    def files_read(self) -> str:
        """Return how many files of which types are read and, for conversations, the form of their first rows."""
        if self.data.kind == "pairs":
            return super().files_read()
        first = (row for row, _ in islice(rows(self.items()[0]), LOOKED_AT) if isinstance(row, dict))
        forms = dict.fromkeys(filter(None, map(_form, first)))
        return f"{super().files_read()}, conversations as {' and '.join(forms) or 'unknown fields'}"

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield each conversation as one text, or the prompt and the answer of each pair in turn."""
        for row, where in rows(item):
            try:
                yield from self._pair(row, where) if self.data.kind == "pairs" else self._conversation(row, where)
            except BadRowError as error:
                yield error.as_document()

    def with_tokenizer(self, tokenizer: Tokenizer) -> ChatSource:
        """Return the source with the template of conversations, which may be the tokenizer's."""
        return replace(self, template=template_of(self.data, tokenizer)) if self.data.kind == "chat" else self

    @cached_property
    def _written(self) -> ChatTemplate:
        """The template or, for a tokenizer that is yet to be built from the text, one with similar text."""
        return self.template or ChatTemplate(template_source(self.data) or CHATML, {}, [])

    def _conversation(self, row: Row, where: str) -> Iterator[Document]:
        messages, tools = conversation(row, where, self.data.prompt_key, self.data.answer_key)
        try:
            text, spans = self._written.turns(messages, tools)
        except TemplateRefusalError as error:
            raise BadRowError("rejected by the template", f"{where}: {error}") from None
        if not spans:
            raise BadRowError("without a trained token", f"{where} has no text in the template's assistant turns")
        yield Document(text, spans=tuple(spans))

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


def _form(row: Mapping[str, Any], prompt_key: str = "prompt", answer_key: str = "answer") -> str:
    """Return the form of a conversation by the keys of its row; empty: unknown."""
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            return key
    if "instruction" in row and "output" in row:
        return "instruction, input and output"
    answers = [key for key in (answer_key, "completion", "response") if key in row]
    return f"{prompt_key} and {answers[0]}" if prompt_key in row and answers else ""


def conversation(row: Row, where: str, prompt_key: str, answer_key: str) -> tuple[Conversation, list[Any] | None]:
    """Return the messages of a row in OpenAI's form, and its tools.

    Raises:
        BadRowError: it has no known form, or not what a conversation with answers consists of.
    """
    if isinstance(row, BadRowError):
        raise row
    form = _form(row, prompt_key, answer_key)
    if not form:
        raise BadRowError(
            "without a conversation",
            f"{where} has neither messages, conversations, instruction and output, nor {prompt_key} and {answer_key} "
            f"or completion, only the fields {', '.join(map(str, row))}",
        )
    if form in ("messages", "conversations"):
        given = list(row[form])
    elif "instruction" in row:
        asked = "\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
        given = [_message("user", asked), _message("assistant", row["output"])]
    else:
        prompt, answer = (row[key] for key in (prompt_key, form.rpartition(" ")[2]))
        given = [
            *(prompt if isinstance(prompt, list) else [_message("user", prompt)]),
            *(answer if isinstance(answer, list) else [_message("assistant", answer)]),
        ]
    if isinstance(row.get("system"), str) and row["system"]:
        given.insert(0, _message("system", row["system"]))
    messages = [_checked(message, number, where) for number, message in enumerate(given, start=1)]
    roles = [message["role"] for message in messages]
    if roles.count("system") > 1:
        raise BadRowError("with two system turns", f"{where} has {roles.count('system')} turns of the role system")
    if "assistant" not in roles:
        raise BadRowError("without an assistant's turn", f"{where} has no turn of the role assistant")
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except ValueError:
        raise BadRowError("with invalid tools", f"{where} has tools that are not valid JSON") from None
    return messages, tools or None


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _checked(message: Any, number: int, where: str) -> dict[str, Any]:
    """Return a turn in OpenAI's form; ShareGPT's has "from" and "value"."""
    turn = f"{where}, turn {number},"
    if not isinstance(message, dict):
        raise BadRowError("with an invalid turn", f"{turn} is a {type(message).__name__}, not an object")
    role, content = (message.get(key, message.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if role not in ROLES:
        raise BadRowError(
            "with an unknown role", f"{turn} has the role {role!r}{nearest(str(role), ROLES)}, not {', '.join(ROLES)}"
        )
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRowError("with content that is not text", f"{turn} has content that is not text")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    if ROLES[role] == "assistant" and not content and not calls:
        raise BadRowError("with an empty answer", f"{turn} is an empty answer")
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRowError("with content that is not text", f"{turn} has no text as content")
    kept = {key: value for key, value in message.items() if key not in ("from", "value") and value is not None}
    return {**kept, "role": ROLES[role], "content": required(content, where) if content else content}
