"""What a folder of prepared shards says of itself: ``manifest.json``, written last, without which it is not whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun.data import shards
from wordrun.data.shards import Shard, Tokens
from wordrun.data.tokenizers import Tokenizer, from_json
from wordrun.errors import ConfigError

NAME = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Entry:
    """A shard."""

    file: str
    tokens: int
    documents: int
    """Documents that begin in it; where, says the file of the same name with .docs: uint32, little-endian."""
    xxh3: str
    """Of the whole file, 128 bits (as ``xxhsum -H128`` prints them)."""


@dataclass(frozen=True)
class Manifest:
    """A prepared data set."""

    name: str
    origin: str
    """Where the text came from."""
    revision: str | None
    """Which state of it: a commit of the hub, or a hash of the files' names, sizes and times."""
    settings: dict[str, Any]
    """The options that the shards depend on."""
    vocab_size: int
    eot: int | None
    tokenizer_sha256: str
    train: list[Entry] = field(default_factory=list)
    val: list[Entry] = field(default_factory=list)

    def tokens(self, split: str) -> int:
        """Return the number of tokens of a split."""
        return sum(entry.tokens for entry in getattr(self, split))

    def documents(self, split: str) -> int:
        """Return the number of documents that begin in a split."""
        return sum(entry.documents for entry in getattr(self, split))


def write_shard(path: Path, starts: Sequence[int], parts: Iterable[memoryview], count: int, dtype: str) -> Entry:
    """Write a shard and where its documents begin, and return its entry.

    Args:
        path: of the shard.
        starts: tokens before each document that begins in it.
        parts: its tokens, of type ``dtype``.
        count: how many there are.
        dtype: as ``shards.dtype_for`` says.
    """
    # Written last, so that no shard is without its documents.
    shards.write_bytes(path.with_suffix(".docs"), np.array(starts, dtype="<u4").tobytes())
    return Entry(path.name, count, len(starts), shards.write_parts(path, parts, count, dtype))


def save(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes ``folder`` a whole data set."""
    shards.write_bytes(folder / NAME, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def load(folder: Path) -> Manifest:
    """Return the manifest of ``folder``.

    Raises:
        ConfigError: there is none, so that the folder is not whole, or it is not one of ours.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {split: [Entry(**entry) for entry in content[split]] for split in SPLITS}
        return Manifest(**{f.name: content[f.name] for f in fields(Manifest)} | entries)
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {NAME}: its preparation did not come to its end; run it again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}): prepare the data again") from None


def tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer of the shards in ``folder``.

    Raises:
        ConfigError: it is not the one that they were made with.
    """
    path = folder / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Prepare the data again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != manifest.tokenizer_sha256:
        raise ConfigError(
            f"{path} is not the tokenizer of the shards beside it (sha256 {found[:12]}, the manifest says "
            f"{manifest.tokenizer_sha256[:12]}): copy the right one there, or prepare the data again"
        )
    return from_json(content.decode())


def split(folder: Path, manifest: Manifest, name: str, *, look: bool = True) -> Tokens:
    """Return the tokens of the split ``name``.

    Args:
        folder: of the shards.
        manifest: theirs.
        name: train or val.
        look: compare every file's header and size with the manifest. One rank is enough for that; the others look at
            a shard when they first need it.
    """
    dtype = shards.dtype_for(manifest.vocab_size)
    entries = getattr(manifest, name)
    if look:
        return Tokens([shards.examine(folder / entry.file, entry.tokens) for entry in entries])
    offset = 4 * shards.HEADER
    return Tokens([Shard(str(folder / entry.file), dtype, offset, entry.tokens) for entry in entries])


def verify(folder: Path, manifest: Manifest) -> list[str]:
    """Return a message for each shard whose content is not what was written."""
    problems = []
    for entry in [*manifest.train, *manifest.val]:
        try:
            with open(folder / entry.file, "rb") as file:
                digest = shards.checksum()
                while block := file.read(2**22):
                    digest.update(block)
            found = digest.hexdigest()
        except OSError as error:
            problems.append(f"{folder / entry.file} cannot be read: {error.strerror}")
            continue
        if found != entry.xxh3:
            problems.append(
                f"{folder / entry.file} is damaged: its checksum is {found[:12]}, the manifest says {entry.xxh3[:12]}"
            )
    return problems


def document_starts(folder: Path, entry: Entry) -> NDArray[np.uint32]:
    """Return where in the shard ``entry`` documents begin."""
    return np.fromfile((folder / entry.file).with_suffix(".docs"), dtype="<u4")
