"""What each rank holds of the tensors of the whole model, to and from ``torch.distributed.checkpoint``.

A tensor is named as in the whole model, whatever the layout of ranks; a rank's piece of it lies at an offset. So a
checkpoint of any layout can be read into any other.
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from wordrun.dist.mesh import Layout

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Piece:
    """This rank's piece of a tensor."""

    name: str
    shape: torch.Size
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the piece begins in it."""
    data: Tensor

    @property
    def item(self) -> WriteItem:
        """What torch wants to know of it before it is written."""
        chunk = ChunkStorageMetadata(torch.Size(self.offset), self.data.shape)
        facts = TensorWriteData(chunk, TensorProperties(dtype=self.data.dtype), self.shape)
        return WriteItem(MetadataIndex(self.name, chunk.offsets), WriteItemType.SHARD, tensor_data=facts)


def piece_of(name: str, tensor: Tensor) -> Piece:
    """Return this rank's piece of ``tensor``, in the same memory."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor.shape, (0,) * tensor.dim(), tensor)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Piece(name, tensor.shape, tuple(chunk.offsets), tensor.to_local())


def mine_to_write(tensors: Mapping[str, Tensor], layout: Layout, rank: int) -> list[Piece]:
    """Return the pieces that ``rank`` writes: of each that several ranks hold alike, one of them, by turns of bytes.

    Args:
        tensors: what this rank holds; ranks that hold the same must give them in the same order.
        layout: which ranks hold the same: those that differ only along axes over which a tensor is not cut.
        rank: this one.
    """
    place = {axis: layout.index(rank, axis) for axis in ("replicate", "shard", "tp")}
    sizes = {"replicate": layout.replicate, "shard": layout.shard, "tp": layout.tp}
    load: dict[tuple[str, ...], list[int]] = {}
    chosen = []
    largest_first = sorted(tensors.items(), key=lambda pair: -pair[1].numel())
    for name, tensor in largest_first:
        cut: set[str] = set()
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names or ()
            cut = {axis for axis, how in zip(names, tensor.placements, strict=True) if not how.is_replicate()}
        alike = tuple(axis for axis in sizes if axis not in cut)
        copy, copies = 0, 1
        for axis in alike:
            copy, copies = copy * sizes[axis] + place[axis], copies * sizes[axis]
        loads = load.setdefault(alike, [0] * copies)
        writer = loads.index(min(loads))
        loads[writer] += tensor.numel()
        if writer == copy:
            piece = piece_of(name, tensor)
            if piece.data.numel():  # where there are more ranks than rows, some have none
                chosen.append(piece)
    return chosen


class HostCopies:
    """Copies of pieces in the host's memory, which are taken anew for each save and keep their place."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return ``pieces`` as they are now; what happens to them later does not change the copies."""
        copies = []
        devices = set()
        for piece in pieces:
            place = self._places.get(piece.name)
            if place is None or place.shape != piece.data.shape:
                pinned = piece.data.device.type != "cpu"
                place = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=pinned)
                self._places[piece.name] = place
            place.copy_(piece.data, non_blocking=True)
            devices.add(piece.data.device)
            copies.append(Piece(piece.name, piece.shape, piece.offset, place))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return copies


class _Planner(DefaultSavePlanner):
    """Writes the pieces as they are, instead of asking a state dict what it holds."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [piece.item for piece in self._pieces]
        self._data = {item.index: piece.data for item, piece in zip(items, self._pieces, strict=True)}
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._data[write_item.index]


def write(folder: Path, pieces: Sequence[Piece], group: Group, *, alone: bool = False) -> None:
    """Write the pieces of all ranks of ``group`` into ``folder``; on the disk when this returns. All must call this.

    ``alone``: this process has all there are, and writes by itself.
    """
    writer = FileSystemWriter(os.fspath(folder), single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # torch 2.8, of its own writer
        save({}, storage_writer=writer, planner=_Planner(pieces), process_group=group, no_dist=alone)


def names_in(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return what the checkpoint in ``folder`` holds, by name."""
    found = FileSystemReader(os.fspath(folder)).read_metadata().state_dict_metadata
    return {name: facts for name, facts in found.items() if isinstance(facts, TensorStorageMetadata)}


def places_for(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return empty tensors on the CPU that are like those called ``names`` in a checkpoint."""
    facts = names_in(folder) if names else {}
    return {name: place_for(facts[name]) for name in names}


def place_for(facts: TensorStorageMetadata) -> Tensor:
    """Return an empty tensor on the CPU for what ``facts`` describe."""
    return torch.empty(facts.size, dtype=facts.properties.dtype)


def read(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, this rank's pieces where they are distributed, with the values that ``folder`` holds.

    Args:
        folder: a checkpoint.
        tensors: by their names in it; other ranks may want others.
        alone: this process reads by itself; otherwise all ranks must call this.
    """
    wanted: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(wanted, storage_reader=FileSystemReader(os.fspath(folder)), no_dist=alone)
