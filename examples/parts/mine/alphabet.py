import json
from dataclasses import dataclass

import numpy as np

from wordrun.common.errors import ConfigError
from wordrun.config import TokenizerConfig
from wordrun.data.tokenizers.base import END, Tokenizer


@dataclass
class AlphabetConfig(TokenizerConfig):
    """One token for each character of an alphabet, and an end-of-text token."""

    name: str = "alphabet"
    characters: str = "\n+0123456789="
    """The alphabet."""


class Alphabet(Tokenizer):
    kind = "alphabet"  # its name, by which a checkpoint finds it again

    def __init__(self, characters):
        self.characters, self.eot, self.vocab_size = characters, len(characters), len(characters) + 1

    @classmethod
    def build(cls, cfg, texts=()):
        return cls(cfg.characters)

    def encode_batch(self, texts):
        if unknown := set("".join(texts)) - set(self.characters):
            raise ConfigError(f"tokenizer.characters={self.characters!r} lacks {''.join(sorted(unknown))!r}")
        return [np.array([self.characters.index(each) for each in text], dtype=np.uint8) for text in texts]

    def decode(self, tokens):
        return "".join([*self.characters, END][min(token, self.eot)] for token in tokens)

    def to_json(self):
        return json.dumps({"kind": self.kind, "characters": self.characters})

    @classmethod
    def from_json(cls, text):
        return cls(json.loads(text)["characters"])
