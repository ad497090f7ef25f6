"""Which order of sequences a run has."""

from __future__ import annotations

from wordrun.config import Config
from wordrun.data.corpus import Corpus
from wordrun.data.loader import Array, Order, Sequences
from wordrun.data.mix import Mix
from wordrun.errors import ConfigError


def of_run(cfg: Config, corpus: Corpus) -> Order:
    """Return the training sequences of a run by their index.

    Raises:
        ConfigError: the corpus is too short, or ``mark_for`` complains.
    """
    mark = mark_for("align", cfg, corpus)

    def order(tokens: Array, seed: int) -> Sequences:
        return Sequences(tokens, cfg.model.block_size, seed, mark)

    seed = cfg.train.seed
    if not corpus.mix:
        return order(corpus.train, seed)
    parts = [order(part.train, seed + number) for number, part in enumerate(corpus.mix)]
    return Mix(parts, [part.share for part in corpus.mix], seed)


def mark_for(option: str, cfg: Config, corpus: Corpus) -> int | None:
    """Return the token that stands before each document, if ``option`` of ``cfg.data`` is on and needs it.

    Raises:
        ConfigError: the corpus has none.
    """
    if not getattr(cfg.data, option):
        return None
    if corpus.tokenizer.eot is None:
        raise ConfigError(
            f"data.{option}=true looks for the mark between documents, which tokenizer={cfg.tokenizer.name} does not "
            f"have: use tokenizer=byte, bpe or gpt2, or data.{option}=false"
        )
    return corpus.tokenizer.eot
