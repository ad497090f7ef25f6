"""The index of a checkpoint: shape and type of each tensor, and where its shards are.

A few numbers (``Sharding``) determine all shards of a tensor, so that the index does not grow with the number of ranks.
Indexes of formats up to 3 list every shard.

Checkpoints come from anywhere, so an index is checked in full before it is used: a wrong one leads to an error, never
to a large allocation or to a file outside the checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.checkpoint import torch_format
from wordrun.checkpoint.folder import DamagedError, file_of
from wordrun.checkpoint.sharding import Box, Cut, Sharding
from wordrun.common.errors import first_line

INDEX = "tensors.json"
FILE = re.compile(r"\w[\w.-]*", re.ASCII)
MAX_DIMS, MAX_SIZE, MAX_RANKS = 32, 2**48, 2**24
# The dimensions along which a tensor is cut into shards: one for each axis of a layout that shards it.
MAX_CUTS = 3


@dataclass(frozen=True)
class StoredShard:
    """A part of a tensor, and its location on disk."""

    file: str
    offset: tuple[int, ...]
    """Where the shard begins in the full tensor."""
    shape: tuple[int, ...]
    span: tuple[int, ...] = ()
    """In torch's format: offset and length of the shard in the file, in bytes."""


@dataclass(frozen=True)
class Divided:
    """The shards of a tensor that the ranks have divided by a ``Sharding``."""

    sharding: Sharding
    """The sharding of the tensor including padding, which is not stored."""
    first: int
    """The rank whose file contains the first shard."""

    def overlapping(self, window: Box, shape: Sequence[int]) -> Iterator[StoredShard]:
        """Yield the shards of a tensor of ``shape`` that share elements with ``window``."""
        for number, box in self.sharding.overlapping(window):
            if (part := box.within(shape)).numel or not math.prod(shape):
                yield StoredShard(file_of(self.first + number), part.offset, part.shape)

    def plain(self, shape: Sequence[int]) -> dict[str, Any]:
        """Return the entries of the index."""
        padded = {} if self.sharding.shape == tuple(shape) else {"padded": self.sharding.shape}
        return {"first": self.first, "cuts": self.sharding.cuts, **padded}


@dataclass(frozen=True)
class Listed:
    """Shards of any shape, listed one by one, as in indexes of formats up to 3."""

    shards: Sequence[StoredShard]

    def overlapping(self, window: Box, shape: Sequence[int]) -> Iterator[StoredShard]:
        """Yield all shards: the reader compares each with its window."""
        yield from self.shards


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint; each of its elements is in exactly one shard."""

    shape: torch.Size
    dtype: torch.dtype
    division: Divided | Listed
    folder: Path = field(default=Path(), compare=False)
    key: str = field(default="", compare=False)
    """Its name in the files; empty: the same as in the index."""

    @property
    def shards(self) -> list[StoredShard]:
        """All shards."""
        return list(self.overlapping(self._whole))

    @property
    def _whole(self) -> Box:
        return Box((0,) * len(self.shape), tuple(self.shape))

    def overlapping(self, window: Box) -> Iterator[StoredShard]:
        """Yield the shards that share elements with ``window``, and perhaps others."""
        return self.division.overlapping(window, self.shape)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor of this shape and type on the CPU, if the files are large enough.

        Raises:
            DamagedError: they are not.
        """
        try:
            for shard in self.overlapping(self._whole):  # ends at the first file that is missing
                _check_size(self.folder, shard.file, math.prod(shard.shape) * self.dtype.itemsize)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{self.folder} is damaged: {first_line(error)}") from None
        return torch.empty(self.shape, dtype=self.dtype)

    def plain(self) -> dict[str, Any]:
        """Return the entry of the index."""
        assert isinstance(self.division, Divided)
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": self.shape, **self.division.plain(self.shape)}


def load(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint ``folder`` by name.

    Raises:
        DamagedError: the index is missing, invalid, or contradicts the sizes of the files; the message names it.
    """
    is_torchs = not (folder / INDEX).exists() and (folder / torch_format.METADATA).exists()
    name = torch_format.METADATA if is_torchs else INDEX
    try:
        content = (folder / name).read_bytes()
        plain: dict[str, Any] = torch_format.parse(content) if is_torchs else json.loads(content)
        found = {name: _tensor(name, facts, folder) for name, facts in plain.items()}
        _check_room(folder, found)
    except Exception as error:  # the file may contain anything
        raise DamagedError(f"{folder} is damaged: {name}: {first_line(error)}") from None
    return found


def _tensor(name: str, facts: Mapping[str, Any], folder: Path) -> StoredTensor:
    shape, dtype = _sizes(facts["shape"]), getattr(torch, facts["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch")
    if "cuts" in facts:
        return StoredTensor(torch.Size(shape), dtype, _divided(name, facts, shape), folder)
    shards = []
    for each in facts["shards"]:
        shard = StoredShard(each["file"], _sizes(each["offset"]), _sizes(each["shape"]), _sizes(each.get("span", [])))
        if not FILE.fullmatch(shard.file):
            raise ValueError(f"{shard.file!r} is not the name of a file in the checkpoint")
        if any(at + n > most for at, n, most in zip(shard.offset, shard.shape, shape, strict=True)):
            raise ValueError(f"a shard of {name} exceeds the tensor")
        shards.append(shard)
    if not _tile(shards, shape):
        raise ValueError(f"the shards of {name} do not cover it exactly")
    return StoredTensor(torch.Size(shape), dtype, Listed(shards), folder)


def _divided(name: str, facts: Mapping[str, Any], shape: tuple[int, ...]) -> Divided:
    padded, cuts = _sizes(facts.get("padded", list(shape))), [Cut(*_sizes(cut)) for cut in facts["cuts"]]
    (first,) = _sizes([facts["first"]])
    if len(padded) != len(shape) or any(n > most for n, most in zip(shape, padded, strict=True)):
        raise ValueError(f"{name} does not fit its padded shape {list(padded)}")
    last = first + sum((cut.shards - 1) * cut.stride for cut in cuts)
    if (
        len(cuts) > MAX_CUTS
        or last >= MAX_RANKS
        or any(cut.dim >= len(shape) or cut.shards < 1 or cut.stride < 1 for cut in cuts)
    ):
        raise ValueError(f"the sharding of {name} is invalid: {facts['cuts']!r:.60}")
    return Divided(Sharding(padded, tuple(cuts)), first)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError(f"{str(value)[:60]} is not a list of sizes")
    if not all(type(size) is int and 0 <= size < MAX_SIZE for size in value):
        raise ValueError(f"{value!r} contains an invalid size")
    return tuple(value)


def _tile(shards: Sequence[StoredShard], shape: tuple[int, ...]) -> bool:
    """Return whether ``shards`` cover ``shape`` without gaps or overlaps, in time linear in their number.

    The corners of each box get alternating signs, so that those of adjacent boxes cancel. Exactly if the boxes cover
    each point of ``shape`` once, only the corners of ``shape`` remain.
    """
    cut = [axis for axis, size in enumerate(shape) if any(shard.shape[axis] != size for shard in shards)]
    if len(cut) > MAX_CUTS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(1, shard.offset, shard.shape) for shard in shards]
    for sign, offset, size in [*boxes, (-1, (0,) * len(shape), shape)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offset[axis] + end * size[axis] for axis, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _check_room(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the files are large enough for the shards that are listed: nothing larger is allocated."""
    needed: Counter[str] = Counter()
    for tensor in tensors.values():
        for shard in tensor.division.shards if isinstance(tensor.division, Listed) else ():
            needed[shard.file] += math.prod(shard.shape) * tensor.dtype.itemsize
    for file, size in needed.items():
        _check_size(folder, file, size)


def _check_size(folder: Path, file: str, size: int) -> None:
    if (folder / file).stat().st_size < size:
        raise ValueError(f"{file} is too small for the {size:,} bytes of its shards")
