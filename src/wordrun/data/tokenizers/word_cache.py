"""The word cache: GPT-2-style byte pair encoding that calls the library once per distinct word.

Libraries encode every occurrence of a word. Splitting the text with a regular expression and looking up its words in
a dictionary is ten times as fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BLOCKS = (range(0x250), range(0x370, 0x530), range(0x2000, 0x2070))
"""Latin, Greek, Cyrillic and punctuation: characters that all Unicode versions in use classify the same way."""
DISPUTED = {*range(0x1C, 0x20), 0x85}
"""White space in some regular expression libraries but not in others."""
MAX_WORDS = 2**18
"""Maximum number of words in the cache: about 40 MB."""


def _class(codes: Iterable[int]) -> str:
    """Return the character class of ``codes``, without its brackets."""
    return re.escape("".join(map(chr, codes)))


@lru_cache(maxsize=2)
def _patterns(ascii_only: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of an unsupported character and the pattern of a word.

    To GPT-2 a word is a contraction, letters, digits or symbols, each with the preceding space, or white space.
    """
    codes = [code for block in BLOCKS for code in block if code < 0x80 or not ascii_only]
    known = [code for code in codes if code not in DISPUTED and unicodedata.category(chr(code)) != "Cn"]
    letters = _class(code for code in known if unicodedata.category(chr(code)).startswith("L"))
    numbers = _class(code for code in known if unicodedata.category(chr(code)).startswith("N"))
    spaces = _class(code for code in known if chr(code).isspace())
    words = (
        rf"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{numbers}]+| ?[^{spaces}{letters}{numbers}]+"
        rf"|[{spaces}]+(?![^{spaces}])|[{spaces}]+"
    )
    return re.compile(f"[^{_class(known)}]"), re.compile(words)


class WordCache:
    """Encodes texts word by word.

    Args:
        encode: the tokenizer's own function, which returns the token ids of each of several words.
        max_words: words in the cache above which it begins anew with the next text.
    """

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]], max_words: int = MAX_WORDS) -> None:
        self._encode, self._max_words = encode, max_words
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the token ids of ``text``, or None if it has unsupported characters."""
        unsupported, pattern = _patterns(text.isascii())
        if unsupported.search(text):
            return None
        words = pattern.findall(text)
        if len(self._known) > self._max_words:
            self._known.clear()
        new = list(set(words).difference(self._known))
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._known[word] = np.array(tokens, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), dtype=np.uint32)
