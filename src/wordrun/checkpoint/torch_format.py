"""Reads the files of ``torch.distributed.checkpoint``, which checkpoints of formats 1 and 2 consist of.

Their index is a pickle. The unpickler knows only the few names that torch writes, and replaces each by a plain record,
so that no code can run. Each tensor is a zip archive of a pickle and the tensor's bytes; only the bytes are read.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = ".metadata"
RECORDS = {
    "builtins": ("getattr",),  # with which Python 3.11.0 to 3.11.3 refers to a member of an enum
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
}
"""The names in such an index, by module."""


class _Record:
    """Any object in the index: the arguments it was made with, or its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the pickle stands for; nothing is imported."""
        if name in RECORDS.get(module, ()):
            return _Record
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which does not belong there")


def parse(content: bytes) -> dict[str, Any]:
    """Return the content of a ``.metadata`` file in the form of our own index.

    Raises:
        Exception: of any type, if it is damaged or contains anything else.
    """
    for opcode, argument, _ in pickletools.genops(content):
        # The memo is an array: an entry of a number near 2^32 would make it take 64 GiB.
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(f"it refers to object number {argument}, more than its size allows")
    facts = _Unpickler(io.BytesIO(content)).load().state
    tensors: dict[str, Any] = {}
    shapes: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, record in facts["state_dict_metadata"].items():
        tensor = record.state
        dtype = str(tensor["properties"].state[0]).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": _size(tensor["size"]), "shards": []}
        for chunk in tensor["chunks"]:
            shapes[name, tuple(_size(chunk.state["offsets"]))] = _size(chunk.state["sizes"])
    for key, record in facts["storage_data"].items():
        name, offset, entry = key.state["fqn"], _size(key.state["offset"]), record.state
        tensors[name]["shards"].append(
            {
                "file": entry["relative_path"],
                "offset": offset,
                "shape": shapes[name, tuple(offset)],
                "span": [entry["offset"], entry["length"]],
            }
        )
    return tensors


def _size(record: _Record) -> list[int]:
    return list(record.args[0]) if record.args else []


def read(path: Path, span: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor whose archive is at ``span``, offset and length in bytes, of the file ``path``.

    Raises:
        Exception: of any type, if it is damaged, or not a contiguous tensor of this ``shape`` and ``dtype``.
    """
    offset, length = span
    with path.open("rb") as file:
        file.seek(offset)
        archive = zipfile.ZipFile(io.BytesIO(file.read(length)))
    (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{entry.filename} at {offset} is not its tensor's data: {entry.file_size} bytes, or compressed"
        )
    return torch.frombuffer(bytearray(archive.read(entry)), dtype=dtype).reshape(shape)
