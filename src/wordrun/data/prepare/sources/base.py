"""The interface of text sources, and the work items they are divided into.

The division depends only on the files and data.shard_mb, never on the number of ranks. So the result is the same
however the items are distributed over ranks and processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.common.files import absolute
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Span, Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig

BOM = "\ufeff"
"""The byte-order mark, at the beginning of a file or between files that were joined; it is not part of the text."""


@dataclass(frozen=True)
class WorkItem:
    """A part of a source, read by one process."""

    number: int
    kind: str
    """text, jsonl, json, csv, parquet or hf; for foreign shards, train or val."""
    path: str = ""
    start: int = 0
    """In bytes; parquet: in row groups; hf: in rows, or shards of a stream; foreign shards: in tokens."""
    stop: int = 0
    size: int = 0
    """Bytes to read, as far as known: the largest items are processed first."""
    packing: str = ""
    """The compression of the file; a compressed file is a single item."""
    split: str = ""
    """train or val: the split of the whole item; empty: it is divided by data.val_fraction."""


@dataclass(frozen=True)
class Document:
    """A text, or a part of a text too long for one work item."""

    text: str
    begins: bool = True
    """Whether this is the beginning of the text."""
    answers: bool = False
    """Whether it is an answer, which is predicted; the document before it is the prompt."""
    spans: tuple[Span, ...] | None = None
    """For a conversation, which a template has written with special tokens: the text that is predicted."""
    fault: tuple[str, str] | None = None
    """For a row without text: the reason, by which such rows are counted, and a message that names the row."""


@dataclass(frozen=True)
class Source:
    """A located text. Each data.kind has a subclass that overrides what differs."""

    data: TextConfig
    path: str | None
    """The file, folder or glob; None for other sources."""
    origin: str
    """Origin of the text, for the log and run.json."""
    banner: str | None = None
    """A warning to show with all results if this is not the requested text."""

    is_tokens: ClassVar[bool] = False
    """Whether the source already consists of tokens and needs no preparation."""

    @classmethod
    def locate(cls, data: TextConfig) -> Source:
        """Return the source of ``data``, downloading it if necessary; the default implementation uses data.path."""
        path = str(absolute(str(data.path)))
        return cls(data, path, path)

    def files(self) -> list[Path] | None:
        """Return its files on this machine in a fixed order, or None if it has none."""
        return None

    def left_out(self) -> list[str]:
        """Return the files that are left out because nothing can be read from them, each with the reason."""
        return []

    def files_read(self) -> str:
        """Return how many files of which types are read; empty: unknown."""
        return ""

    def splits(self) -> dict[Path, str]:
        """Return the split of each file (train, val or test) if their names divide the source; else nothing."""
        return {}

    def size(self) -> int | None:
        """Return its size in bytes, or None if unknown."""
        files = self.files()
        return None if files is None else sum(path.stat().st_size for path in files if path.is_file())

    def state(self) -> str | None:
        """Return a hash that changes with the content, for the fingerprint, or None if there is none."""
        files = self.files()
        return None if files is None else state_of(files, Path("/"))

    def revision(self) -> str | None:
        """Return the version of the source, for the manifest."""
        return self.state()

    def items(self) -> list[WorkItem]:
        """Return the work items; reads only file names, sizes and tables of contents."""
        raise NotImplementedError

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the texts of ``item``, and a document with a fault for each row without text.

        Raises:
            ConfigError: if the file is damaged, binary or not UTF-8.
        """
        raise NotImplementedError

    def single_text(self) -> WorkItem | None:
        """Return the work item for the complete source, or None if it has several documents."""
        return None

    def beginning(self, item: WorkItem, characters: int) -> WorkItem:
        """Return a work item with at least the first ``characters`` of ``item``, if that is less to read."""
        return item

    def with_tokenizer(self, tokenizer: Tokenizer) -> Source:
        """Return the source whose documents are for ``tokenizer``."""
        return self

    def tokenizer(self, cfg: TokenizerConfig) -> Tokenizer | None:
        """Return the tokenizer, or None if it is built from the text."""
        return None if cfg.built_from else tokenizers.build(cfg)


class BadRowError(ConfigError):
    """A row has no text: it is left out and counted, or an error with data.strict.

    Args:
        reason: the reason, by which such rows are counted.
        message: the message, which names the row.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.fault = reason, message

    def as_document(self) -> Document:
        """Return the document that stands for the row."""
        return Document("", begins=False, fault=self.fault)


def required(text: str | None, where: str, what: str = "text") -> str:
    """Return ``text`` without byte-order marks, and without what UTF-8 cannot encode (JSON may contain "\\ud800").

    Raises:
        BadRowError: it is null or empty.
    """
    if text is None:
        raise BadRowError("null", f"{where} has null as {what}")
    if not text.isascii():
        text = text.replace(BOM, "").encode("utf-8", "replace").decode()
    if not text:
        raise BadRowError("empty", f"{where} has an empty {what}")
    return text


def state_of(paths: Iterable[Path], root: Path) -> str:
    """Return a hash of the files' names relative to ``root``, sizes and modification times."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with contextlib.suppress(OSError):  # a missing file is reported when it is read
            stat = path.stat()
            digest.update(f"{os.path.relpath(path, root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            if not os.access(path, os.R_OK):  # the text changes when it becomes readable
                digest.update(b"unreadable\n")
    return digest.hexdigest()
