"""The word cache: byte pair encoding in GPT-2's style, with the library called once for each distinct word.

Libraries encode each occurrence of a word. Splitting a text by a regular expression and looking its words up in a
dictionary is ten times as fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BLOCKS = (range(0x250), range(0x370, 0x530), range(0x2000, 0x2070))
"""Latin, Greek, Cyrillic and punctuation: characters that all versions of Unicode in use classify alike."""
DISPUTED = {*range(0x1C, 0x20), 0x85}
"""White space to some regular expression libraries, and not to others."""
MAX_WORDS = 2**18
"""Words in the cache, at most: some 40 MB."""


def _class(codes: Iterable[int]) -> str:
    """Return the character class of ``codes``, without its brackets."""
    return re.escape("".join(map(chr, codes)))


@lru_cache(maxsize=2)
def _patterns(ascii_only: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a character that is not supported here, and the pattern of a word.

    A word, to GPT-2, is a contraction, letters, digits or signs, each with the space before it, or white space.
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
        encode: returns the token ids of each of several words, as the tokenizer itself does.
    """

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]]) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the token ids of ``text``; None: it has characters that are not supported here."""
        unsupported, pattern = _patterns(text.isascii())
        if unsupported.search(text):
            return None
        words = pattern.findall(text)
        if len(self._known) > MAX_WORDS:
            self._known.clear()
        new = list(set(words).difference(self._known))
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._known[word] = np.array(tokens, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), dtype=np.uint32)
