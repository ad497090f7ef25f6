"""Opens token files of other projects: shards of llm.c and modded-nanogpt, nanoGPT's files, and .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wordrun import dist
from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.data import manifest as manifests, shards
from wordrun.data.options import TextConfig
from wordrun.data.prepared import Opened, open_prepared
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import GPT2TokenizerConfig, TokenizerConfig
from wordrun.data.tokenizers.subword import gpt2_if_present

EXAMINED = 2**20
"""Number of tokens to check against the vocabulary at each end of shards without a manifest."""


def open_foreign(data: TextConfig, tokenizer: TokenizerConfig, world: dist.World) -> Opened:
    """Return the contents of the folder data.path: llm.c shards, nanoGPT files, .npy files, or our own shards.

    Every rank must call this. All get the tokenizer that rank 0 has read: other nodes may lack its vocabulary.
    """
    folder = files.absolute(str(data.path))
    if manifests.is_complete(folder):
        return open_prepared(folder, data, tokenizer)
    train, val = find_foreign(folder, data)
    saved = dist.broadcast(foreign_tokenizer(folder, tokenizer).to_json() if world.rank == 0 else None, world)
    found = tokenizers.from_json(saved)
    for split, tokens in zip(manifests.SPLITS, (train, val), strict=True):
        for part in (tokens[:EXAMINED], tokens[max(0, len(tokens) - EXAMINED) :]):
            check_range(part, found, f"the {split} shards in {folder}")
    return found, train, val


def find_foreign(folder: Path, data: TextConfig) -> tuple[shards.Tokens, shards.Tokens]:
    """Return the training and validation tokens in ``folder``, told apart by file name.

    Without a validation file, the last data.val_fraction of the tokens is the validation split.
    """
    if not folder.is_dir():
        raise ConfigError(f"data.path={folder} is not a folder: name one with .bin or .npy files")
    found = sorted(path for path in folder.iterdir() if path.suffix in shards.SUFFIXES and path.name[:1] != ".")
    val = [path for path in found if "val" in path.name]
    train = [path for path in found if "train" in path.name and path not in val]
    if not train:
        shown = ", ".join(path.name for path in found[:3]) or "none"
        raise ConfigError(
            f"data.path={folder} has no shards for training: .bin or .npy files with train in their names, and val for "
            f"validation (found: {shown})",
            page="data.md#sources",
        )
    tokens = shards.Tokens([shards.examine(path) for path in train])
    if val:
        return tokens, shards.Tokens([shards.examine(path) for path in val])
    return tokens.split(int(len(tokens) * (1 - data.val_fraction)))


def foreign_tokenizer(folder: Path, cfg: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of the shards in ``folder``, which has no manifest."""
    saved, text = folder / manifests.TOKENIZER, folder / "input.txt"
    if saved.exists() and not getattr(cfg, "path", None):
        return tokenizers.from_json(saved.read_text(encoding="utf-8", errors="replace"), saved)
    if cfg.built_from == "characters" and text.exists():  # nanoGPT leaves it next to train.bin
        return tokenizers.build(cfg, [text.read_text(encoding="utf-8")])
    if cfg.built_from:
        has_pickle = (folder / "meta.pkl").exists()
        pickle = " (meta.pkl is a pickle, which can run arbitrary code, and is not read)" if has_pickle else ""
        raise ConfigError(
            f"tokenizer={cfg.name} is built from text, but {folder} holds only tokens: put the tokenizer.json that "
            f"wordrun saved, or for tokenizer=char the text as input.txt, beside them{pickle}, or choose another "
            "tokenizer"
        )
    return gpt2_if_present(cfg) if isinstance(cfg, GPT2TokenizerConfig) else tokenizers.build(cfg)


def check_range(tokens: NDArray[np.integer], tokenizer: Tokenizer, what: str) -> None:
    """Check that all tokens are in the vocabulary; ``what`` names them in the message.

    Raises:
        ConfigError: if a token is out of range.
    """
    for token in (int(tokens.max(initial=0)), int(tokens.min(initial=0))):
        if not 0 <= token < tokenizer.vocab_size:
            raise ConfigError(
                f"tokenizer={tokenizer.kind} has {tokenizer.vocab_size:,} tokens, but {what} have token {token:,}: "
                "choose the tokenizer with which they were made"
            )
