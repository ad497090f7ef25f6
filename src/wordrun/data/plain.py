"""Texts in ASCII by characters, read and written through buffers that stay in the processor's cache.

A character is a byte and becomes one token, so that a shard's length is known before it is read, and nothing of the
text has to be kept: fresh memory costs more than everything that is done with it. Other texts, and those in which
something is wrong, go the general way (``piecework``), which gives the same shards and names what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wordrun.data.documents import Piece, extent
from wordrun.data.manifest import Entry, write_shard
from wordrun.data.tokenizers import CharTokenizer, drop_known

BUFFER = 2**18
"""Bytes read at once: with their tokens a megabyte, the second-level cache of a core."""
ABSENT = 0xFF
"""What stands in a table of all bytes for one that is not in the vocabulary."""


class NotPlainError(Exception):
    """The text has to go the general way."""


def characters(piece: Piece) -> str | None:
    """Return the characters of ``piece`` in the order of their code points; None: it has to go the general way."""
    known, table = b"", bytes([ABSENT]) * 256
    try:
        for chunk in _chunks(piece.path, *extent(piece)):
            if ABSENT in chunk.translate(table):
                known = drop_known(chunk, known)
                if 0 in known or not known.isascii():
                    return None
                table = bytes(0 if byte in known else ABSENT for byte in range(256))
    except NotPlainError:
        return None
    found = bytes(sorted(known)).decode()
    return None if not found or found.isspace() else found


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
    table = _table(tokenizer)
    if table is None:
        return None
    start, stop = extent(piece)
    cut = start + int((stop - start) * (1 - share))
    entries: dict[str, list[Entry]] = {}
    try:
        begin = next(_chunks(piece.path, start, stop), b"").decode("latin-1")
        if not begin.strip():  # what str calls blank, which is more than what bytes do
            return None
        for split, first, last in (("train", start, cut), ("val", cut, stop)):
            entries[split] = [] if first == last else [_shard(piece, split, first, last, table, folder)]
            tell(int(start == 0), last - start, last - start)
    except NotPlainError:
        return None
    return entries


def _shard(piece: Piece, split: str, start: int, stop: int, table: bytes, folder: Path) -> Entry:
    path = folder / f"{split}_{piece.number:06d}_00.bin"
    begins = [0] if start == 0 and split == "train" else []
    return write_shard(path, begins, _tokens(piece.path, start, stop, table), stop - start, "<u2")


def _table(tokenizer: CharTokenizer) -> bytes | None:
    """Return the token of each byte, ABSENT where there is none; None: one of them does not fit into a byte.

    The byte 0 is in no text.
    """
    known = enumerate(tokenizer.characters)
    tokens = {ord(character): token for token, character in known if "\0" < character < "\x80"}
    if max(tokens.values(), default=0) >= ABSENT:
        return None
    return bytes(tokens.get(byte, ABSENT) for byte in range(256))


def _tokens(path: str, start: int, stop: int, table: bytes) -> Iterator[memoryview]:
    """Yield the tokens of the bytes from ``start`` to ``stop``; each is gone when the next one is asked for."""
    out = np.empty(BUFFER, dtype="<u2")
    for chunk in _chunks(path, start, stop):
        found = chunk.translate(table)
        if ABSENT in found:
            raise NotPlainError
        tokens = out[: len(found)]
        tokens[:] = np.frombuffer(found, dtype=np.uint8)
        yield tokens.data


def _chunks(path: str, start: int, stop: int) -> Iterator[bytearray]:
    """Yield the bytes from ``start`` to ``stop`` in one buffer after the other, which is the same one again."""
    buffer = bytearray(BUFFER)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            count = file.readinto(memoryview(buffer)[: min(BUFFER, stop - start)])
            chunk = buffer if count == BUFFER else buffer[:count]
            if not chunk:
                raise NotPlainError
            start += len(chunk)
            yield chunk
