"""Tokenizers. Saved as JSON with the data and with every checkpoint, never as pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wordrun.config import (
    BPETokenizerConfig,
    GPT2TokenizerConfig,
    HFTokenizerConfig,
    TokenizerConfig,
)
from wordrun.errors import ConfigError

Ids = NDArray[np.integer]
END = "<|endoftext|>"
"""What GPT-2 calls the mark between documents, and we do, too. In a text it is no mark, but thirteen characters."""


NONE = b"\xff"
"""What a character outside of the vocabulary becomes in a table of bytes."""


class Tokenizer(Protocol):
    """Text to numbers and back."""

    kind: str
    """What ``from_json`` goes by."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""

    @property
    def eot(self) -> int | None:
        """The token that stands before each document; None: there is none."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token numbers of ``text``, without ``eot``."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token numbers of each text, as ``encode`` does, in whatever type is at hand."""

    def decode(self, tokens: Ids) -> str:
        """Return the text that ``tokens`` stand for, ``eot`` as ``END``."""

    def to_json(self) -> str:
        """Return the tokenizer as JSON, from which ``from_json`` makes it without any other file."""


class CharTokenizer:
    """One token per distinct character, in the order of their code points."""

    kind = "char"
    eot = None

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)
        highest = int(self._codes[-1]) if len(self._codes) else 0
        # Of each code point its token, and behind the last one, what is none.
        self._tokens = np.full(max(highest + 2, 129), self.vocab_size, dtype=np.min_scalar_type(self.vocab_size))
        self._tokens[self._codes] = np.arange(self.vocab_size)
        # The same for ASCII as a table for Python's own translation, the fastest, if there is a byte left for none.
        of_ascii = np.where(self._tokens[:128] == self.vocab_size, NONE[0], self._tokens[:128])
        self._table = of_ascii.astype(np.uint8).tobytes().ljust(256, NONE) if self.vocab_size <= NONE[0] else b""

    @classmethod
    def of_text(cls, text: str) -> CharTokenizer:
        """Return the tokenizer of the characters that occur in ``text``."""
        return cls(distinct(text))

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        return len(self.characters)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token numbers of ``text``.

        Raises:
            ConfigError: names the characters that the vocabulary lacks.
        """
        return self._encode(text).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token numbers of each text."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        if self._table and text.isascii():
            translated = text.encode("ascii").translate(self._table)
            if NONE in translated:
                self._refuse(text)
            return np.frombuffer(translated, dtype=np.uint8)
        tokens = np.take(self._tokens, np.frombuffer(text.encode("utf-32-le"), np.uint32), mode="clip")
        if len(tokens) and tokens.max() == self.vocab_size:
            self._refuse(text)
        return tokens

    def _refuse(self, text: str) -> None:
        absent = "".join(character for character in dict.fromkeys(text) if character not in self.characters)
        raise ConfigError(
            f"the text {text[:40]!r} has characters that the vocabulary of {self.vocab_size} lacks: {absent!r}. "
            f"Leave them out; it knows {self.characters!r}."
        )

    def decode(self, tokens: Ids) -> str:
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


class ByteTokenizer:
    """The bytes of UTF-8, and the mark between documents."""

    kind = "byte"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the bytes of ``text``."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Ids) -> str:
        """Return the text; what is no UTF-8 becomes U+FFFD."""
        tokens = np.asarray(tokens)
        parts = np.split(tokens, np.flatnonzero(tokens >= self.eot))
        texts = (part[part < self.eot].astype(np.uint8).tobytes().decode(errors="replace") for part in parts)
        return END.join(texts)

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"kind": "byte"})

    @classmethod
    def from_json(cls, text: str) -> ByteTokenizer:
        """Return the tokenizer that ``to_json`` wrote."""
        return cls()


def distinct(text: str) -> str:
    """Return the characters that occur in ``text``, in the order of their code points."""
    if not text.isascii():
        return "".join(sorted(set(text)))
    return bytes(sorted(drop_known(text.encode("ascii"), b""))).decode()


def drop_known(text: bytes | bytearray, known: bytes) -> bytes:
    """Return ``known`` and the bytes of ``text`` that are not in it.

    What is known already is dropped by Python's own translation, ten times as fast as a set.
    """
    rest = text.translate(None, known)
    while rest:
        known += bytes(set(rest[:4096]))
        rest = rest.translate(None, known)
    return known


def from_json(text: str) -> Tokenizer:
    """Return the tokenizer that any ``to_json`` wrote.

    Raises:
        ConfigError: it is none of ours.
    """
    from wordrun.data import subword

    kinds: dict[str, type[Tokenizer]] = {
        "char": CharTokenizer, "byte": ByteTokenizer, "gpt2": subword.GPT2Tokenizer, "bpe": subword.BPETokenizer,
        "hf": subword.HFTokenizer,
    }  # fmt: skip
    try:
        kind = json.loads(text)["kind"]
        return kinds[kind].from_json(text)  # type: ignore[attr-defined,no-any-return]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"this is no tokenizer that wordrun saved ({type(error).__name__}: {str(error)[:80]}): "
            f"expected JSON with one of the kinds {', '.join(kinds)}"
        ) from None


def needs_text(cfg: TokenizerConfig) -> bool:
    """Say whether the tokenizer is made from the corpus."""
    return cfg.name == "char" or (isinstance(cfg, BPETokenizerConfig) and cfg.path is None)


def build(cfg: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer that ``cfg`` describes; ``texts`` are what char and bpe are made from.

    Raises:
        ConfigError: its file is missing, or is none.
    """
    from wordrun.data import subword

    if isinstance(cfg, BPETokenizerConfig):
        return subword.BPETokenizer.build(cfg, texts)
    if isinstance(cfg, GPT2TokenizerConfig):
        return subword.GPT2Tokenizer.build(cfg)
    if isinstance(cfg, HFTokenizerConfig):
        return subword.HFTokenizer.build(cfg)
    if cfg.name == "byte":
        return ByteTokenizer()
    return CharTokenizer("".join(sorted({character for text in texts for character in distinct(text)})))
