"""Copies shards to each node's local disk, once per node; copies are verified, and resumed after interruptions."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from wordrun.common.errors import UserError
from wordrun.common.files import absolute
from wordrun.data import manifest as manifests, shards

BLOCK = 2**22
"""Bytes per read and write."""


def target(folder: Path, stage: str) -> Path:
    """Return the path for the copy of ``folder`` under data.stage."""
    digest = hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
    return absolute(stage) / f"{folder.name}-{digest}"


def is_complete(folder: Path, to: Path) -> bool:
    """Return whether ``to`` is a complete copy of ``folder``."""
    try:
        return (to / manifests.NAME).read_bytes() == (folder / manifests.NAME).read_bytes()
    except OSError:
        return False


def copy(folder: Path, to: Path, show: Callable[[float], None] = lambda share: None) -> None:
    """Copy the prepared data set from ``folder`` to ``to``; one process per node calls this.

    Every shard is checked against its checksum in the manifest. Shards copied earlier are kept. The manifest is copied
    last: a copy without it is incomplete.

    Args:
        folder: a folder of shards with a manifest.
        to: a folder on the node's local disk or in its memory.
        show: called with the copied share, 0 to 1.

    Raises:
        UserError: if there is too little space, the folder cannot be written to, or a shard is damaged.
    """
    manifest = manifests.load(folder)
    entries, width = [*manifest.train, *manifest.val], int(manifest.dtype[-1])
    size = {entry.file: 4 * shards.HEADER + entry.tokens * width for entry in entries}
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / manifests.NAME).unlink(missing_ok=True)
        for old in to.glob(".*"):
            old.unlink()
        # A file gets its final name only after verification.
        present = {file.name: file.stat().st_size for file in os.scandir(to)}
        missing = [entry for entry in entries if present.get(entry.file) != size[entry.file]]
        left = sum(size[entry.file] for entry in missing)
        free = shutil.disk_usage(to).free
        if free < left:
            raise UserError(
                f"data.stage={to.parent} has {free / 2**30:.1f} GiB of free space, but the shards of {folder} need "
                f"{left / 2**30:.1f} GiB more: name a larger disk, or leave data.stage out"
            )
        for entry in missing:
            docs = Path(entry.file).with_suffix(".docs").name
            _copy(folder / docs, to / docs, None)
            _copy(folder / entry.file, to / entry.file, entry.xxh3)
            left -= size[entry.file]
            show(1 - left / sum(size.values()))
        for name in (manifests.TOKENIZER, manifests.NAME):
            _copy(folder / name, to / name, None)
    except OSError as error:
        raise UserError(
            f"cannot copy {folder} to data.stage={to.parent}: {error.strerror} ({error.filename}). Name a folder that "
            "can be written to, or leave data.stage out"
        ) from None


def _copy(source: Path, to: Path, checksum: str | None) -> None:
    """Copy a file completely or not at all."""
    digest = shards.checksum()
    new = to.with_name(f".{to.name}")
    with open(source, "rb") as read, open(new, "wb") as write:
        while block := read.read(BLOCK):
            digest.update(block)
            write.write(block)
    if checksum is not None and digest.hexdigest() != checksum:
        raise UserError(
            f"the shard {source} is damaged: its checksum is {digest.hexdigest()[:12]}, but the manifest says "
            f"{checksum[:12]}; prepare the data again"
        )
    new.replace(to)
