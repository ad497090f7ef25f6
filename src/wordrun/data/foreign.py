"""Opens token files of other projects: shards of llm.c and modded-nanogpt, nanoGPT's files, and .npy files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun import dist
from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.data import contents, manifest as manifests, shards
from wordrun.data.options import TextConfig
from wordrun.data.prepared import Opened, open_prepared
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.char import CharTokenizer
from wordrun.data.tokenizers.options import GPT2TokenizerConfig, TokenizerConfig
from wordrun.data.tokenizers.subword import gpt2_if_present

EXAMINED = 2**20
"""Number of tokens to check against the vocabulary at each end of shards without a manifest."""
META = 2**24
"""Maximum size of a meta.pkl in bytes."""


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
    return Opened.of_tokens(found, train, val)


def find_foreign(folder: Path, data: TextConfig) -> tuple[shards.Tokens, shards.Tokens]:
    """Return the training and validation tokens in ``folder``, told apart by file name.

    Without a validation or test file, the last data.val_fraction of the tokens is the validation split.
    """
    if not folder.is_dir():
        raise ConfigError(f"data.path={folder} is not a folder: name one with .bin or .npy files")
    splits: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    left_out, paths = [], sorted(path for path in folder.iterdir() if not contents.is_litter(path.name))
    for path in paths:
        named, split = contents.by_name(path.name), contents.split_of(path.name)
        if named.type == "tokens" and not named.packing and split:
            splits[split].append(path)
        elif named.type == "tokens" or named.fault == contents.OTHERS.get(path.suffix.lower()):
            reason = (
                "compressed: decompress it" if named.packing else named.fault or "neither train nor val in its name"
            )
            if not (path.suffix.lower() == ".idx" and path.with_suffix(".bin").exists()):
                left_out.append(f"{path.name} ({reason})")
    if not splits["train"]:
        shown = contents.few(left_out or [path.name for path in paths]) or "none"
        raise ConfigError(
            f"data.path={folder} has no shards for training: .bin or .npy files with train in their names, and val for "
            f"validation (found: {shown})",
            page="data.md#sources",
        )
    if splits["val"]:
        left_out += [f"{path.name} (the test split)" for path in splits["test"]]
    train, val = ([_examined(path) for path in paths] for paths in (splits["train"], splits["val"] or splits["test"]))
    read = contents.described(f"of {np.dtype(shard.dtype).name} tokens" for shard in train + val)
    manifests.check_left_out(data, left_out, read)
    tokens = shards.Tokens(train)
    return (tokens, shards.Tokens(val)) if val else tokens.split(int(len(tokens) * (1 - data.val_fraction)))


def _examined(path: Path) -> shards.Shard:
    if not path.is_file():
        raise ConfigError(f"{path} is {contents.by_content(path).fault}")
    return shards.examine(path)


def foreign_tokenizer(folder: Path, cfg: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of the shards in ``folder``, which has no manifest."""
    saved, text, pickled = folder / manifests.TOKENIZER, folder / "input.txt", folder / "meta.pkl"
    if saved.exists() and not getattr(cfg, "path", None):
        return tokenizers.from_json(saved.read_text(encoding="utf-8", errors="replace"), saved)
    if pickled.exists():  # nanoGPT saves it next to train.bin
        return _of_meta(pickled)
    if cfg.built_from == "characters" and text.exists():
        return tokenizers.build(cfg, [text.read_text(encoding="utf-8")])
    if cfg.built_from:
        raise ConfigError(
            f"tokenizer={cfg.name} is built from text, but {folder} holds only tokens: put the tokenizer.json that "
            "wordrun saved, or for tokenizer=char nanoGPT's meta.pkl or the text as input.txt, beside them, or choose "
            "another tokenizer"
        )
    return gpt2_if_present(cfg) if isinstance(cfg, GPT2TokenizerConfig) else tokenizers.build(cfg)


class _PlainValues(pickle.Unpickler):
    """Reads pickles of plain values only, which cannot run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject any class or function.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a plain value")


def _of_meta(path: Path) -> CharTokenizer:
    """Return the tokenizer of the characters that nanoGPT's meta.pkl lists."""
    try:
        if not path.is_file() or path.stat().st_size > META:
            raise ValueError("it is not a file, or too large")
        with open(path, "rb") as file:
            listed = _PlainValues(file).load()["itos"]
        characters = [listed[number] for number in range(len(listed))]
        if not all(isinstance(each, str) and len(each) == 1 for each in characters) or len({*characters}) < len(listed):
            raise ValueError("its itos is not a list of characters")
    except Exception as error:  # the file may be anything
        raise ConfigError(
            f"{path} is not the vocabulary of characters that nanoGPT saves ({type(error).__name__}: "
            f"{str(error)[:80]}): remove it, and name the tokenizer of the tokens beside it with tokenizer=NAME"
        ) from None
    LOGGER.info("the tokens in %s are the %d characters of meta.pkl", path.parent, len(characters), extra=FIRST_RANK)
    return CharTokenizer("".join(characters), in_order=True)


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
