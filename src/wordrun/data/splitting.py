"""A short cut through GPT-2's kind of byte pair encoding: a text falls into words, and each is encoded but once.

Libraries spend most of their time on each occurrence of a word. Python finds the words of a text and looks them up in a
dictionary ten times as fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BLOCKS = (range(0x250), range(0x370, 0x530), range(0x2000, 0x2070))
"""Latin, Greek, Cyrillic and punctuation: characters of which every version of Unicode in use says the same."""
DISPUTED = {*range(0x1C, 0x20), 0x85}
"""Blanks to some regular expressions, and not to others."""
MOST_WORDS = 2**18
"""Words that are remembered, some 40 MB."""


def _class(codes: Iterable[int]) -> str:
    """Return what stands for ``codes`` within the brackets of a regular expression."""
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)


@lru_cache(maxsize=2)
def _patterns(ascii_only: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds a character that is not known here, and what finds words.

    GPT-2 cuts a text into contractions, words, numbers and signs, each with the blank before it, and runs of blanks.
    """
    codes = [code for block in BLOCKS for code in block if code < 0x80 or not ascii_only]
    known = [code for code in codes if code not in DISPUTED and unicodedata.category(chr(code)) != "Cn"]
    letters = _class(code for code in known if unicodedata.category(chr(code)).startswith("L"))
    numbers = _class(code for code in known if unicodedata.category(chr(code)).startswith("N"))
    blanks = _class(code for code in known if chr(code).isspace())
    words = (
        rf"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{numbers}]+| ?[^{blanks}{letters}{numbers}]+"
        rf"|[{blanks}]+(?![^{blanks}])|[{blanks}]+"
    )
    return re.compile(f"[^{_class(known)}]"), re.compile(words)


class Words:
    """Encodes texts by their words.

    Args:
        encode: returns the token numbers of each of several words; it has to be the tokenizer's own way.
    """

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]]) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the token numbers of ``text``; None: it has characters that are not known here."""
        unknown, pattern = _patterns(text.isascii())
        if unknown.search(text):
            return None
        words = pattern.findall(text)
        if len(self._known) > MOST_WORDS:
            self._known.clear()
        new = list(set(words).difference(self._known))
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._known[word] = np.array(tokens, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), dtype=np.uint32)
