"""Writes and reads each rank's shards of the training state with ``torch.distributed.checkpoint``.

Tensors have the same names in every layout of ranks, and shards record their offsets, so that a checkpoint of any
layout can be read into any other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from wordrun import compat
from wordrun.dist.mesh import Layout

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a tensor."""

    name: str
    shape: torch.Size
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Where the shard begins in the full tensor."""
    data: Tensor

    @property
    def item(self) -> WriteItem:
        """The shard's description for torch's writer."""
        chunk = metadata.ChunkStorageMetadata(torch.Size(self.offset), self.data.shape)
        facts = TensorWriteData(chunk, metadata.TensorProperties(dtype=self.data.dtype), self.shape)
        return WriteItem(metadata.MetadataIndex(self.name, chunk.offsets), WriteItemType.SHARD, tensor_data=facts)


def shard_of(name: str, tensor: Tensor, rows: int | None = None) -> Shard:
    """Return this rank's shard of ``tensor``, in the same memory; only of the first ``rows`` if the rest is padding."""
    tensor = tensor.detach()
    shape, offset, data = tensor.shape, (0,) * tensor.dim(), tensor
    if isinstance(tensor, DTensor):
        offset, data = compat.shard_offset(tensor), tensor.to_local()
    if rows is not None:
        shape, data = torch.Size((rows, *shape[1:])), data[: max(0, rows - offset[0])]
    return Shard(name, shape, offset, data)


def to_write(
    tensors: Mapping[str, Tensor], layout: Layout, rank: int, rows: Mapping[str, int] | None = None
) -> list[Shard]:
    """Return the shards that ``rank`` writes; ranks that hold the same shards divide them evenly.

    Args:
        tensors: this rank's tensors; ranks with the same shards must pass them in the same order.
        layout: ranks that differ only along axes over which a tensor is not sharded hold the same shard.
        rank: this rank.
        rows: number of rows to write, by name, of tensors that end in padding.
    """
    coordinate = {axis: layout.index(rank, axis) for axis in ("replicate", "shard", "tp")}
    sizes = {"replicate": layout.replicate, "shard": layout.shard, "tp": layout.tp}
    load: dict[tuple[str, ...], list[int]] = {}
    chosen = []
    largest_first = sorted(tensors.items(), key=lambda pair: -pair[1].numel())
    for name, tensor in largest_first:
        sharded: set[str] = set()
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names or ()
            sharded = {axis for axis, how in zip(names, tensor.placements, strict=True) if not how.is_replicate()}
        alike = tuple(axis for axis in sizes if axis not in sharded)
        copy, copies = 0, 1
        for axis in alike:
            copy, copies = copy * sizes[axis] + coordinate[axis], copies * sizes[axis]
        loads = load.setdefault(alike, [0] * copies)
        writer = loads.index(min(loads))
        loads[writer] += tensor.numel()
        if writer == copy:
            shard = shard_of(name, tensor, (rows or {}).get(name))
            if shard.data.numel():  # where there are more ranks than rows, some have none
                chosen.append(shard)
    return chosen


class HostCopies:
    """Copies of shards in host memory, which each save overwrites."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, shards: Iterable[Shard]) -> list[Shard]:
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
            copies.append(Shard(shard.name, shard.shape, shard.offset, buffer))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return copies


class _Planner(DefaultSavePlanner):
    """Plans to save shards instead of a state dict."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        items = [shard.item for shard in self._shards]
        self._data = {item.index: shard.data for item, shard in zip(items, self._shards, strict=True)}
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._data[write_item.index]


def write(folder: Path, shards: Sequence[Shard], group: Group, *, alone: bool = False) -> None:
    """Write the shards of all ranks of ``group``, which all must call this, into ``folder`` and wait for the disk.

    With ``alone``, this process has all shards and writes them without other ranks.
    """
    writer = FileSystemWriter(os.fspath(folder), single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # from torch 2.8's writer
        state_dict_saver.save({}, storage_writer=writer, planner=_Planner(shards), process_group=group, no_dist=alone)


def stored_in(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Return shape and type of each tensor in the checkpoint ``folder``, by name."""
    found = FileSystemReader(os.fspath(folder)).read_metadata().state_dict_metadata
    return {name: facts for name, facts in found.items() if isinstance(facts, metadata.TensorStorageMetadata)}


def empty_like(stored: metadata.TensorStorageMetadata) -> Tensor:
    """Return an empty tensor on the CPU with the shape and type of a stored one."""
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def read(folder: Path, tensors: Mapping[str, Tensor | Shard], *, alone: bool = False) -> None:
    """Fill ``tensors``, or shards, or this rank's shards of distributed tensors, with the values in ``folder``.

    Args:
        folder: a checkpoint.
        tensors: tensors to fill, by their names in the checkpoint; ranks may read different ones.
        alone: read without other ranks; otherwise all ranks must call this.
    """
    wanted: dict[str, Any] = {
        name: torch.empty(tensor.shape, dtype=tensor.data.dtype) if isinstance(tensor, Shard) else tensor.detach()
        for name, tensor in tensors.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_loader.load(wanted, storage_reader=FileSystemReader(os.fspath(folder)), no_dist=alone)
    for name, shard in tensors.items():
        if isinstance(shard, Shard):
            window = tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.data.shape, strict=True))
            shard.data.copy_(wanted[name][window])
