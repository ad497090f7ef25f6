"""Tokenizers without a vocabulary file: characters and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from wordrun.common.errors import ConfigError
from wordrun.data.tokenizers.base import END, Ids, Tokenizer
from wordrun.data.tokenizers.options import ByteTokenizerConfig, CharTokenizerConfig

ABSENT = b"\xff"
"""Marks characters outside the vocabulary in the table for bytes.translate."""
CHUNK = 2**18
"""Number of characters to examine at once; small enough for the CPU cache."""


class CharTokenizer(Tokenizer):
    """One token per distinct character, in code point order unless ``in_order``."""

    kind = "char"
    eot = None

    def __init__(self, characters: str, *, in_order: bool = False) -> None:
        self.characters = characters if in_order else distinct(characters)
        self.vocab_size = len(self.characters)
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)
        highest = int(self._codes.max(initial=0))
        # Maps each code point to its token, or to vocab_size if it has none; the last entry stands for all higher ones.
        self._tokens = np.full(max(highest + 2, 129), self.vocab_size, dtype=np.min_scalar_type(self.vocab_size))
        self._tokens[self._codes] = np.arange(self.vocab_size)
        # The same for ASCII as a table for bytes.translate, which is fastest; needs a spare byte for ABSENT.
        of_ascii = np.where(self._tokens[:128] == self.vocab_size, ABSENT[0], self._tokens[:128])
        self._table = of_ascii.astype(np.uint8).tobytes().ljust(256, ABSENT) if self.vocab_size <= ABSENT[0] else b""

    @classmethod
    def build(cls, cfg: CharTokenizerConfig, texts: Iterable[str] = ()) -> CharTokenizer:
        """Return the tokenizer of the characters in ``texts``."""
        return cls("".join({character for text in texts for character in distinct(text)}))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each text.

        Raises:
            ConfigError: if the vocabulary lacks some characters; the message names them.
        """
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        if self._table and text.isascii():
            translated = text.encode("ascii").translate(self._table)
            if ABSENT in translated:
                self._raise_unknown(text)
            return np.frombuffer(translated, dtype=np.uint8)
        tokens = np.take(self._tokens, np.frombuffer(text.encode("utf-32-le"), np.uint32), mode="clip")
        if len(tokens) and tokens.max() == self.vocab_size:
            self._raise_unknown(text)
        return tokens

    def _raise_unknown(self, text: str) -> None:
        absent = "".join(character for character in dict.fromkeys(text) if character not in self.characters)
        raise ConfigError(
            f"the text {_capped(text)} has characters that the vocabulary of {self.vocab_size} lacks: "
            f"{_capped(absent)}. Leave them out; the vocabulary is {_capped(self.characters, 100)}.",
            page="data.md#tokenizers",
        )

    def decode(self, tokens: Ids) -> str:
        """Return the text of ``tokens``; ids beyond the vocabulary become U+FFFD."""
        tokens = np.asarray(tokens)
        padded = np.append(self._codes, np.uint32(0xFFFD))
        return padded[np.minimum(tokens, self.vocab_size)].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"kind": "char", "characters": self.characters}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> CharTokenizer:
        return cls(json.loads(text)["characters"], in_order=True)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes and an end-of-text token."""

    kind = "byte"
    vocab_size = 257
    eot = 256

    @classmethod
    def build(cls, cfg: ByteTokenizerConfig, texts: Iterable[str] = ()) -> ByteTokenizer:
        """Return the tokenizer, which has no options."""
        return cls()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Ids) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        tokens = np.asarray(tokens)
        parts = np.split(tokens, np.flatnonzero(tokens >= self.eot))
        texts = (part[part < self.eot].astype(np.uint8).tobytes().decode(errors="replace") for part in parts)
        return END.join(texts)

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"kind": "byte"})

    @classmethod
    def from_json(cls, text: str) -> ByteTokenizer:
        return cls()


def distinct(text: str) -> str:
    """Return the distinct characters of ``text`` in code point order."""
    found: set[str] = set()
    known = b""
    for start in range(0, len(text), CHUNK):
        part = text[start : start + CHUNK]
        if part.isascii():  # bytes.translate drops known characters ten times as fast as a set
            rest = part.encode("ascii").translate(None, known)
            while rest:
                known += bytes(set(rest[:4096]))
                rest = rest.translate(None, known)
        else:
            found.update(part)
    return "".join(sorted(found.union(known.decode("ascii"))))


def _capped(text: str, most: int = 40) -> str:
    return repr(text[:most]) + "..." * (len(text) > most)
