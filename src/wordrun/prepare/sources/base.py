"""What a source of text is, and the work items into which it is divided.

The division depends on the files and on data.shard_mb alone, never on the number of ranks. So ranks and processes can
distribute the items among themselves in any way, and the result is always the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wordrun.config import DataConfig, TokenizerConfig
from wordrun.data import tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.errors import ConfigError
from wordrun.files import absolute


@dataclass(frozen=True)
class WorkItem:
    """A part of a source that one process reads."""

    number: int
    kind: str
    """text, jsonl, packed (a compressed .jsonl), parquet or hf; for shards of others train or val."""
    path: str = ""
    start: int = 0
    """Bytes; for parquet row groups, for hf the shard of the stream or the first row, for shards tokens."""
    stop: int = 0
    size: int = 0
    """Bytes to be read, as far as they are known: the largest items are processed first."""


@dataclass(frozen=True)
class Document:
    """A text, or a part of one that is too long for a work item."""

    text: str
    begins: bool = True
    """Whether it is the beginning of the text."""


@dataclass(frozen=True)
class Source:
    """Text that has been located. Each data.kind is a subclass, which overrides what differs."""

    data: DataConfig
    path: str | None
    """The file, folder or glob; None: it is neither."""
    origin: str
    """Where it came from, for the log and for run.json."""
    banner: str | None = None
    """A warning beside all results, if the text is not the one that was requested."""

    is_tokens: ClassVar[bool] = False
    """Whether the source consists of tokens, which can be read without preparation."""

    @classmethod
    def locate(cls, data: DataConfig) -> Source:
        """Return the source of ``data``, downloading it if need be; by default what data.path names."""
        path = str(absolute(str(data.path)))
        return cls(data, path, path)

    def files(self) -> list[Path] | None:
        """Return its files on this machine, in an order that is always the same; None: it has none."""
        return None

    def size(self) -> int | None:
        """Return its size in bytes; None: unknown."""
        files = self.files()
        return None if files is None else sum(path.stat().st_size for path in files if path.is_file())

    def state(self) -> str | None:
        """Return a hash that changes with the content, for the fingerprint; None: there is none."""
        files = self.files()
        return None if files is None else state_of(files, Path("/"))

    def revision(self) -> str | None:
        """Return which state of the source is prepared, for the manifest."""
        return self.state()

    def items(self) -> list[WorkItem]:
        """Return the work items; only the names, sizes and tables of contents of files are read."""
        raise NotImplementedError

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the texts of ``item``; empty ones are left out.

        Raises:
            ConfigError: the file is damaged, binary, not UTF-8, or lacks the field.
        """
        raise NotImplementedError

    def single_text(self) -> WorkItem | None:
        """Return the work item that has the complete source; None: it consists of several documents."""
        return None

    def tokenizer(self, cfg: TokenizerConfig) -> Tokenizer | None:
        """Return the tokenizer; None: it is made from the text."""
        return None if tokenizers.needs_text(cfg) else tokenizers.build(cfg)


def cleaned(texts: Iterable[str | None]) -> Iterator[Document]:
    """Yield the ``texts`` that are not empty, without what UTF-8 cannot encode (JSON may hold "\\ud800")."""
    for text in texts:
        if text:
            yield Document(text if text.isascii() else text.encode("utf-8", "replace").decode())


def state_of(paths: Iterable[Path], root: Path) -> str:
    """Return a hash of the names relative to ``root``, sizes and modification times of files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with contextlib.suppress(OSError):  # reading a missing file reports it
            stat = path.stat()
            digest.update(f"{os.path.relpath(path, root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def optional(module: str, user: str) -> Any:
    """Import a module of an optional dependency, which ``user`` needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{user} needs {module.partition('.')[0]}: pip install 'wordrun[hf]'") from None
