"""Opens a folder of prepared shards, after comparing its manifest with the options of the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from wordrun.common.errors import ConfigError
from wordrun.data import manifest as manifests, shards
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig

COMPARED = ("kind", "format", "text_key", "dataset", "subset", "split", "revision", "val_fraction")
"""Options that must match the ones data.prepared was made with."""
COMPARED_PAIRS = ("prompt_key", "answer_key", "template")
"""Further such options of prompts and answers."""

DECODED = 2**20
"""Number of validation tokens from which the bytes per token are estimated if the manifest does not have them."""


class Opened(NamedTuple):
    """A data set."""

    tokenizer: Tokenizer
    train: shards.Array
    val: shards.Array
    bytes_per_token: float | None
    """Bytes of the original validation text per predicted token; None: unknown."""

    @classmethod
    def of_tokens(cls, tokenizer: Tokenizer, train: shards.Array, val: shards.Array) -> Opened:
        """Return a data set whose bytes per token are those of the decoded beginning of ``val``."""
        return cls(tokenizer, train, val, tokenizer.bytes_per_token(val[:DECODED]))


def open_prepared(folder: Path, data: TextConfig, tokenizer: TokenizerConfig, *, examine: bool = True) -> Opened:
    """Return the contents of a folder with a manifest.

    Args:
        folder: the folder of shards.
        data: the run's data options; a manifest that contradicts them is an error.
        tokenizer: the run's tokenizer options, checked in the same way.
        examine: compare every shard with the manifest now; one rank per node is enough.

    Raises:
        ConfigError: if a shard or a setting does not match; the message names it.
    """
    manifest = manifests.load(folder)
    compare(folder, manifest, data, tokenizer)
    manifests.check_left_out(data, manifest.left_out, manifest.files_read, manifest.faults)
    train, val = (manifests.split(folder, manifest, split, examine=examine) for split in manifests.SPLITS)
    words, known = manifests.tokenizer(folder, manifest), manifest.bytes_per_token("val")
    if known is None and manifest.settings["kind"] not in ANSWERED:
        return Opened.of_tokens(words, train, val)
    return Opened(words, train, val, known)


def compare(folder: Path, manifest: manifests.Manifest, data: TextConfig, tokenizer: TokenizerConfig) -> None:
    """Raise ConfigError if the folder was prepared with options that differ from the run's."""
    made, theirs = manifest.settings, manifest.settings["tokenizer"]
    wanted = {f"data.{name}": (getattr(data, name), made.get(name)) for name in COMPARED if data.kind != "shards"}
    if data.kind in ANSWERED:
        wanted |= {f"data.{name}": (getattr(data, name), made.get(name)) for name in COMPARED_PAIRS}
    elif made["kind"] in ANSWERED:
        wanted["data.kind"] = (data.kind, made["kind"])
    wanted["tokenizer"] = (tokenizer.name, theirs["name"])
    if tokenizer.name == theirs["name"] and not (data.kind == "shards" or theirs.get("path")):
        options = {name: value for name, value in asdict(tokenizer).items() if name != "path"}
        wanted |= {f"tokenizer.{name}": (value, theirs.get(name)) for name, value in options.items()}
    problems = [
        f"{folder} was prepared with {key}={json.dumps(had)}, not {json.dumps(want)}: use {key}={had}, or prepare the "
        "data in another folder"
        for key, (want, had) in wanted.items()
        if want != had
    ]
    if problems:
        raise ConfigError("\n".join(problems))
