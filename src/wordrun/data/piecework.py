"""What is done with one piece of a source: its characters collected, or its tokens written as shards.

As a program (``python -m wordrun.data.piecework``) it is a worker: it reads a job and then pieces, as lines of JSON,
and answers with lines of JSON. So workers share nothing with the process that started them, neither MPI nor threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun.config import DataConfig
from wordrun.data import plain, shards
from wordrun.data.documents import Document, Piece, documents
from wordrun.data.manifest import TOKENIZER, Entry, write_shard
from wordrun.data.shards import Tokens
from wordrun.data.tokenizers import CharTokenizer, Tokenizer, distinct, from_json
from wordrun.errors import ConfigError, UserError

CHUNK = 2**18
"""Characters that are encoded at once; libraries keep more than a hundred bytes for each token of a text."""
BATCH = 2**20
"""Characters of the documents that are encoded in one call of the library."""
TELL_S = 0.5
"""Seconds between two reports of a worker."""

Tell = Callable[[int, int, int], None]
"""Called with the documents, tokens and characters of the piece so far."""


def record_of(folder: Path, task: str, number: int) -> Path:
    """Return the file that says that ``task`` is done for the piece ``number``, and what came out."""
    return folder / "work" / f"{number:06d}.{task}.json"


def run(task: str, piece: Piece, data: DataConfig, folder: Path, tell: Tell) -> None:
    """Do ``task`` (characters or shards) for ``piece``, and leave a record of it, last of all."""
    if task == "characters":
        found = plain.characters(piece) if piece.kind == "text" else None
        record: dict[str, Any] = {"characters": found or _characters(piece, data, tell)}
    else:
        tokenizer = _loaded((folder / TOKENIZER).read_text(encoding="utf-8"))
        record = write_shards(piece, data, tokenizer, folder, tell)
    shards.write_bytes(record_of(folder, task, piece.number), json.dumps(record, ensure_ascii=False).encode())


def _characters(piece: Piece, data: DataConfig, tell: Tell) -> str:
    found: set[str] = set()
    read = 0
    for document in documents(piece, data):
        found |= set(distinct(document.text))
        read += len(document.text)
        tell(0, 0, read)
    return "".join(sorted(found))


@lru_cache(maxsize=1)
def _loaded(content: str) -> Tokenizer:
    """Return the tokenizer of all pieces of a job: a large vocabulary takes a third of a second to load."""
    return from_json(content)


class _Split:
    """The shards of one split that a piece becomes."""

    def __init__(self, name: str, piece: Piece, tokenizer: Tokenizer, folder: Path) -> None:
        self.name, self.piece, self.folder, self.eot = name, piece, folder, tokenizer.eot
        self.dtype = shards.dtype_for(tokenizer.vocab_size)
        self.entries: list[Entry] = []
        self._parts: list[NDArray[np.integer]] = []
        self._starts: list[int] = []
        self._count = 0

    def add(self, tokens: NDArray[np.integer], begins: bool) -> None:
        """Append tokens; at the beginning of a document with the mark before them."""
        if begins:
            if self._count >= shards.SHARD_TOKENS:
                self.flush()
            self._starts.append(self._count)
            if self.eot is not None:
                self._parts.append(np.array([self.eot], dtype=self.dtype))
                self._count += 1
        self._parts.append(tokens)
        self._count += len(tokens)

    def add_as_is(self, tokens: NDArray[np.integer]) -> None:
        """Append tokens in which the marks between documents are already."""
        if self.eot is not None:
            self._starts += (np.flatnonzero(tokens == self.eot) + self._count).tolist()
        self._parts.append(tokens)
        self._count += len(tokens)

    def flush(self) -> None:
        """Write what there is as a shard."""
        if not self._count:
            return
        path = self.folder / f"{self.name}_{self.piece.number:06d}_{len(self.entries):02d}.bin"
        tokens = np.concatenate(self._parts, dtype=self.dtype, casting="unsafe")
        self.entries.append(write_shard(path, self._starts, [tokens.data], self._count, self.dtype))
        self._parts, self._starts, self._count = [], [], 0


def write_shards(piece: Piece, data: DataConfig, tokenizer: Tokenizer, folder: Path, tell: Tell) -> dict[str, Any]:
    """Write the shards of ``piece`` and return their entries, by split."""
    if piece.kind == "text" and isinstance(tokenizer, CharTokenizer):
        entries = plain.write(piece, data.val_fraction, tokenizer, folder, tell)
        if entries is not None:
            return {name: [asdict(entry) for entry in written] for name, written in entries.items()}
    train, val = (_Split(name, piece, tokenizer, folder) for name in ("train", "val"))
    if piece.kind in ("train", "val"):
        _rewrite(piece, train if piece.kind == "train" else val, tokenizer, tell)
        return {split.name: [asdict(entry) for entry in split.entries] for split in (train, val)}
    seen = tokens = read = 0
    for batch in _batches(_dealt(piece, data)):
        texts = [text for text, _, _ in batch]
        for (text, begins, is_val), ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
            (val if is_val else train).add(ids, begins)
            seen, tokens, read = seen + begins, tokens + len(ids), read + len(text)
        tell(seen, tokens, read)
    train.flush()
    val.flush()
    return {split.name: [asdict(entry) for entry in split.entries] for split in (train, val)}


def _rewrite(piece: Piece, split: _Split, tokenizer: Tokenizer, tell: Tell) -> None:
    """Write the tokens of somebody else's shard as ours."""
    whole = Tokens([shards.examine(piece.path)])
    for start in range(piece.start, piece.stop, shards.SHARD_TOKENS):
        part = whole[start : min(piece.stop, start + shards.SHARD_TOKENS)]
        if int(part.max()) >= tokenizer.vocab_size or int(part.min()) < 0:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the shard {piece.path} has token "
                f"{int(part.max()):,}: it was made with another tokenizer, which has to be named"
            )
        split.add_as_is(part)
        split.flush()
        tell(0, start - piece.start + len(part), 0)


def _dealt(piece: Piece, data: DataConfig) -> Iterator[tuple[str, bool, bool]]:
    """Yield chunks of text, whether a document begins with them, and whether they are for validation.

    Of a text its end is, in characters; of many documents every (1 / val_fraction)-th, as many of each piece.
    """
    share = data.val_fraction
    for number, document in enumerate(documents(piece, data)):
        if piece.kind in ("text", "sample"):
            cut = int(len(document.text) * (1 - share))
            yield from ((text, begins, False) for text, begins in chunks(document, 0, cut))
            yield from ((text, False, True) for text, _ in chunks(document, cut, len(document.text)))
        else:
            is_val = int((number + 1) * share) > int(number * share)
            yield from ((text, begins, is_val) for text, begins in chunks(document, 0, len(document.text)))


def chunks(document: Document, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    """Yield ``document.text[start:stop]`` in parts, cut at the ends of lines, and whether the document begins there."""
    begins = document.begins and start == 0
    while stop - start > CHUNK:
        cut = _end_of_line(document.text, start + CHUNK // 2, start + CHUNK)
        yield document.text[start:cut], begins
        start, begins = cut, False
    if stop > start:
        yield document.text[start:stop], begins


def _end_of_line(text: str, first: int, last: int) -> int:
    """Return where to cut: before a line that does not begin with a blank, so that no tokenizer would merge over it."""
    cut = last
    while (cut := text.rfind("\n", first, cut)) >= 0:
        if not text[cut + 1].isspace():
            return cut + 1
    return last


def _batches(chunks: Iterable[tuple[str, bool, bool]]) -> Iterator[list[tuple[str, bool, bool]]]:
    batch, size = [], 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Reporter:
    """Passes on how far a piece is, not too often."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say, self._last = say, 0.0

    def __call__(self, seen: int, tokens: int, read: int) -> None:
        self.latest = [seen, tokens, read]
        if (now := time.monotonic()) - self._last > TELL_S:
            self._last = now
            self._say({"so far": self.latest})


def main() -> int:
    """Serve the process that started this one, until it closes the pipe."""

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    job = json.loads(sys.stdin.readline())
    data = DataConfig(**job["data"])
    try:
        for line in sys.stdin:
            report = _Reporter(say)
            report.latest = [0, 0, 0]
            run(job["task"], Piece(**json.loads(line)), data, Path(job["folder"]), report)
            say({"done": report.latest})
    except UserError as error:
        say({"error": str(error)})
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    except OSError as error:
        say({"error": f"cannot write to {error.filename or job['folder']}: {error.strerror}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
