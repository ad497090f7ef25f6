"""What a tokenizer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]
END = "<|endoftext|>"
"""The end-of-text token, under the name that GPT-2 gave it. Within a text, these are 13 ordinary characters."""


class Tokenizer(ABC):
    """Text to token ids and back. Saved as JSON with the data and with every checkpoint, never as a pickle."""

    kind: str
    """Its name in the config and in its JSON."""
    vocab_size: int
    """Number of distinct tokens."""
    eot: int | None
    """The end-of-text token, which stands before each document; None: there is none."""

    @classmethod
    @abstractmethod
    def build(cls, cfg: Any, texts: Iterable[str] = ()) -> Tokenizer:
        """Return the tokenizer that its options ``cfg`` describe, made from ``texts`` if it depends on the corpus.

        Raises:
            ConfigError: its file is missing or invalid.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each text, without ``eot``, in whatever integer type is convenient."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, without ``eot``; what looks like ``END`` is ordinary text.

        Raises:
            ConfigError: the vocabulary lacks some of its characters.
        """
        return self.encode_batch([text])[0].astype(np.int64)

    @abstractmethod
    def decode(self, tokens: Ids) -> str:
        """Return the text of ``tokens``, with ``eot`` as ``END``; ids beyond the vocabulary never fail."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the tokenizer as JSON with its complete vocabulary, from which ``from_json`` restores it."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Return the tokenizer that ``to_json`` wrote."""
