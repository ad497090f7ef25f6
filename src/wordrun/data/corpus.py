"""The corpus of a run, from ``cfg.data``: a small text in memory, tokens of other projects, or shards.

Shards are prepared first if necessary, and copied to each node if data.stage is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wordrun import dist
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.log import LOGGER
from wordrun.config.compose import compose
from wordrun.config.schema import Config
from wordrun.data import shards
from wordrun.data.foreign import open_foreign
from wordrun.data.manifest import is_complete, load
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.prepare import fingerprint, lock, node_copy, run
from wordrun.data.prepare.sources import locate
from wordrun.data.prepare.sources.base import Source, WorkItem
from wordrun.data.prepared import Opened, open_prepared
from wordrun.data.shards import Tokens
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig

IN_MEMORY = 2**26
"""Maximum size in bytes of a text that tokenizer=char does not prepare: every rank encodes it, in about a second."""
AUTO_PREPARE = 2**30
"""Maximum size in bytes of a source that a run prepares automatically; larger ones need ``wordrun prepare``."""


@dataclass(frozen=True)
class MixedDataset:
    """A data set in a mix."""

    train: shards.Tokens
    val: shards.Tokens
    fraction: float
    """Its fraction of the mix; the fractions of all data sets add up to 1."""


@dataclass(frozen=True)
class Corpus:
    """The training and validation tokens of a run."""

    tokenizer: Tokenizer
    train: shards.Array
    val: shards.Array
    bytes_per_token: float | None
    """Bytes of the original validation text per predicted token; None: unknown."""
    origin: str
    """Origin of the text, for the log and run.json."""
    banner: str | None = None
    """A warning to show with all results if this is not the requested text."""
    mix: Sequence[MixedDataset] = ()
    """The data sets of a mix; ``train`` and ``val`` concatenate their tokens."""


def corpus_of_run(cfg: Config, world: dist.World) -> Corpus:
    """Return the corpus of a run; every rank must call this.

    Raises:
        UserError: if it is missing, damaged, inconsistent with the options, or unprepared and too large.
    """
    if cfg.data.kind == "mix":
        return _mix(cfg, world)
    return _corpus_of(cfg.text, cfg.tokenizer, world)


def _corpus_of(data: TextConfig, tokenizer: TokenizerConfig, world: dist.World, *, in_memory: bool = True) -> Corpus:
    """Return the corpus of one data set; ``in_memory=False`` always uses shards."""

    def find() -> tuple[Source, WorkItem | None, Path]:
        source = locate(data)
        if in_memory and (text := _small_text(source, tokenizer)):
            return source, text, Path()
        return source, None, fingerprint.folder_of(source, tokenizer)

    source, text, folder = dist.broadcast(find() if world.rank == 0 else None, world)
    if text is not None:
        documents = "".join(document.text for document in source.documents(text))
        opened = open_text(documents, data.val_fraction, tokenizer)
    elif source.is_tokens and not (data.prepared or data.stage):
        opened = open_foreign(data, tokenizer, world)
    else:
        _prepare_once(source, tokenizer, folder, world)
        if data.stage is not None:
            folder = _copied(folder, data.stage, world)
        opened = open_prepared(folder, data, tokenizer, examine=world.local_rank == 0)
    return Corpus(*opened, source.origin, source.banner)


def _small_text(source: Source, tokenizer: TokenizerConfig) -> WorkItem | None:
    """Return the work item of a text too small to be worth preparing, else None."""
    if tokenizer.built_from != "characters" or source.data.prepared or source.data.stage:
        return None
    text = source.single_text()
    return text if text is not None and text.size <= IN_MEMORY else None


def _prepare_once(source: Source, tokenizer: TokenizerConfig, folder: Path, world: dist.World) -> None:
    """Prepare ``folder`` in one process per file system, and return once it is complete."""
    name = source.data.name
    if source.is_tokens and not source.data.prepared and not is_complete(folder):
        raise ConfigError(
            f"data.stage={source.data.stage} needs checksums, but {folder} has no manifest.json: rewrite the shards "
            f"with wordrun prepare data=shards data.path={folder} data.prepared=FOLDER, and train with the same "
            "options"
        )

    def prepare() -> None:
        size = source.size()
        if size is None or size > AUTO_PREPARE:
            how_large = "its size is known only to the hub" if size is None else f"it is large ({size / 2**30:.1f} GiB)"
            raise UserError(
                f"data={name} is not prepared with these options ({folder} is incomplete), and {how_large}. Prepare "
                f"it first: launch wordrun prepare data={name}, with this run's options for data and tokenizer"
            )
        LOGGER.info("preparing data=%s in %s", name, folder)
        log = _progress_log(f"preparing data={name}")
        run.execute(run.begin(source, tokenizer, folder), dist.World(), lambda progress: log(progress.fraction))

    if world.rank == 0 and is_complete(folder):
        LOGGER.info("using prepared data in %s", folder)
        fingerprint.warn_of_other_code(folder, load(folder), source.data, tokenizer)
    lock.once_per_file_system(folder, world, lambda: is_complete(folder), prepare, f"data={name} to be prepared")


def _copied(folder: Path, under: str, world: dist.World) -> Path:
    """Copy ``folder`` to this node, once per node, and return the path of the copy."""
    to = node_copy.target(folder, under)
    lock.once_per_file_system(
        to,
        world,
        lambda: node_copy.is_complete(folder, to),
        lambda: node_copy.copy(folder, to, _progress_log(f"copying shards to data.stage={under}")),
        f"the shards to be copied to data.stage={under}",
    )
    return to


def _progress_log(what: str) -> Callable[[float], None]:
    """Return a function that occasionally logs the completed share of ``what``."""
    last = time.monotonic()

    def log(share: float) -> None:
        nonlocal last
        if time.monotonic() - last > lock.LOG_S:
            last = time.monotonic()
            LOGGER.info("%s: %.0f %%", what, 100 * share)

    return log


def _mix(cfg: Config, world: dist.World) -> Corpus:
    """Return the corpora of data.mix as one corpus."""
    parts = dist.broadcast(_data_of_mix(cfg) if world.rank == 0 else None, world)
    corpora = [_corpus_of(data, cfg.tokenizer, world, in_memory=False) for data in parts]
    total = sum(cfg.text.mix.values())
    mix, origins = [], []
    for (name, weight), corpus in zip(cfg.text.mix.items(), corpora, strict=True):
        if corpus.tokenizer.to_json() != corpora[0].tokenizer.to_json():
            raise ConfigError(
                f"data.mix: {name} has another tokenizer than {next(iter(cfg.text.mix))}: prepare all of them with the "
                "same one, tokenizer=gpt2 or byte, or a trained one with tokenizer.path=FILE"
            )
        assert isinstance(corpus.train, Tokens)
        assert isinstance(corpus.val, Tokens)
        mix.append(MixedDataset(corpus.train, corpus.val, weight / total))
        origins.append(f"{weight / total:.0%} {name} ({corpus.origin})")
    sizes = [
        corpus.bytes_per_token * part.fraction
        for corpus, part in zip(corpora, mix, strict=True)
        if corpus.bytes_per_token is not None
    ]
    return Corpus(
        corpora[0].tokenizer,
        Tokens([shard for each in mix for shard in each.train.shards]),
        Tokens([shard for each in mix for shard in each.val.shards]),
        sum(sizes) if len(sizes) == len(mix) else None,
        f"mix of {', '.join(origins)}",
        "\n".join(corpus.banner for corpus in corpora if corpus.banner) or None,
        mix=mix,
    )


def _data_of_mix(cfg: Config) -> list[TextConfig]:
    """Return the options of the data sets in data.mix.

    Raises:
        ConfigError: if a data set is unknown, or would get a tokenizer of its own.
    """
    parts = []
    for name in cfg.text.mix:
        if (folder := Path(name).expanduser()).is_dir():
            part = TextConfig(folder.name, "shards", path=name)
        else:
            try:
                part = compose([f"data={name}"]).text
            except ConfigError as error:
                raise ConfigError(f"data.mix: {error}") from None
        if part.kind in ANSWERED:
            raise ConfigError(f"data.mix: {name} has prompts and answers, which cannot be mixed: use data={name}")
        parts.append(replace(part, stage=cfg.text.stage, workers=cfg.text.workers))
    if cfg.tokenizer.built_from and any(part.kind != "shards" for part in parts):
        raise ConfigError(
            f"data=mix: tokenizer={cfg.tokenizer.name} would be different for each text: use tokenizer=gpt2 or byte, "
            "or a trained one with tokenizer=bpe tokenizer.path=FILE"
        )
    return parts


def open_text(text: str, val_fraction: float, cfg: TokenizerConfig) -> Opened:
    """Tokenize a text in memory, with a tokenizer built from it; its last ``val_fraction`` is for validation."""
    tokenizer = tokenizers.build(cfg, [text])
    tokens = tokenizer.encode_batch([text])[0].astype(shards.dtype_for(tokenizer.vocab_size))
    split = int(len(tokens) * (1 - val_fraction))
    train, val = tokens[:split], tokens[split:]
    return Opened(tokenizer, train, val, tokenizer.bytes_per_token(val))
