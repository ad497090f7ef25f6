"""Opens the corpus of a run: folders of shards, either ours with a manifest or from other projects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wordrun import dist
from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.data import manifest as manifests, shards
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import GPT2TokenizerConfig, TokenizerConfig
from wordrun.data.tokenizers.subword import gpt2_if_present

EXAMINED = 2**20
"""Number of tokens to check against the vocabulary at each end of shards without a manifest."""
COMPARED = ("kind", "text_key", "dataset", "subset", "split", "revision", "val_fraction")
"""Options that must match the ones data.prepared was made with."""
COMPARED_PAIRS = ("prompt_key", "answer_key", "template")
"""More of them for prompts and answers."""


@dataclass(frozen=True)
class MixPart:
    """One data set in a mix."""

    train: shards.Tokens
    val: shards.Tokens
    fraction: float
    """Fraction of the mix; those of all parts add up to 1."""


@dataclass(frozen=True)
class Corpus:
    """The training and validation tokens of a run."""

    tokenizer: Tokenizer
    train: shards.Array
    val: shards.Array
    origin: str
    """Origin of the text, for the log and run.json."""
    banner: str | None = None
    """A warning to show with all results if this is not the requested text."""
    mix: Sequence[MixPart] = ()
    """The parts of a mix; ``train`` and ``val`` concatenate their tokens."""


Opened = tuple[Tokenizer, shards.Array, shards.Array]
"""The tokenizer, the training tokens and the validation tokens."""


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
    manifests.check_left_out(manifest.left_out, data)
    train, val = (manifests.split(folder, manifest, split, examine=examine) for split in manifests.SPLITS)
    return manifests.tokenizer(folder, manifest), train, val


def compare(folder: Path, manifest: manifests.Manifest, data: TextConfig, tokenizer: TokenizerConfig) -> None:
    """Raise ConfigError if the folder was prepared with options that differ from the run's."""
    made, theirs = manifest.settings, manifest.settings["tokenizer"]
    wanted = {f"data.{name}": (getattr(data, name), made.get(name)) for name in COMPARED if data.kind != "shards"}
    if data.kind == "pairs":
        wanted |= {f"data.{name}": (getattr(data, name), made.get(name)) for name in COMPARED_PAIRS}
    elif made["kind"] == "pairs":
        wanted["data.kind"] = (data.kind, "pairs")
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


def open_text(text: str, val_fraction: float, cfg: TokenizerConfig) -> Opened:
    """Tokenize a text in memory, with a tokenizer built from it; its last ``val_fraction`` is for validation."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    tokenizer = tokenizers.build(cfg, [text])
    tokens = tokenizer.encode_batch([text])[0].astype(shards.dtype_for(tokenizer.vocab_size))
    split = int(len(tokens) * (1 - val_fraction))
    return tokenizer, tokens[:split], tokens[split:]


def open_foreign(data: TextConfig, tokenizer: TokenizerConfig, world: dist.World) -> Opened:
    """Return the contents of the folder data.path: llm.c shards, nanoGPT files, .npy files, or our own shards.

    Every rank must call this, and has rank 0's tokenizer: other nodes may lack the vocabulary.
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
