"""Chat templates: conversations as text, with the same result as ``transformers.apply_chat_template``.

A template is a Jinja template of ``messages``, ``tools`` and the names of special tokens. What the assistant writes has
a loss. Some templates mark this text with ``{% generation %}``. For others, an assistant's turn begins where the
conversation before it, with the header of the next turn, ends, and ends with the template's token for that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wordrun.common.errors import ConfigError, first_line
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers.base import CUT, Span, Tokenizer

Message = Mapping[str, Any]
OPEN, CLOSE = "\U0010fffe", "\U0010ffff"
"""Characters around the text of ``{% generation %}``. Like ``CUT``, they are noncharacters of Unicode: in no text."""
NONE = str.maketrans("", "", OPEN + CLOSE + CUT)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""data.template=chatml."""
IM_END = "<|im_end|>"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning; transformers passes the text of one under the first two names."""
PROBE = "\u2605"
"""The answer in a conversation that shows how the template ends one."""


class ChatTemplate:
    """Writes conversations as text.

    Args:
        source: the Jinja template.
        names: special tokens by their names in the template, such as bos_token.
        specials: all special tokens of the tokenizer. What is written in a message like one of them stays text.

    Raises:
        ConfigError: it is not a Jinja template.
    """

    def __init__(self, source: str, names: Mapping[str, str], specials: Sequence[str]) -> None:
        self.source, self.names, self.specials = source, names, specials
        self._special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"data.template is not a Jinja template: {first_line(error)}") from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, ask: bool = False) -> str:
        """Return the text of a conversation; ``ask`` adds the header of the assistant's next turn.

        Raises:
            TemplateRefusalError: the template does not accept the conversation.
        """
        return self._marked(self._safe(messages), tools, ask=ask).replace(OPEN, "").replace(CLOSE, "")

    def turns(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where the assistant's turns are in it, with the token that ends each.

        Raises:
            TemplateRefusalError: the template does not accept the conversation, or writes the beginning of it in
                another way if it goes on.
        """
        messages = self._safe(messages)
        text = self._marked(messages, tools)
        if OPEN in text:
            return _unmarked(text)
        asked = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [len(self._prefix(text, messages[:i], tools, ask=True)) for i in asked]
        spans = []
        for i, begin, limit in zip(asked, begins, [*begins[1:], len(text)], strict=True):
            end = text.find(self.end, begin, limit) + len(self.end) if self.end else 0
            if end < begin + len(self.end):
                end = len(self._prefix(text, messages[: i + 1], tools))
            spans.append((begin, end))
        return text, spans

    @cached_property
    def end(self) -> str:
        """The special token that ends an assistant's turn; empty: none does."""
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}])
        except TemplateRefusalError:
            return ""
        found = self._special.search(text, text.rfind(PROBE))
        return found[0] if found else ""

    def stops(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that end an answer: those of the model, and the one with which the template ends a turn."""
        end = tokenizer.encode_spans(self.end, ())[0].tolist()
        return list(dict.fromkeys([*tokenizer.stops, *(end if len(end) == 1 else [])]))

    def _prefix(self, text: str, messages: Sequence[Message], tools: Any, *, ask: bool = False) -> str:
        """Return the text of the first messages of a conversation, checking that ``text``, that of all, begins so."""
        if not messages:
            raise TemplateRefusalError("the conversation begins with an assistant's turn")
        prefix = self._marked(messages, tools, ask=ask)
        if not text.startswith(prefix):
            last = "what precedes an assistant's turn" if ask else "an assistant's turn"
            raise TemplateRefusalError(
                f"the template formats {last} differently when the conversation continues, so the text "
                "with a loss is unknown: mark it with {% generation %} in data.template=FILE"
            )
        return prefix

    def _safe(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages with a ``CUT`` in everything that looks like a special token."""
        safe = _each_text(
            messages,
            lambda text: self._special.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text.translate(NONE)),
        )
        for message in safe:
            reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
            if reasoning is not None:
                message |= {"thinking": reasoning, **message, "reasoning_content": reasoning}
        return safe  # type: ignore[no-any-return]

    def _marked(self, messages: Sequence[Message], tools: Any, *, ask: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=ask, **self.names
            )
        except Exception as error:  # a template may do anything
            raise TemplateRefusalError(f"the template rejects the conversation: {first_line(error)}") from None


class TemplateRefusalError(ConfigError):
    """A template does not accept a conversation."""


def template_of(data: TextConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of data.kind=chat.

    Raises:
        ConfigError: the tokenizer has none, or the file cannot be read.
    """
    names, specials = dict(tokenizer.chat.get("names", {})), tokenizer.specials()
    if data.template == "tokenizer":
        if "template" not in tokenizer.chat:
            raise ConfigError(
                f"tokenizer={tokenizer.kind} has no chat template (chat_template.jinja or tokenizer_config.json beside "
                "tokenizer.json): use data.template=chatml, or data.template=FILE with a Jinja template",
                page="finetune.md#conversations",
            )
        return ChatTemplate(tokenizer.chat["template"], names, specials)
    source = template_source(data)
    if data.template == "chatml" and IM_END not in specials and tokenizer.eot is not None:
        source = source.replace(IM_END, tokenizer.eot_text)
    return ChatTemplate(source, names, specials)


def template_source(data: TextConfig) -> str:
    """Return the template that data.template names, if it is not the tokenizer's: chatml, or the content of a file."""
    if data.template in ("chatml", "tokenizer"):
        return CHATML if data.template == "chatml" else ""
    try:
        return Path(data.template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.template={data.template} cannot be read ({first_line(error)}): use tokenizer (its own chat "
            "template), chatml, or a file with a Jinja template"
        ) from None


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Return ``text`` without marks, and the spans between them."""
    spans, at, clean = [], 0, ""
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            at = len(clean)
        elif piece == CLOSE:
            spans.append((at, len(clean)))
        else:
            clean += piece
    return clean, [(start, stop) for start, stop in spans if start < stop]


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON values with all texts changed, also those inside."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_text(each, change) for key, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list | tuple) else value


class _Generation(Extension):
    """The tag ``{% generation %}``."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:
        """Return the block as a call of ``_marked``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja with what transformers offers to templates."""
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    found.filters["tojson"] = _json
    found.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return found


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
