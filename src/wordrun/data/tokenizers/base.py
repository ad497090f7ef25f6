"""The tokenizer interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError

Ids = NDArray[np.integer]
Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""
CUT = "\U000ffffe"
"""A noncharacter of Unicode, which is in no text: what is before it and after it is no special token together."""
END = "<|endoftext|>"
"""GPT-2's name for the end-of-text token. Within a text, these are 13 ordinary characters."""


class Tokenizer(ABC):
    """Converts text to token ids and back. Saved as JSON with the data and every checkpoint, never as a pickle."""

    kind: str
    """Its name in the config and in its JSON."""
    vocab_size: int
    """Number of distinct tokens."""
    eot: int | None
    """The end-of-text token that precedes each document; None if there is none."""
    chat: Mapping[str, Any] = MappingProxyType({})
    """What a model's folder has for conversations: the "template", the "names" of special tokens in it, and the tokens
    that "stop" generation."""
    missing: str = ""
    """Why it cannot convert text, and the remedy; empty: it can."""

    @classmethod
    @abstractmethod
    def build(cls, cfg: Any, texts: Iterable[str] = ()) -> Tokenizer:
        """Return the tokenizer that ``cfg`` describes, built from ``texts`` if it depends on the corpus.

        Raises:
            ConfigError: if its file is missing or invalid.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each text, without ``eot``, in any integer type."""

    @property
    def eot_text(self) -> str:
        """The text that stands for ``eot`` in a chat template."""
        return END

    @property
    def stops(self) -> list[int]:
        """The tokens that end an answer."""
        return list(dict.fromkeys([*([] if self.eot is None else [self.eot]), *self.chat.get("stop", [])]))

    def specials(self) -> list[str]:
        """Return the texts that stand for special tokens in a chat template."""
        return [] if self.eot is None else [self.eot_text]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the token ids of a text that a chat template has written, (T,), and which of them are in ``spans``.

        Unlike in other texts, ``specials`` in it are tokens; ``CUT`` separates what is none. No token has characters on
        both sides of the end of a span.
        """
        starts, ids, flags = {start for start, _ in spans}, [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
        for begin, end in pairwise(sorted({0, len(text), *chain.from_iterable(spans)})):
            piece = text[begin:end]
            for number, part in enumerate([piece] if self.eot is None else piece.split(self.eot_text)):
                eot = [np.array([self.eot])] if number else []
                ids += [*eot, *(self.encode(each) for each in part.split(CUT) if each)]
            flags.append(np.full(sum(map(len, ids)) - sum(map(len, flags)), begin in starts))
        return np.concatenate(ids), np.concatenate(flags)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, without ``eot``; ``END`` in it is ordinary text.

        Raises:
            ConfigError: if the vocabulary lacks some of its characters.
        """
        return self.encode_batch([text])[0].astype(np.int64)

    def encode_prompt(self, text: str, key: str, or_else: str = "") -> tuple[NDArray[np.int64], int]:
        """Return the tokens that a model is to continue, (T,) with T at least 1, and how many of them precede ``text``.

        A text without tokens, such as a line break if text is split at whitespace, is replaced by ``eot``, which
        precedes each document.

        Args:
            text: the prompt.
            key: the option that sets it, for messages.
            or_else: another remedy besides another prompt, for messages.

        Raises:
            ConfigError: the vocabulary lacks some of its characters, or there are no tokens and no ``eot``.
        """
        try:
            tokens = self.encode(text)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
        if len(tokens):
            return tokens, 0
        if self.eot is None:
            raise ConfigError(f"{key}={text!r} has no tokens with tokenizer={self.kind}: set {key}=TEXT{or_else}")
        return np.array([self.eot]), 1

    def eot_for(self, setting: str) -> int:
        """Return the end-of-text token, which ``setting`` (``KEY=VALUE``) needs.

        Raises:
            ConfigError: the tokenizer has none.
        """
        if self.eot is None:
            raise ConfigError(
                f"{setting} needs an end-of-text token, and tokenizer={self.kind} has none: use tokenizer=byte, bpe, "
                f"gpt2 or hf (with tokenizer.path), or remove {setting}"
            )
        return self.eot

    def bytes_per_token(self, tokens: Ids) -> float | None:
        """Return the UTF-8 bytes of the text of ``tokens`` per token, with none for ``eot``; None: there is no text.

        This is the encoded text only if the tokenizer keeps every character.
        """
        text = "" if self.missing else self.decode(tokens[tokens != (-1 if self.eot is None else self.eot)])
        return len(text.encode(errors="replace")) / len(tokens) if text else None

    @abstractmethod
    def decode(self, tokens: Ids) -> str:
        """Return the text of ``tokens``, with ``eot`` as ``END``; ids beyond the vocabulary never raise."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the tokenizer with its complete vocabulary as JSON, for ``from_json``."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Return the tokenizer saved by ``to_json``."""
