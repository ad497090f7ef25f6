"""Which prepared folder belongs to which text and settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wordrun.composer import data_home
from wordrun.config import DataConfig, TokenizerConfig
from wordrun.data.documents import files
from wordrun.data.sources import Source
from wordrun.data.tokenizers import build

FORMAT = 2
"""Of manifests; data prepared with another one is in a folder of another name, unless data.prepared names one."""


def folder_of(data: DataConfig, tokenizer: TokenizerConfig, source: Source) -> Path:
    """Return where the shards of ``data`` are or belong: another folder for every text and every setting."""
    if data.prepared:
        return Path(os.path.expanduser(data.prepared)).absolute()
    told = json.dumps({**settings(data, tokenizer, source), "format": FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(told.encode(), digest_size=5).hexdigest()
    return Path(data_home()).absolute() / "prepared" / f"{data.name}-{tokenizer.name}-{digest}"


def settings(data: DataConfig, tokenizer: TokenizerConfig, source: Source) -> dict[str, Any]:
    """Return everything that the shards depend on."""
    names = ["kind", "text_key", "dataset", "subset", "split", "revision", "val_fraction", "shard_mb"]
    told: dict[str, Any] = {name: getattr(data, name) for name in names}
    told["tokenizer"] = asdict(tokenizer)
    told["state"] = state_of(data, source)
    if told["tokenizer"].get("path"):  # what is in the file counts
        told["tokenizer"]["path"] = hashlib.sha256(build(tokenizer).to_json().encode()).hexdigest()
    return told


def state_of(data: DataConfig, source: Source) -> str | None:
    """Return a hash of the names, sizes and times of the files of ``source``; None: it has none here."""
    if data.kind == "download" and source.path:
        return data.sha256
    if data.kind == "hf":
        folder = Path(os.path.expanduser(str(data.dataset)))
        return _state(sorted(p for p in folder.rglob("*") if p.is_file()), folder) if folder.is_dir() else None
    if source.path is None:
        return None
    folder = Path(source.path)
    return _state(sorted(folder.iterdir()) if data.kind == "shards" else files(source.path), Path("/"))


def size_of(data: DataConfig, source: Source) -> int | None:
    """Return the bytes of a source; None: it is on the hub, and nobody here knows."""
    if data.kind == "hf":
        folder = Path(os.path.expanduser(str(data.dataset)))
        return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else None
    if source.path is None:
        return 0
    if data.kind == "shards":
        return sum(p.stat().st_size for p in Path(source.path).iterdir())
    return sum(p.stat().st_size for p in files(source.path) if p.is_file())


def _state(paths: Sequence[Path], root: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with contextlib.suppress(OSError):  # that it is missing is said by whoever reads it
            stat = path.stat()
            digest.update(f"{os.path.relpath(path, root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
