"""``manifest.json`` describes a folder of prepared shards. It is written last: a folder without it is incomplete."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.data import shards
from wordrun.data.contents import few
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.construction import from_json

NAME = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Entry:
    """A shard."""

    file: str
    tokens: int
    documents: int
    """Number of documents that begin in the shard. Their positions are in its .docs file, as little-endian uint32."""
    xxh3: str
    """128-bit checksum of the file, as printed by ``xxhsum -H128``."""
    predicted: int = 0
    """Number of tokens that are predicted: all, or for pairs those of answers."""
    bytes: int = 0
    """UTF-8 bytes of the text of the predicted tokens; 0: unknown, as for tokens prepared elsewhere."""


@dataclass(frozen=True)
class Manifest:
    """A prepared data set."""

    name: str
    origin: str
    """Origin of the text."""
    revision: str | None
    """Version of the text: a hub commit, or a hash of file names, sizes and modification times."""
    settings: dict[str, Any]
    """The options that determine the shards."""
    vocab_size: int
    eot: int | None
    tokenizer_sha256: str
    train: list[Entry] = field(default_factory=list)
    val: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Files of the source that could not be used, each with the reason."""
    files_read: str = ""
    """How many files of which types were read."""
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Rows that were left out: their number for each reason, and a message that names the first."""

    @property
    def dtype(self) -> str:
        """The token type of the shards."""
        return shards.dtype_for(self.vocab_size, flags=self.settings["kind"] in ANSWERED)

    def tokens(self, split: str) -> int:
        """Return the number of tokens in a split."""
        return sum(entry.tokens for entry in getattr(self, split))

    def documents(self, split: str) -> int:
        """Return the number of documents that begin in a split."""
        return sum(entry.documents for entry in getattr(self, split))

    def bytes_per_token(self, split: str) -> float | None:
        """Return the bytes of the original text per predicted token of a split; None: unknown."""
        entries: list[Entry] = getattr(self, split)
        if not all(entry.bytes for entry in entries):
            return None
        return sum(entry.bytes for entry in entries) / sum(entry.predicted for entry in entries)


def described(faults: Mapping[str, tuple[int, str]]) -> str:
    """Return how many rows were left out for which reasons, each with a message that names the first."""
    total = sum(count for count, _ in faults.values())
    reasons = "; ".join(f"{count:,} {reason}: {first}" for reason, (count, first) in faults.items())
    return f"{total:,} row{'s' * (total != 1)} ({reasons})"


def check_left_out(
    data: TextConfig, names: Sequence[str], files_read: str = "", faults: Mapping[str, tuple[int, str]] | None = None
) -> None:
    """Log in one line what was read and what was left out: files that cannot be used, and rows without text.

    Raises:
        ConfigError: something was left out, and data.strict is set.
    """
    if names and data.strict:
        raise ConfigError(f"data.strict=true, but files cannot be used: {few(names)}. Repair or remove them")
    if faults and data.strict:
        raise ConfigError(f"data.strict=true, but rows have no text: {described(faults)}. Repair or remove them")
    parts = [f"read {files_read}"] if files_read else []
    if names:
        count = f"{len(names):,} files" if len(names) > 1 else "a file"
        parts.append(f"left out {count} that cannot be used: {few(names)}")
    if faults:
        parts.append(f"left out {described(faults)}")
    level = logging.WARNING if names or faults else logging.INFO
    if parts:
        LOGGER.log(level, "data=%s: %s", data.name, ", ".join(parts), extra=FIRST_RANK)


def is_complete(folder: Path) -> bool:
    """Return whether ``folder`` holds a completely prepared data set."""
    return (folder / NAME).exists()


def load(folder: Path) -> Manifest:
    """Return the manifest of ``folder``.

    Raises:
        ConfigError: if it is missing (the folder is incomplete) or not one of ours.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {split: [Entry(**entry) for entry in content[split]] for split in SPLITS}
        # Manifests of versions up to 0.1 lack these entries.
        content = {"left_out": [], "files_read": "", "faults": {}} | content
        return Manifest(**{f.name: content[f.name] for f in fields(Manifest)} | entries)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {NAME}: its preparation did not finish; run wordrun prepare again",
            page="data.md#preparing",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}): prepare the data again") from None


def tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer of the shards in ``folder``.

    Raises:
        ConfigError: if the shards were made with a different tokenizer.
    """
    path = folder / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Prepare the data again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != manifest.tokenizer_sha256:
        raise ConfigError(
            f"{path} is not the tokenizer of the shards beside it (sha256 {found[:12]}, but the manifest says "
            f"{manifest.tokenizer_sha256[:12]}): copy the right one there, or prepare the data again"
        )
    return from_json(content.decode(errors="replace"), path)


def split(folder: Path, manifest: Manifest, name: str, *, examine: bool = True) -> shards.Tokens:
    """Return the tokens of the split ``name``.

    Args:
        folder: the folder of shards.
        manifest: its manifest.
        name: train or val.
        examine: compare every file's header and size with the manifest. One rank per node is enough; the others
            check a shard when they first need it.
    """
    entries = getattr(manifest, name)
    if examine:
        return shards.Tokens([shards.examine(folder / entry.file, entry.tokens) for entry in entries])
    offset = 4 * shards.HEADER
    return shards.Tokens(
        [shards.Shard(str(folder / entry.file), manifest.dtype, offset, entry.tokens) for entry in entries]
    )


def verify(folder: Path, manifest: Manifest) -> list[str]:
    """Return a message for each shard that does not match its checksum."""
    problems = []
    for entry in [*manifest.train, *manifest.val]:
        path, digest = folder / entry.file, shards.checksum()
        try:
            with open(path, "rb") as file:
                while block := file.read(2**22):
                    digest.update(block)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        found, wanted = digest.hexdigest()[:12], entry.xxh3[:12]
        if digest.hexdigest() != entry.xxh3:
            problems.append(f"{path} is damaged: its checksum is {found}, but the manifest says {wanted}")
    return problems


def document_starts(folder: Path, entry: Entry) -> NDArray[np.uint32]:
    """Return the positions where documents begin in the shard ``entry``."""
    return np.fromfile((folder / entry.file).with_suffix(".docs"), dtype="<u4")
