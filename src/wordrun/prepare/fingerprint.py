"""The fingerprint of a text and every setting that affects its shards; it names the prepared folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wordrun import files
from wordrun.composer import data_home
from wordrun.config import TokenizerConfig
from wordrun.data.tokenizers import build
from wordrun.prepare.sources.base import Source

FORMAT = 2
"""Version of the prepared data format. Each version gets a different folder name, unless data.prepared sets it."""
SETTINGS = ("kind", "text_key", "dataset", "subset", "split", "revision", "val_fraction", "shard_mb")
"""The options of TextConfig that affect the shards."""
PAIR_SETTINGS = ("prompt_key", "answer_key", "template")
"""More of them for pairs."""


def folder_of(source: Source, tokenizer: TokenizerConfig) -> Path:
    """Return the folder for the shards of ``source``; it differs for every text and setting."""
    data = source.data
    if data.prepared or source.is_tokens:
        return files.absolute(str(data.prepared or data.path))
    content = json.dumps({**settings(source, tokenizer), "format": FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=5).hexdigest()
    return Path(data_home()).absolute() / "prepared" / f"{data.name}-{tokenizer.name}-{digest}"


def settings(source: Source, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """Return all settings that affect the shards."""
    found: dict[str, Any] = {name: getattr(source.data, name) for name in SETTINGS}
    if source.data.kind == "pairs":
        found |= {name: getattr(source.data, name) for name in PAIR_SETTINGS}
    found["tokenizer"] = asdict(tokenizer)
    found["state"] = source.state()
    if found["tokenizer"].get("path"):  # the content matters, not the name
        found["tokenizer"]["path"] = hashlib.sha256(build(tokenizer).to_json().encode()).hexdigest()
    return found
