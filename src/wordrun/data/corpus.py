"""A text, its tokenizer, and its tokens in two splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wordrun.config import DataConfig
from wordrun.data.sources import Source, read
from wordrun.data.tokenizers import CharTokenizer


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run trains and is evaluated on."""

    source: Source
    tokenizer: CharTokenizer
    train: NDArray[np.integer]
    val: NDArray[np.integer]


def load(data: DataConfig, source: Source) -> Corpus:
    """Read and tokenise ``source``; the last ``data.val_fraction`` of it is the validation split."""
    text = read(source)
    tokenizer = CharTokenizer.of_text(text)
    tokens: NDArray[np.integer] = tokenizer.encode(text).astype(
        np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    )
    split = int(len(tokens) * (1 - data.val_fraction))
    return Corpus(source, tokenizer, tokens[:split], tokens[split:])
