"""Folders in Hugging Face's format, here or on the hub: config.json and the files of weights, each read on access."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.common.errors import UserError, first_line, unpickling_problem
from wordrun.model.base import LazyWeights

INDEX = ".index.json"
"""Suffix of the index file, which maps each weight to one of several files."""
FORMATS = ("model.safetensors", "pytorch_model.bin")
"""Names of the weights file, or prefixes of the index of several files; the first format found is used."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""The name of a model on Hugging Face's hub."""


def fetch(source: str, key: str = "hf:", more: Sequence[str] = ("config.json",)) -> Path:
    """Return the folder ``source``, or download the model of this name from Hugging Face's hub.

    In a job, one rank calls this and broadcasts the result.

    Args:
        source: a folder, or a name.
        key: what precedes it in the option that has it, for messages.
        more: patterns of the files to download besides the weights.

    Raises:
        UserError: ``source`` is not a folder, and the download failed.
    """
    path = Path(os.path.expanduser(source))
    if path.exists():
        return path.parent if path.is_file() else path
    if not HUB_NAME.fullmatch(source):
        raise UserError(
            f"{key}{source} is not a folder: name one with config.json and {FORMATS[0]}, or a model on the hub"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{key}{source} is not a folder, and downloading it from Hugging Face's hub needs: "
            "pip install 'wordrun[hf]'"
        ) from None
    try:
        for name in FORMATS:
            stem, suffix = os.path.splitext(name)
            patterns = [*more, f"{stem}*{suffix}", f"{name}{INDEX}"]
            folder = Path(snapshot_download(source, allow_patterns=patterns))
            if any(folder.glob(f"{stem}*{suffix}")):
                break
    except Exception as error:  # from the network, the hub or its cache
        raise UserError(
            f"{key}{source} is not a folder, and cannot be downloaded from Hugging Face's hub ({first_line(error)}). "
            f"On a machine with a network (a login node): hf download {source} --local-dir DIR; then use {key}DIR"
        ) from None
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        UserError: there is none.
    """
    try:
        facts: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(facts, dict):
        raise UserError(f"{folder / 'config.json'} is not a JSON object of KEY: VALUE")
    return facts


def open_files(folder: Path) -> tuple[Mapping[str, Tensor], dict[str, torch.Size]]:
    """Return the weights in a folder by their names there, each read when it is accessed, and their shapes.

    Raises:
        UserError: there are none, or a file is damaged or missing.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, torch.Size] = {}
    for path in _paths(folder):
        try:
            if path.suffix == ".bin":
                state: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                readers |= {name: partial(state.__getitem__, name) for name in state}
                shapes |= {name: tensor.shape for name, tensor in state.items()}
            else:
                from safetensors import safe_open

                file: Any = safe_open(path, framework="pt")
                readers |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
                shapes |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors, pickle and zip have their own error types
            raise UserError(f"{path} is damaged, or is not a weights file: {unpickling_problem(error)}") from None
    return LazyWeights(readers), shapes


def has_weights(folder: Path) -> bool:
    """Return whether ``folder`` has weights, or an index of them."""
    return any((folder / f"{name}{suffix}").exists() for name in FORMATS for suffix in ("", INDEX))


def _paths(folder: Path) -> list[Path]:
    """Return the weight files in ``folder``: a single one, or those listed in an index."""
    for name in FORMATS:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is not an index of weights: {error}") from None
            missing = [name for name in names if not (folder / name).exists()]
            if missing:
                raise UserError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists")
            return [folder / name for name in names]
    raise UserError(f"{folder} has no weights: neither {' nor '.join(FORMATS)}, nor an index of several files")
