"""Texts in ASCII by characters, read and written through buffers that stay in the processor's cache.

A character is a byte and becomes one token, so that a shard's length is known before it is read, and nothing of the
text has to be kept: fresh memory costs more than everything that is done with it. Other texts, and those in which
something is wrong, go the general way (``piecework``), which gives the same shards and names what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wordrun.data.documents import Piece, extent
from wordrun.data.manifest import Entry, write_shard
from wordrun.data.tokenizers import CharTokenizer, drop_known

BUFFER = 2**16
"""Bytes read at once: even, as two characters are looked up together."""
ABSENT = 0xFFFF
"""What stands in the table for a character that the vocabulary lacks."""


class NotPlainError(Exception):
    """The text has to go the general way."""


def characters(piece: Piece) -> str | None:
    """Return the characters of ``piece`` in the order of their code points; None: it has to go the general way."""
    known = b""
    try:
        for chunk in _chunks(piece.path, *extent(piece)):
            known = drop_known(chunk, known)
    except NotPlainError:
        return None
    return None if not known or known.isspace() else bytes(sorted(known)).decode()


def write(
    piece: Piece, share: float, tokenizer: CharTokenizer, folder: Path, tell: Callable[[int, int, int], None]
) -> dict[str, list[Entry]] | None:
    """Write the shards of ``piece``, its end for validation, and return them; None: it has to go the general way.

    Args:
        piece: of a text.
        share: of it that is for validation.
        tokenizer: with all of its characters.
        folder: of the shards.
        tell: called with the documents, tokens and characters so far.
    """
    if tokenizer.vocab_size >= ABSENT:
        return None
    start, stop = extent(piece)
    cut = start + int((stop - start) * (1 - share))
    pairs, entries = _pairs(tokenizer), {}
    try:
        if next(_chunks(piece.path, start, stop), b" ").isspace():
            return None
        for split, first, last in (("train", start, cut), ("val", cut, stop)):
            entries[split] = [] if first == last else [_shard(piece, split, first, last, pairs, folder)]
            tell(int(start == 0), last - start, last - start)
    except NotPlainError:
        return None
    return entries


def _shard(piece: Piece, split: str, start: int, stop: int, pairs: NDArray[np.uint32], folder: Path) -> Entry:
    path = folder / f"{split}_{piece.number:06d}_00.bin"
    begins = [0] if start == 0 and split == "train" else []
    return write_shard(path, begins, _tokens(piece.path, start, stop, pairs), stop - start, "<u2")


def _pairs(tokenizer: CharTokenizer) -> NDArray[np.uint32]:
    """Return for every two bytes, as a number, the two tokens that they become, as another."""
    single = np.full(256, ABSENT, dtype=np.uint32)
    for token, character in enumerate(tokenizer.characters):
        if character.isascii():
            single[ord(character)] = token
    return (single[None, :] | single[:, None] << np.uint32(16)).ravel()


def _tokens(path: str, start: int, stop: int, pairs: NDArray[np.uint32]) -> Iterator[memoryview]:
    """Yield the tokens of the bytes from ``start`` to ``stop``; each is gone when the next one is asked for."""
    out = np.empty(BUFFER // 2, dtype="<u4")
    for chunk in _chunks(path, start, stop):
        count = len(chunk)
        if count % 2:
            chunk.append(chunk[0])
        found = out[: len(chunk) // 2]
        np.take(pairs, np.frombuffer(chunk, dtype="<u2"), out=found, mode="clip")
        tokens = found.view("<u2")[:count]
        if tokens.max() == ABSENT:
            raise NotPlainError
        yield tokens.data


def _chunks(path: str, start: int, stop: int) -> Iterator[bytearray]:
    """Yield the bytes from ``start`` to ``stop`` in one buffer after the other, which is the same one again."""
    buffer = bytearray(BUFFER)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            count = file.readinto(memoryview(buffer)[: min(BUFFER, stop - start)])
            chunk = buffer if count == BUFFER else buffer[:count]
            if not chunk or not chunk.isascii() or 0 in chunk:
                raise NotPlainError
            start += len(chunk)
            yield chunk
