"""Writes shards and manifests, each file atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wordrun.common.errors import UserError
from wordrun.data import manifest as manifests, shards
from wordrun.data.options import ANSWERED
from wordrun.data.prepare.sources.base import WorkItem
from wordrun.data.shards import ANSWER, START
from wordrun.data.tokenizers.base import Ids, Tokenizer

SHARD_TOKENS = 2**26
"""Maximum tokens per shard, except to complete a document; the header's limit is 2^31."""
GROUP = 16
"""Number of token arrays to convert and write at once."""


class SplitWriter:
    """Writes the shards that a work item contributes to one split.

    A shard ends with the document in which it reaches ``shard_tokens``.
    """

    def __init__(
        self,
        name: str,
        item: WorkItem,
        tokenizer: Tokenizer,
        folder: Path,
        kind: str = "file",
        *,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.name, self.item, self.folder, self.shard_tokens = name, item, folder, shard_tokens
        self._eot = None if tokenizer.eot is None else np.array([tokenizer.eot])
        self._kind = kind
        if kind == "chat":  # the template writes all tokens
            self._eot = None
        elif kind == "pairs" and self._eot is not None:
            self._eot = self._eot.astype(np.uint32) | START | ANSWER  # as a target, it ends the answer before it
        self.dtype = shards.dtype_for(tokenizer.vocab_size, flags=kind in ANSWERED)
        self._entries: list[manifests.Entry] = []
        self._parts: list[Ids] = []
        self._starts: list[int] = []
        self._count = self._predicted = self._bytes = 0

    def add(self, tokens: Ids, begins: bool, answers: bool | NDArray[np.bool_] = False, *, text: str = "") -> None:
        """Append tokens, after an end-of-text token if ``begins``.

        Args:
            tokens: (T,)
            begins: whether they begin a document.
            answers: whether they are an answer; for a conversation, which of them are in one, (T,).
            text: what is predicted of their text.
        """
        flags = np.broadcast_to(answers, len(tokens))
        predicted = int(flags.sum()) if self._kind in ANSWERED else len(tokens)
        self._predicted += predicted
        self._bytes += len(text.encode()) if predicted else 0
        if begins:
            if self._count >= self.shard_tokens:
                self._flush()
            self._starts.append(self._count)
            if self._eot is not None:
                self._append(self._eot)
                self._predicted += 1
        if flags.any():
            tokens = np.where(flags, tokens.astype(np.uint32) | ANSWER, tokens.astype(np.uint32))
        if begins and self._kind == "chat":
            tokens[0] |= START
        self._append(tokens)

    def add_shard(self, tokens: Ids) -> None:
        """Write a shard of tokens that already include the end-of-text tokens."""
        if self._eot is not None:
            self._starts += np.flatnonzero(tokens == self._eot).tolist()
        self._append(tokens)
        self._flush()

    def finish(self) -> list[manifests.Entry]:
        """Write the remaining tokens and return the entries of all shards."""
        self._flush()
        return self._entries

    def _flush(self) -> None:
        if self._count:
            path = self.folder / f"{self.name}_{self.item.number:06d}_{len(self._entries):02d}.bin"
            entry = write_shard(path, self._parts, self.dtype, self._starts)
            self._entries.append(replace(entry, predicted=self._predicted, bytes=self._bytes))
        self._parts, self._starts, self._count, self._predicted, self._bytes = [], [], 0, 0, 0

    def _append(self, tokens: Ids) -> None:
        self._parts.append(tokens)
        self._count += len(tokens)


def write_shard(path: Path, parts: Sequence[Ids], dtype: str, starts: Sequence[int] = ()) -> manifests.Entry:
    """Write a shard and the positions of its documents, and return its manifest entry.

    Args:
        path: path of the shard.
        parts: its tokens.
        dtype: token type from ``shards.dtype_for``.
        starts: number of tokens before each document that begins in the shard.
    """
    # Write the documents file first, so that every shard has one.
    _write(path.with_suffix(".docs"), [np.array(starts, dtype="<u4").data])
    count = sum(map(len, parts))
    (kind,) = (key for key, value in shards.FORMATS.items() if value == dtype)
    header = np.zeros(shards.HEADER, dtype="<i4")
    header[:3] = (*kind, count)
    # In groups: allocating one array for all tokens would cost more than the conversion itself.
    groups = (parts[i : i + GROUP] for i in range(0, len(parts), GROUP))
    converted = (np.concatenate(group, dtype=dtype, casting="unsafe").data for group in groups)
    return manifests.Entry(path.name, count, len(starts), _write(path, chain([header.data], converted)))


def save(folder: Path, manifest: manifests.Manifest) -> None:
    """Write the manifest, which completes ``folder``."""
    write_text(folder / manifests.NAME, json.dumps(asdict(manifest), indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file."""
    _write(path, [content.encode()])


def make_folder(folder: Path) -> Path:
    """Create ``folder``, check that this process can write to it, and return it.

    Raises:
        UserError: if it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write prepared data to {folder}: {error.strerror}. Choose another folder with data.prepared=DIR, "
            "or with $WORDRUN_DATA_HOME"
        ) from None
    return folder


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file durably (once it has its name, it survives a machine crash) and return its checksum."""
    digest = shards.checksum()
    new = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        with open(new, "wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return digest.hexdigest()
