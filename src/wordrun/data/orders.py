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
        ConfigError: the corpus is too short, or data.align is to find documents that its tokenizer does not mark.
    """
    mark = corpus.tokenizer.eot if cfg.data.align else None
    if cfg.data.align and mark is None:
        raise ConfigError(
            f"data.align=true looks for the mark between documents, which tokenizer={cfg.tokenizer.name} does not "
            "have: use tokenizer=byte, bpe or gpt2, or data.align=false"
        )

    def order(tokens: Array, seed: int) -> Sequences:
        return Sequences(tokens, cfg.model.block_size, seed, mark)

    seed = cfg.train.seed
    if not corpus.mix:
        return order(corpus.train, seed)
    return Mix([order(tokens, seed + i) for i, (tokens, _) in enumerate(corpus.mix)], [w for _, w in corpus.mix], seed)
