"""The index of a checkpoint: shape and type of each tensor, and where its shards are.

A few numbers (``Sharding``) determine all shards of a tensor, so that the index does not grow with the number of ranks.

Checkpoints come from anywhere, so an index is checked in full before it is used: a wrong one leads to an error, never
to a large allocation or to a file outside the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.checkpoint.folder import DamagedError, file_of
from wordrun.checkpoint.sharding import Box, Cut, Sharding
from wordrun.common.errors import first_line

INDEX = "tensors.json"
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint; each of its elements is in exactly one shard."""

    shape: torch.Size
    dtype: torch.dtype
    sharding: Sharding
    """How the ranks have divided the tensor including padding, which is not stored."""
    first: int
    """The rank whose file contains the first shard."""
    folder: Path = field(default=Path(), compare=False)
    key: str = field(default="", compare=False)
    """Its name in the files; empty: the same as in the index."""

    @property
    def shards(self) -> list[StoredShard]:
        """All shards."""
        return list(self.overlapping(Box((0,) * len(self.shape), tuple(self.shape))))

    def overlapping(self, window: Box) -> Iterator[StoredShard]:
        """Yield the shards that share elements with ``window``."""
        for number, box in self.sharding.overlapping(window):
            if (part := box.within(self.shape)).numel or not math.prod(self.shape):
                yield StoredShard(file_of(self.first + number), part.offset, part.shape)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor of this shape and type on the CPU, if the files are large enough.

        Raises:
            DamagedError: they are not.
        """
        try:
            for shard in self.shards:
                size = math.prod(shard.shape) * self.dtype.itemsize
                if (self.folder / shard.file).stat().st_size < size:
                    raise ValueError(f"{shard.file} is too small for the {size:,} bytes of its shards")
        except (OSError, ValueError) as error:
            raise DamagedError(f"{self.folder} is damaged: {first_line(error)}") from None
        return torch.empty(self.shape, dtype=self.dtype)

    def plain(self) -> dict[str, Any]:
        """Return the entry of the index."""
        padded = {} if self.sharding.shape == tuple(self.shape) else {"padded": self.sharding.shape}
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": self.shape, "first": self.first, "cuts": self.sharding.cuts, **padded}


def load(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint ``folder`` by name.

    Raises:
        DamagedError: the index is missing, invalid, or contradicts the sizes of the files; the message names it.
    """
    try:
        plain: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        return {name: _tensor(name, facts, folder) for name, facts in plain.items()}
    except Exception as error:  # the file may contain anything
        raise DamagedError(f"{folder} is damaged: {INDEX}: {first_line(error)}") from None


def _tensor(name: str, facts: Mapping[str, Any], folder: Path) -> StoredTensor:
    shape, dtype = _sizes(facts["shape"]), getattr(torch, facts["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch")
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
    return StoredTensor(torch.Size(shape), dtype, Sharding(padded, tuple(cuts)), first, folder)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError(f"{str(value)[:60]} is not a list of sizes")
    if not all(type(size) is int and 0 <= size < MAX_SIZE for size in value):
        raise ValueError(f"{value!r} contains an invalid size")
    return tuple(value)
