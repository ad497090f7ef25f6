"""A text, its tokenizer, and its tokens in two splits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wordrun import dist
from wordrun.composer import compose
from wordrun.config import Config, DataConfig, TokenizerConfig
from wordrun.data import identity, lock, opening, preparing, stage
from wordrun.data.documents import files
from wordrun.data.loader import Array
from wordrun.data.shards import Tokens
from wordrun.data.sources import Source, locate, read
from wordrun.data.tokenizers import CharTokenizer, Tokenizer, needs_text
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError
from wordrun.log import LOGGER

IN_MEMORY = 2**26
"""Bytes of a text up to which characters are not prepared: encoding them takes a second, on every rank."""
UNASKED = 2**30
"""Bytes of a source up to which a run prepares it by itself."""
TELL_S = 5.0
"""Seconds between two lines of a rank that waits."""


@dataclass(frozen=True)
class Part:
    """What a mix has of one data set."""

    train: Tokens
    val: Tokens
    share: float
    """Of the mix; those of all parts make 1."""


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run trains and is evaluated on."""

    source: Source
    tokenizer: Tokenizer
    train: Array
    val: Array
    mix: Sequence[Part] = ()
    """Of several data sets each one; ``train`` and ``val`` then have their tokens one after the other."""


def load(data: DataConfig, source: Source) -> Corpus:
    """Read and tokenise ``source`` by characters; the last ``data.val_fraction`` of it is the validation split."""
    text = read(source)
    tokenizer = CharTokenizer.of_text(text)
    tokens: NDArray[np.integer] = tokenizer.encode(text).astype(
        np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    )
    split = int(len(tokens) * (1 - data.val_fraction))
    return Corpus(source, tokenizer, tokens[:split], tokens[split:])


def obtain(cfg: Config, world: World) -> Corpus:
    """Return the corpus of a run; every rank must call this.

    Small texts in characters are read into memory. Everything else is prepared, if it is not yet: by one rank of each
    file system, and only if it is small. Then it is copied to the nodes, if data.stage says so, and opened.

    Raises:
        UserError: it is not there, not whole, not prepared and too large, or not what the options say.
    """
    if cfg.data.kind == "mix":
        return _mixed(cfg, world)
    return _obtain(cfg.data, cfg.tokenizer, world)


def _obtain(data: DataConfig, tokenizer: TokenizerConfig, world: World, *, memory: bool = True) -> Corpus:
    def find() -> tuple[Source, Path, bool]:
        if data.prepared and opening.is_whole(Path(os.path.expanduser(data.prepared))):
            folder = Path(os.path.expanduser(data.prepared)).absolute()
            return Source(str(folder), str(folder)), folder, False
        source = locate(data)
        if memory and not data.prepared and not data.stage and _is_small(data, tokenizer, source):
            return source, Path(), True
        return source, identity.folder_of(data, tokenizer, source), False

    source, folder, in_memory = dist.share(find() if world.rank == 0 else None, world)
    if in_memory:
        return load(data, source)
    if data.kind == "shards" and not data.prepared:
        if data.stage is None:
            return Corpus(source, *opening.open_foreign(data, tokenizer))
        folder = Path(str(source.path))
        if not opening.is_whole(folder):
            raise ConfigError(
                f"data.stage={data.stage} needs checksums, and {folder} has no manifest.json: make shards that have "
                f"one by python -m wordrun.prepare data=shards data.path={folder} data.prepared=FOLDER, and train with "
                "the same options"
            )
    _ensure(data, tokenizer, source, folder, world)
    if data.stage is not None:
        folder = _staged(folder, data.stage, world)
    return Corpus(source, *opening.open_prepared(folder, data, tokenizer, look=world.local_rank == 0))


def _is_small(data: DataConfig, tokenizer: TokenizerConfig, source: Source) -> bool:
    """Say whether ``source`` is one text that is not worth preparing."""
    if tokenizer.name != "char" or data.kind not in ("file", "download", "sample"):
        return False
    if source.path is None:
        return True
    names = files(source.path)
    packed = names[0].name.endswith((".jsonl", ".gz", ".zst", ".parquet"))
    return len(names) == 1 and not packed and (not names[0].is_file() or names[0].stat().st_size <= IN_MEMORY)


def _ensure(data: DataConfig, tokenizer: TokenizerConfig, source: Source, folder: Path, world: World) -> None:
    """Return when ``folder`` is prepared: by one rank of its file system, while the others wait and say so."""

    def prepare() -> None:
        size = identity.size_of(data, source)
        if size is None or size > UNASKED:
            how_large = "of a size that only the hub knows" if size is None else f"large ({size / 2**30:.1f} GiB)"
            raise UserError(
                f"data={data.name} is not prepared with these options ({folder} is not whole), and {how_large}. First: "
                f"launch python -m wordrun.prepare data={data.name}, with this run's options for data and tokenizer"
            )
        begin = time.monotonic()
        LOGGER.info("preparing data=%s in %s", data.name, folder)
        plan = preparing.plan(data, tokenizer, source, folder)
        preparing.execute(plan, World(), teller(f"preparing data={data.name}"))
        LOGGER.info("prepared data=%s in %.1f s", data.name, time.monotonic() - begin)

    once_per_file_system(folder, world, lambda: opening.is_whole(folder), prepare, f"data={data.name} to be prepared")


def _staged(folder: Path, place: str, world: World) -> Path:
    """Return the copy of ``folder`` on this node."""
    to = stage.target(folder, place)
    once_per_file_system(
        to, world, lambda: stage.is_whole(folder, to),
        lambda: stage.copy(folder, to, teller(f"copying shards to data.stage={place}")),
        f"the shards to be copied to data.stage={place}",
    )  # fmt: skip
    return to


def once_per_file_system(
    folder: Path, world: World, is_done: Callable[[], bool], action: Callable[[], None], what: str
) -> None:
    """Return when ``is_done``: one process of each file system that ``folder`` is on does ``action``; every rank calls.

    The first rank of each node tries to take the lock beside ``folder``. On a file system that nodes share it finds the
    lock taken by another node's. Who waits looks at files, so that no collective can time out, and says so.
    """
    hold = folder.with_name(f".{folder.name}.lock")
    begin = told = time.monotonic()

    def tell(seconds: float) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            LOGGER.info("waiting for %s, by %s: %.0f s", what, lock.holder(hold), told - begin)

    while not is_done():
        if world.local_rank == 0:
            preparing.make(folder.parent)
            with lock.held(hold) as mine:
                if mine and not is_done():
                    action()
        if not lock.wait(hold, is_done, tell):
            time.sleep(preparing.LOOK_S)


def teller(what: str) -> Callable[[preparing.Progress], None]:
    """Return what says in the log, now and then, how far something is."""
    last = time.monotonic()

    def tell(progress: preparing.Progress) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            LOGGER.info("%s: %.0f %%", what, 100 * progress.share)

    return tell


def _mixed(cfg: Config, world: World) -> Corpus:
    """Return the corpora of data.mix as one."""
    parts = dist.share(parts_of_mix(cfg) if world.rank == 0 else None, world)
    corpora = [_obtain(data, cfg.tokenizer, world, memory=False) for data in parts]
    whole = sum(cfg.data.mix.values())
    shares = [weight / whole for weight in cfg.data.mix.values()]
    for corpus, name in zip(corpora, cfg.data.mix, strict=True):
        if corpus.tokenizer.to_json() != corpora[0].tokenizer.to_json():
            raise ConfigError(
                f"data.mix: {name} has another tokenizer than {next(iter(cfg.data.mix))}: prepare all with the same "
                "one, tokenizer=gpt2 or byte, or a learned one by tokenizer.path=FILE"
            )
    mix = []
    for corpus, share in zip(corpora, shares, strict=True):
        assert isinstance(corpus.train, Tokens)
        assert isinstance(corpus.val, Tokens)
        mix.append(Part(corpus.train, corpus.val, share))
    origin = ", ".join(
        f"{share:.0%} {name} ({corpus.source.origin})"
        for share, name, corpus in zip(shares, cfg.data.mix, corpora, strict=True)
    )
    return Corpus(
        Source(None, f"mix of {origin}"), corpora[0].tokenizer,
        Tokens([shard for part in mix for shard in part.train.shards]),
        Tokens([shard for part in mix for shard in part.val.shards]), mix,
    )  # fmt: skip


def parts_of_mix(cfg: Config) -> list[DataConfig]:
    """Return the data sets that data.mix names.

    Raises:
        ConfigError: one is unknown, or the tokenizer would be another one for each.
    """
    parts = []
    for name in cfg.data.mix:
        if os.path.isdir(os.path.expanduser(name)):
            part = DataConfig(os.path.basename(os.path.normpath(name)), "shards", path=name)
        else:
            try:
                part = compose([f"data={name}"]).data
            except ConfigError as error:
                raise ConfigError(f"data.mix: {error}") from None
        parts.append(replace(part, stage=cfg.data.stage, workers=cfg.data.workers))
    if needs_text(cfg.tokenizer) and any(part.kind != "shards" for part in parts):
        raise ConfigError(
            f"data=mix: tokenizer={cfg.tokenizer.name} would be made from each text anew: use tokenizer=gpt2 or "
            "byte, or a learned one by tokenizer=bpe tokenizer.path=FILE"
        )
    return parts
