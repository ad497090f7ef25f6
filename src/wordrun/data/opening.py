"""Folders of shards, opened: prepared here, or by somebody else."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from wordrun.config import DataConfig, TokenizerConfig
from wordrun.data import manifest as manifests
from wordrun.data import shards, tokenizers
from wordrun.data.shards import Tokens
from wordrun.data.tokenizers import CharTokenizer, Tokenizer
from wordrun.errors import ConfigError

LOOKED_AT = 2**20
"""Tokens of shards without a manifest that are compared with the vocabulary."""
CHECKED = ("kind", "text_key", "dataset", "subset", "split", "revision", "val_fraction")
"""Options that data.prepared must have been made with, as the run has them."""

Opened = tuple[Tokenizer, Tokens, Tokens]
"""The tokenizer, and the tokens for training and for validation."""


def is_whole(folder: Path) -> bool:
    """Say whether ``folder`` holds a prepared data set."""
    return (folder / manifests.NAME).exists()


def open_prepared(folder: Path, data: DataConfig, tokenizer: TokenizerConfig, *, look: bool = True) -> Opened:
    """Return what is in a folder with a manifest.

    Args:
        folder: of the shards.
        data: what the run asks for; what contradicts the manifest is refused.
        tokenizer: likewise.
        look: compare every shard with the manifest now; one rank is enough for that.

    Raises:
        ConfigError: names the shard or the setting that does not belong.
    """
    manifest = manifests.load(folder)
    compare(folder, manifest, data, tokenizer)
    train, val = (manifests.split(folder, manifest, split, look=look) for split in manifests.SPLITS)
    return manifests.tokenizer(folder, manifest), train, val


def compare(folder: Path, manifest: manifests.Manifest, data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Refuse a folder that was prepared otherwise than the run asks for."""
    made = manifest.settings
    wanted = {f"data.{name}": (getattr(data, name), made.get(name)) for name in CHECKED if data.kind != "shards"}
    theirs = made["tokenizer"]
    wanted["tokenizer"] = (tokenizer.name, theirs["name"])
    if tokenizer.name == theirs["name"] and not (data.kind == "shards" or theirs.get("path")):
        wanted |= {
            f"tokenizer.{name}": (value, theirs.get(name))
            for name, value in asdict(tokenizer).items()
            if name != "path"
        }
    problems = [
        f"{folder} was prepared with {key}={json.dumps(had)}, not {json.dumps(want)}: say {key}={had}, or prepare the "
        "data into another folder"
        for key, (want, had) in wanted.items()
        if want != had
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def open_foreign(data: DataConfig, tokenizer: TokenizerConfig) -> Opened:
    """Return what is in the folder data.path: published shards of llm.c, nanoGPT's files, .npy files, or ours."""
    folder = Path(os.path.expanduser(str(data.path))).absolute()
    if is_whole(folder):
        return open_prepared(folder, data, tokenizer)
    train, val = find(folder, data)
    words = _tokenizer(folder, tokenizer)
    for name, tokens in (("train", train), ("val", val)):
        _fits(folder, name, tokens, words, tokenizer)
    return words, train, val


def find(folder: Path, data: DataConfig) -> tuple[Tokens, Tokens]:
    """Return the tokens for training and validation in ``folder``, by the files' names.

    Without a file for validation, the last data.val_fraction of the tokens are.
    """
    if not folder.is_dir():
        raise ConfigError(f"data.path={folder} is no folder: name one with .bin or .npy files")
    found = sorted(path for path in folder.iterdir() if path.suffix in shards.SUFFIXES and path.name[:1] != ".")
    val = [path for path in found if "val" in path.name]
    train = [path for path in found if "train" in path.name and path not in val]
    if not train:
        shown = ", ".join(path.name for path in found[:3]) or "none"
        raise ConfigError(
            f"data.path={folder} has no shards for training: .bin or .npy files with train in their names, and val for "
            f"validation (found: {shown})"
        )
    tokens = Tokens([shards.examine(path) for path in train])
    if val:
        return tokens, Tokens([shards.examine(path) for path in val])
    return tokens.split(int(len(tokens) * (1 - data.val_fraction)))


def pieces(data: DataConfig) -> list[tuple[str, str, int, int, int]]:
    """Return kind, path, first and last token, and bytes of the shards in the folder data.path, to be written anew."""
    folder = Path(os.path.expanduser(str(data.path))).absolute()
    parts = []
    for split, tokens in zip(manifests.SPLITS, find(folder, data), strict=True):
        for shard in tokens.shards:
            size = np.dtype(shard.dtype).itemsize
            start = (shard.offset - shards.examine(shard.path).offset) // size
            parts.append((split, shard.path, start, start + shard.count, shard.count * size))
    return parts


def tokenizer_of(data: DataConfig, cfg: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of the shards in the folder data.path."""
    return _tokenizer(Path(os.path.expanduser(str(data.path))).absolute(), cfg)


def _tokenizer(folder: Path, cfg: TokenizerConfig) -> Tokenizer:
    saved, text = folder / manifests.TOKENIZER, folder / "input.txt"
    if saved.exists() and not getattr(cfg, "path", None):
        return tokenizers.from_json(saved.read_text(encoding="utf-8"))
    if cfg.name == "char" and text.exists():  # as nanoGPT leaves it beside its train.bin
        return CharTokenizer.of_text(text.read_text(encoding="utf-8"))
    if tokenizers.needs_text(cfg):
        pickle = " (meta.pkl is a pickle, which could run anything, and is not read)" * (folder / "meta.pkl").exists()
        raise ConfigError(
            f"tokenizer={cfg.name} is made from a text, and {folder} holds tokens: put the tokenizer.json that wordrun "
            f"saved, or for tokenizer=char the text as input.txt, beside them{pickle}, or name another tokenizer"
        )
    return tokenizers.build(cfg)


def _fits(folder: Path, split: str, tokens: Tokens, words: Tokenizer, cfg: TokenizerConfig) -> None:
    """Refuse tokens beyond the vocabulary, as far as a look at the beginning and the end shows them."""
    for part in (tokens[:LOOKED_AT], tokens[max(0, len(tokens) - LOOKED_AT) :]):
        if len(part) and (int(part.max()) >= words.vocab_size or int(np.min(part)) < 0):
            wrong = int(part.max()) if int(part.max()) >= words.vocab_size else int(np.min(part))
            raise ConfigError(
                f"tokenizer={cfg.name} has {words.vocab_size:,} tokens, but the {split} shards in {folder} have token "
                f"{wrong:,}: they were made with another tokenizer, which has to be named"
            )
