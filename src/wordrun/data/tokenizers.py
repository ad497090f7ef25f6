"""Tokenizers. Saved as JSON, never as pickle."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from wordrun.errors import ConfigError


class CharTokenizer:
    """One token per distinct character, in the order of their code points."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)

    @classmethod
    def of_text(cls, text: str) -> CharTokenizer:
        """Return the tokenizer of the characters that occur in ``text``."""
        codes = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32))
        return cls(codes.tobytes().decode("utf-32-le"))

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        return len(self.characters)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token numbers of ``text``.

        Raises:
            ConfigError: names the characters that the vocabulary lacks.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        tokens = np.searchsorted(self._codes, codes)
        missing = self._codes[np.minimum(tokens, self.vocab_size - 1)] != codes
        if missing.any():
            absent = "".join(dict.fromkeys(codes[missing].tobytes().decode("utf-32-le")))
            raise ConfigError(
                f"the text {text[:40]!r} has characters that the vocabulary of {self.vocab_size} lacks: {absent!r}. "
                f"Leave them out; it knows {self.characters!r}."
            )
        return tokens.astype(np.int64)

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """Return the text that ``tokens`` stand for; numbers beyond the vocabulary become U+FFFD."""
        tokens = np.asarray(tokens)
        padded = np.append(self._codes, np.uint32(0xFFFD))
        return padded[np.minimum(tokens, self.vocab_size)].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"kind": "char", "characters": self.characters}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> CharTokenizer:
        """Return the tokenizer that ``to_json`` wrote."""
        return cls(json.loads(text)["characters"])


def from_json(text: str) -> CharTokenizer:
    """Return the tokenizer that any ``to_json`` wrote.

    Raises:
        ConfigError: it is none of ours.
    """
    try:
        assert json.loads(text)["kind"] == "char"
        return CharTokenizer.from_json(text)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(f"this is no tokenizer that wordrun saved: {text[:80]}") from None
