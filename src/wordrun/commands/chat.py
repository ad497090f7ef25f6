"""A conversation with a model on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wordrun.common import sigint
from wordrun.common.errors import ConfigError
from wordrun.data.options import TextConfig

if TYPE_CHECKING:
    from torch import Tensor

    from wordrun.data.chat_template import ChatTemplate
    from wordrun.data.tokenizers.base import Tokenizer

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
Continue = Callable[..., "Tensor"]
"""Returns its first argument, tokens (1, T), followed by generated tokens; see ``wordrun.model.generate.generate``."""


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# An incomplete UTF-8 character has at most 3 bytes, so at most the last 3 tokens belong to one.
INCOMPLETE = 3
# If no text is complete for this many tokens, such as in random bytes, only the last CONTEXT of them are decoded again.
WINDOW, CONTEXT = 32, 16


class Screen:
    """Prints text token by token, each character as soon as all its bytes have arrived.

    The text of a token depends on the tokens before it: the space between two words may belong to neither. So new
    tokens are decoded together with the last printed ones, and only the added text is printed. The pieces are together
    the text of all tokens, and the cost of a token does not depend on how many there were.

    Args:
        decode: returns the text of tokens.
        after: tokens that precede the text, and are not printed.
    """

    def __init__(self, decode: Callable[[Any], str], after: Sequence[int] = ()) -> None:
        self.decode = decode
        self._window = list(after)
        """The window: the last printed tokens, and all tokens that have not been printed."""
        self._shown = len(self._text())
        """Number of characters of the window's text that have been printed."""
        self._complete = len(after)
        """Number of tokens at the start of the window whose text is complete and has been printed."""

    def __call__(self, tokens: Sequence[int]) -> None:
        """Print the text that ``tokens`` add, holding back an incomplete character until the rest arrives."""
        self._window += tokens
        text = self._text()
        unsure = len(text) - len(text.rstrip(REPLACEMENT))
        if not unsure and len(text) > self._shown:
            self._print(text)
            self._window, self._complete = self._window[self._complete :], len(self._window) - self._complete
            self._shown = len(self._text())
        elif len(self._window) - self._complete > INCOMPLETE:
            self._print(text[: len(text) - min(unsure, INCOMPLETE)])
            if len(self._window) > WINDOW:
                left = max(0, len(text) - self._shown)
                self._window, self._complete = self._window[-CONTEXT:], 0
                self._shown = max(0, len(self._text()) - left)

    def end(self) -> None:
        """Print any held-back text, and end the line."""
        self._print(self._text())
        print(flush=True)

    def _text(self) -> str:
        """Return the text of the window."""
        import numpy as np  # here, so that messages about options do not wait for it

        return self.decode(np.array(self._window, dtype=np.int64)) if self._window else ""

    def _print(self, text: str) -> None:
        """Print what has not been printed of ``text``, the window's text."""
        print(text[self._shown :], end="", flush=True)
        self._shown = max(self._shown, len(text))


class Chat:
    """The turns of a conversation, as tokens that only grow, so that a KV cache serves all of them.

    Args:
        continue_: generates tokens, and keeps its KV cache between calls.
        tokenizer: the model's tokenizer.
        data: the options of the training data; for pairs and conversations, their template formats each turn.
        stops: the model's own tokens that end a text.
    """

    def __init__(self, continue_: Continue, tokenizer: Tokenizer, data: TextConfig, stops: Sequence[int] = ()) -> None:
        self.continue_, self.tokenizer, self.data = continue_, tokenizer, data
        self.template: ChatTemplate | None = None
        self.after = ""
        """What data.template has after an answer."""
        if data.kind == "chat":
            from wordrun.data.chat_template import template_of  # Jinja, which messages do not wait for

            self.template = template_of(data, tokenizer)
            self.stop = [*stops, *self.template.stops(tokenizer)]
        else:
            _, self.after = self._written("")
            self.stop = [*stops, *tokenizer.stops, *tokenizer.encode(self.after)[:1].tolist()]
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        """The conversation, if a chat template writes all of it."""
        self.tokens: list[int] = [] if self.tokenizer.eot is None or self.template else [self.tokenizer.eot]

    def answer(self, text: str) -> None:
        """Print the answer to ``text`` as it is generated; Ctrl-C ends it.

        Raises:
            ConfigError: the vocabulary lacks some of the characters of ``text``, or no text has had any tokens so far;
                or the chat template rejects the conversation.
        """
        import numpy as np
        import torch

        if self.template is not None:
            messages = [*self.messages, {"role": "user", "content": text}]
            turn = self.tokenizer.encode_spans(self.template.render(messages, ask=True), ())[0].tolist()
            self.messages, self.tokens = messages, []
        else:
            turn = self.tokenizer.encode(self._written(text)[0]).tolist()
        self.tokens += turn
        if not self.tokens:
            raise ConfigError(f"{text!r} has no tokens with tokenizer={self.tokenizer.kind}: write something else")
        show, started = Screen(self.tokenizer.decode, after=turn), len(self.tokens)

        def add(column: Tensor) -> None:
            self.tokens += column.tolist()
            if self.tokens[-1] not in self.stop:
                show(column.tolist())

        with contextlib.suppress(KeyboardInterrupt):
            self.continue_(torch.tensor([self.tokens]), on_tokens=add, stop=self.stop)
        show.end()
        if self.template is not None:
            said = self.tokens[started:-1] if self.tokens[-1] in self.stop else self.tokens[started:]
            self.messages.append({"role": "assistant", "content": self.tokenizer.decode(np.array(said, np.int64))})
            return
        written = self.tokenizer.encode(self.after).tolist()
        if written and len(self.tokens) > started and self.tokens[-1] == written[0]:
            self.tokens += written[1:]

    def _written(self, text: str) -> tuple[str, str]:
        """Return what the template puts before the answer to ``text``, and after it."""
        return self.data.turn(text) if self.data.kind == "pairs" else (f"{text}\n", "")


def converse(chat: Chat) -> None:
    """Read lines from the terminal and print the answers to them, until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() uses it to edit lines

    print(HELP)
    if chat.data.kind == "pairs" and (others := chat.data.other_fields()):
        print(f"{', '.join(f'{{{name}}}' for name in others)} of data.template will be empty")
    with sigint.raising():
        while True:
            try:
                line = input("> ").strip()
                if line == "/exit":
                    return
                if line == "/reset":
                    chat.reset()
                elif line.startswith("/"):
                    print(HELP)
                elif line:
                    chat.answer(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # at the prompt: a new line
                print()
            except ConfigError as error:
                print(error)
