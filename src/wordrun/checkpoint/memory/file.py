"""Writes a rank's file of shards in two parts: training waits while the tensors are copied; the checksums follow.

The file has the format of ``shards.write``, and is in a file system in memory. Tensors are written directly into it, so
that host memory holds no second copy. Writing takes half the time of copying into a mapped file, whose pages have to be
cleared and cause a fault each.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from wordrun.checkpoint import checksums
from wordrun.checkpoint.folder import file_of
from wordrun.checkpoint.index import StoredTensor
from wordrun.checkpoint.shards import TensorShard

# safetensors' names of types; the name of any other type is a letter and its number of bits.
TYPES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
ALIGNMENT = 8
# Bytes that are copied from an accelerator at once.
CHUNK = 2**26


@dataclass(frozen=True)
class _Entry:
    """A shard in the file."""

    name: str
    dtype: str
    facts: str
    """What the header says about the shard, as JSON without the closing bracket."""
    size: tuple[int, ...]
    begin: int
    """The position of its bytes, after the header."""
    end: int


def size_of(shards: Sequence[TensorShard]) -> int:
    """Return the bytes of ``shards`` in a file, without its header."""
    return sum(shard.data.numel() * shard.data.element_size() for shard in shards)


def write(
    folder: Path, shards: Sequence[TensorShard], rank: int, tensors: Mapping[str, StoredTensor]
) -> Callable[[], None]:
    """Copy ``shards`` into the file of ``rank`` in ``folder``; return a function that completes it, in any thread.

    Args:
        folder: an existing folder.
        shards: what this rank writes.
        rank: this rank.
        tensors: where all shards of each tensor are, as in ``shards.write``.

    Raises:
        OSError: there is not enough space.
    """
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(shards, key=lambda shard: -shard.data.element_size())
    entries: list[_Entry] = []
    end = 0
    for shard in ordered:
        dtype = str(shard.data.dtype).removeprefix("torch.")
        facts = {"dtype": dtype, "shape": shard.shape, "offset": shard.offset, "size": shard.data.shape}
        begin, end = end, end + size_of([shard])
        entries.append(_Entry(shard.name, dtype, json.dumps(facts)[:-1], tuple(shard.data.shape), begin, end))
    text = json.dumps({name: tensor.plain() for name, tensor in tensors.items()})
    start = len(_header(entries, text, [0] * len(entries)))
    path = folder / file_of(rank)
    with created(path) as file:
        file.truncate(start + end)
        file.seek(start)
        for shard in ordered:
            _write(file, shard.data)
    return partial(_complete, path, entries, text, start)


def _complete(path: Path, entries: Sequence[_Entry], text: str, start: int) -> None:
    """Write the header, with the checksums of the tensors that the file holds."""
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as view:
            crcs = [zlib.crc32(view[start + entry.begin : start + entry.end]) for entry in entries]
        file.write(_header(entries, text, crcs))
    checksums.seal(path)


def _header(entries: Sequence[_Entry], text: str, crcs: Sequence[int]) -> bytes:
    """Return what precedes the tensors. Its length does not depend on the checksums: JSON allows spaces before them."""
    shards = ", ".join(
        f'{json.dumps(entry.name)}: {entry.facts}, "crc32": {crc:10d}}}'
        for entry, crc in zip(entries, crcs, strict=True)
    )
    described = {"format": "pt", "shards": f"{{{shards}}}", "tensors": text, "crc32": checksums.UNSEALED}
    tensors = {
        entry.name: {"dtype": _type(entry.dtype), "shape": entry.size, "data_offsets": (entry.begin, entry.end)}
        for entry in entries
    }
    header = json.dumps({"__metadata__": described, **tensors}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _type(dtype: str) -> str:
    """Return how safetensors names a type of torch's: int64 is I64."""
    return TYPES.get(dtype) or dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")


def _write(file: BinaryIO, data: Tensor) -> None:
    """Write the bytes of a tensor; from an accelerator they come in parts, through host memory."""
    for part in data.detach().contiguous().view(-1).view(torch.uint8).split(CHUNK):  # type: ignore[no-untyped-call]
        rest = memoryview(part.cpu().numpy())
        while rest:
            rest = rest[file.write(rest) :]


@contextmanager
def created(path: Path) -> Iterator[BinaryIO]:
    """Create a file for a ``with`` block, without a buffer; an error removes it."""
    with path.open("xb", buffering=0) as file:
        try:
            yield file
        except BaseException:
            path.unlink(missing_ok=True)
            raise
