"""A conversation with a model on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wordrun import interrupts
from wordrun.config import TextConfig
from wordrun.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from wordrun.data.tokenizers.base import Tokenizer

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
Continue = Callable[..., "Tensor"]
"""Returns its first argument, tokens (1, T), followed by generated tokens; see ``wordrun.model.generate.generate``."""


class Screen:
    """Prints text token by token, each character as soon as all its bytes have arrived."""

    def __init__(self, decode: Callable[[Any], str]) -> None:
        self.decode = decode
        self.held_back: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> None:
        """Print ``tokens``, holding back an incomplete character until the rest arrives."""
        self.held_back += tokens
        text = self.decode(self.held_back)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text, end="", flush=True)
            self.held_back = []

    def end(self) -> None:
        """Print any held-back text, and end the line."""
        print(self.decode(self.held_back) if self.held_back else "", flush=True)


class Chat:
    """The turns of a conversation, as tokens that only grow, so that a KV cache serves all of them.

    Args:
        continue_: generates; the same object throughout, with its KV cache.
        tokenizer: of the model.
        data: what the model was trained on; pairs say by their template how a turn is written.
    """

    def __init__(self, continue_: Continue, tokenizer: Tokenizer, data: TextConfig) -> None:
        self.continue_, self.tokenizer, self.data = continue_, tokenizer, data
        _, self.after = self._written("")
        self.stop = [] if tokenizer.eot is None else [tokenizer.eot]
        self.stop += tokenizer.encode(self.after)[:1].tolist()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.tokens: list[int] = [] if self.tokenizer.eot is None else [self.tokenizer.eot]

    def answer(self, text: str) -> None:
        """Print the answer to ``text`` as it is generated; Ctrl-C ends it.

        Raises:
            ConfigError: the vocabulary lacks some of the characters of ``text``.
        """
        import torch

        self.tokens += self.tokenizer.encode(self._written(text)[0]).tolist()
        show, started = Screen(self.tokenizer.decode), len(self.tokens)

        def add(column: Tensor) -> None:
            self.tokens += column.tolist()
            if self.tokens[-1] not in self.stop:
                show(column.tolist())

        with contextlib.suppress(KeyboardInterrupt):
            self.continue_(torch.tensor([self.tokens]), on_tokens=add, stop=self.stop)
        show.end()
        written = self.tokenizer.encode(self.after).tolist()
        if written and len(self.tokens) > started and self.tokens[-1] == written[0]:
            self.tokens += written[1:]

    def _written(self, text: str) -> tuple[str, str]:
        """Return what the model sees of a turn before the answer, and after it."""
        return self.data.turn(text) if self.data.kind == "pairs" else (f"{text}\n", "")


def converse(chat: Chat) -> None:
    """Read lines from the terminal and print the answers to them, until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() uses it to edit lines

    print(HELP)
    with interrupts.raising():
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
