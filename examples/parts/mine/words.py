import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from mine.alphabet import Alphabet

from wordrun.config import TokenizerConfig

WORD = re.compile(r"\w+|\W")


@dataclass
class WordsConfig(TokenizerConfig):
    """The most frequent words of the text, an end-of-text token, and a token for all other words."""

    name: str = "words"
    most: int = 1000
    """Words in the vocabulary."""
    built_from = "sample"  # not an option, so it has no type


class Words(Alphabet):
    kind = "words"

    @classmethod
    def build(cls, cfg, texts=()):
        counts = Counter(word for text in texts for word in WORD.findall(text))
        return cls(["?", *(word for word, _ in counts.most_common(cfg.most))])

    def encode_batch(self, texts):
        tokens = {word: token for token, word in enumerate(self.characters)}
        return [np.array([tokens.get(word, 0) for word in WORD.findall(text)]) for text in texts]
