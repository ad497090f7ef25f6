"""Writes and reads each rank's shards of the training state.

Tensors have the same names in every layout of ranks, and shards record their offsets, so that a checkpoint of any
layout can be read into any other. The layout and the names determine what a rank writes and reads, without
communication. Each rank writes one safetensors file with checksums in its header. Then rank 0 writes the index, which
describes how each tensor is divided; it reads this from one file of each pipeline stage.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wordrun.checkpoint import checksums, index
from wordrun.checkpoint.folder import DamagedError, file_of
from wordrun.checkpoint.index import INDEX, StoredShard, StoredTensor
from wordrun.checkpoint.sharding import Box, Cut, Sharding
from wordrun.common import files
from wordrun.common.errors import first_line
from wordrun.dist import torch_private
from wordrun.dist.mesh import Layout


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of a tensor."""

    name: str
    shape: torch.Size
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Where the shard begins in the full tensor."""
    data: Tensor


def shard_of(name: str, tensor: Tensor, rows: int | None = None) -> TensorShard:
    """Return this rank's shard of ``tensor``, in the same memory; only of the first ``rows`` if the rest is padding."""
    tensor = tensor.detach()
    shape, offset, data = tensor.shape, (0,) * tensor.dim(), tensor
    if torch_private.is_sharded(tensor):
        offset, data = torch_private.shard_offset(tensor), tensor.to_local()
    if rows is not None:
        shape, data = torch.Size((rows, *shape[1:])), data[: max(0, rows - offset[0])]
    return TensorShard(name, shape, offset, data)


def sharding_of(tensor: Tensor, layout: Layout) -> Sharding:
    """Return how ``tensor`` is divided over the ranks of ``layout``."""
    if not torch_private.is_sharded(tensor):
        return Sharding(tuple(tensor.shape))
    names = tensor.device_mesh.mesh_dim_names or ()
    pairs = [
        (axis, how)
        for axis, how in zip(names, tensor.placements, strict=True)
        if not how.is_replicate() and getattr(layout, axis) > 1
    ]
    pairs.sort(
        key=lambda pair: torch_private.is_strided(pair[1])
    )  # fully_shard divides what tensor parallelism has left
    cuts = (Cut(how.dim, getattr(layout, axis), layout.stride(axis)) for axis, how in pairs)  # type: ignore[attr-defined]
    return Sharding(tuple(tensor.shape), tuple(cuts))


@dataclass(frozen=True)
class RankShards:
    """What a rank writes, and where all shards of its tensors are."""

    shards: list[TensorShard]
    tensors: dict[str, StoredTensor]
    """By name; the same on all ranks of a pipeline stage."""


def to_write(
    tensors: Mapping[str, Tensor], layout: Layout, rank: int, rows: Mapping[str, int] | None = None
) -> RankShards:
    """Return what ``rank`` writes; ranks that hold the same shards divide them evenly.

    Args:
        tensors: this rank's tensors; ranks with the same shards must pass them in the same order.
        layout: ranks that differ only along axes over which a tensor is not sharded hold the same shard.
        rank: this rank.
        rows: number of rows to write, by name, of tensors that end in padding.
    """
    stage = rank - rank % layout.stride("pp")
    load: dict[tuple[str, ...], list[int]] = {}
    share = RankShards([], {})
    largest_first = sorted(tensors.items(), key=lambda pair: -pair[1].numel())
    for name, tensor in largest_first:
        sharding = sharding_of(tensor, layout)
        strides = {cut.stride for cut in sharding.cuts}
        alike = tuple(axis for axis in ("replicate", "shard", "tp") if layout.stride(axis) not in strides)
        writer = _lightest(load, alike, layout, tensor.numel())
        shard = shard_of(name, tensor, (rows or {}).get(name))
        share.tensors[name] = StoredTensor(shard.shape, tensor.dtype, sharding, stage + writer)
        held = sum(layout.index(rank, axis) * layout.stride(axis) for axis in alike)
        if writer == held:
            at = sharding.box(rank).within(shard.shape)
            assert shard.data.shape == at.shape, f"{name} is sharded differently: {shard.data.shape}, not {at.shape}"
            # If there are more ranks than rows, some ranks have none.
            if shard.data.numel() or not tensor.numel():
                assert shard.offset == at.offset, f"{name} is sharded differently: {shard.offset}, not {at.offset}"
                share.shards.append(shard)
    return share


def _lightest(load: dict[tuple[str, ...], list[int]], axes: tuple[str, ...], layout: Layout, size: int) -> int:
    """Add ``size`` to the least loaded of the ranks along ``axes``; return its distance from the first one."""
    copies = math.prod(getattr(layout, axis) for axis in axes)
    # Of many copies, only as many write as there are tensors.
    loads = load.setdefault(axes, [])
    if len(loads) < copies:
        loads.append(0)
    copy = loads.index(min(loads))
    loads[copy] += size
    at = 0
    for axis in reversed(axes):
        copy, index = divmod(copy, getattr(layout, axis))
        at += index * layout.stride(axis)
    return at


class HostCopies:
    """Copies of shards in host memory, which each save overwrites."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, shards: Iterable[TensorShard]) -> list[TensorShard]:
        """Return copies of ``shards``, which later changes do not affect."""
        copies = []
        devices = set()
        for shard in shards:
            buffer = self._buffers.get(shard.name)
            if buffer is None or buffer.shape != shard.data.shape:
                pinned = shard.data.device.type != "cpu"
                buffer = torch.empty(shard.data.shape, dtype=shard.data.dtype, pin_memory=pinned)
                self._buffers[shard.name] = buffer
            buffer.copy_(shard.data, non_blocking=True)
            devices.add(shard.data.device)
            copies.append(TensorShard(shard.name, shard.shape, shard.offset, buffer))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return copies


def write(
    folder: Path, shards: Sequence[TensorShard], rank: int = 0, tensors: Mapping[str, StoredTensor] | None = None
) -> None:
    """Write the shards of ``rank`` into ``folder``, and wait for the disk. Once all have, rank 0 calls ``write_index``.

    Args:
        folder: the checkpoint.
        shards: what this rank writes.
        rank: this rank.
        tensors: where all shards of each tensor are, for ``write_index``; None: ``shards`` are complete tensors.

    Raises:
        OSError: they could not be written.
    """
    if tensors is None:
        tensors = {
            each.name: StoredTensor(each.shape, each.data.dtype, Sharding(tuple(each.shape)), rank) for each in shards
        }
    mine = {shard.name: shard.data.contiguous() for shard in shards}
    described = {
        shard.name: {
            "dtype": str(shard.data.dtype).removeprefix("torch."),
            "shape": shard.shape,
            "offset": shard.offset,
            "size": shard.data.shape,
            "crc32": zlib.crc32(_bytes(mine[shard.name])),
        }
        for shard in shards
    }
    texts = {"shards": json.dumps(described), "tensors": json.dumps({name: t.plain() for name, t in tensors.items()})}
    path = folder / file_of(rank)
    save_file(mine, path, {"format": "pt", **texts, "crc32": checksums.UNSEALED})
    checksums.seal(path)
    with path.open("rb") as file:
        os.fchmod(file.fileno(), folder.stat().st_mode & 0o666)  # the library makes it readable by the owner only
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write_index(folder: Path, firsts: Iterable[int] = (0,)) -> list[str]:
    """Write the index into ``folder``; return the name of its file.

    Args:
        folder: the checkpoint, in which all ranks have written their shards.
        firsts: the first rank of each stage of the pipeline.
    """
    found: dict[str, Any] = {}
    for rank in firsts:
        with safe_open(folder / file_of(rank), framework="pt") as file:
            described = json.loads(file.metadata()["tensors"])
        found = described | found  # stages may have the same buffer
    files.write(folder / INDEX, json.dumps(found))
    index.load(folder)  # an index that cannot be read is not published
    return [INDEX]


def read_own(folder: Path, rank: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Return those of the tensors ``names`` that ``rank`` alone has written, which the index does not contain.

    Raises:
        DamagedError: the file is damaged.
    """
    try:
        with safe_open(folder / file_of(rank), framework="pt") as file:
            there = set(file.keys())
            return {name: file.get_tensor(name) for name in names if name in there}
    except Exception as error:
        raise DamagedError(f"{folder} is damaged: {file_of(rank)}: {first_line(error)}") from None


def read(
    folder: Path, tensors: Mapping[str, Tensor | TensorShard], stored: Mapping[str, StoredTensor] | None = None
) -> None:
    """Fill ``tensors``, or shards, or this rank's shards of distributed tensors, with the values in ``folder``.

    Args:
        folder: a checkpoint.
        tensors: tensors to fill, by their names in the checkpoint; ranks may read different ones.
        stored: the index of the checkpoint, if it has been read.

    Raises:
        DamagedError: the checkpoint lacks a tensor, has it with another shape, or a file is damaged.
    """
    stored = index.load(folder) if stored is None else stored
    by_file = _pieces(folder, tensors, stored)
    for file, pieces in by_file.items():
        try:
            _read_pieces(folder / file, pieces)
        except Exception as error:  # safetensors has exceptions of its own
            raise DamagedError(f"{folder} is damaged: {file}: {first_line(error)}") from None


def needed(folder: Path, tensors: Mapping[str, Tensor | TensorShard], stored: Mapping[str, StoredTensor]) -> set[str]:
    """Return the names of the files that ``read`` would open.

    Raises:
        DamagedError: the checkpoint lacks a tensor, or has it with another shape.
    """
    return set(_pieces(folder, tensors, stored))


def _pieces(
    folder: Path, tensors: Mapping[str, Tensor | TensorShard], stored: Mapping[str, StoredTensor]
) -> dict[str, list[_Piece]]:
    """Return what to read, by file."""
    by_file: dict[str, list[_Piece]] = {}
    for name, tensor in tensors.items():
        shard = tensor if isinstance(tensor, TensorShard) else shard_of(name, tensor)
        found = stored.get(name)
        if found is None or found.shape != shard.shape:
            there = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise DamagedError(f"{folder} is damaged: {name} {there}; expected {list(shard.shape)}")
        for source in found.overlapping(Box(tuple(shard.offset), tuple(shard.data.shape))):
            if windows := _overlap(source, shard):
                piece = _Piece(found.key or name, found.dtype, source, windows[0], shard.data[windows[1]])
                by_file.setdefault(source.file, []).append(piece)
    return by_file


@dataclass(frozen=True)
class _Piece:
    """A part of a stored shard, and the memory to read it into."""

    name: str
    dtype: torch.dtype
    source: StoredShard
    window: tuple[slice, ...]
    """Its position in the stored shard."""
    into: Tensor


def _overlap(source: StoredShard, shard: TensorShard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where the elements that both have are in ``source`` and in ``shard``, or None if there are none."""
    there, here = [], []
    for from_, n, to, m in zip(source.offset, source.shape, shard.offset, shard.data.shape, strict=True):
        start, stop = max(from_, to), min(from_ + n, to + m)
        if start >= stop:
            return None
        there.append(slice(start - from_, stop - from_))
        here.append(slice(start - to, stop - to))
    return tuple(there), tuple(here)


def _read_pieces(path: Path, pieces: Iterable[_Piece]) -> None:
    """Read ``pieces`` after comparing their stored tensors with the index."""
    with safe_open(path, framework="pt") as file:  # maps it into memory: only the windows are read
        for piece in pieces:
            stored = file.get_slice(piece.name)
            shape, values = tuple(stored.get_shape()), stored[piece.window]
            if shape != piece.source.shape or values.dtype != piece.dtype:
                expected = f"{piece.dtype} {list(piece.source.shape)}"
                raise ValueError(f"{piece.name} is {values.dtype} {list(shape)}, not {expected}")
            piece.into.copy_(values)
