"""Options of tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wordrun.common.section import Section
from wordrun.common.suggestions import nearest
from wordrun.common.validation import positive

BUILT_FROM = ("sample", "characters")
"""From what a tokenizer can be built: a sample of the text, or its distinct characters."""


@dataclass
class TokenizerConfig(Section):
    """How text becomes tokens."""

    name: str = ""
    """Name of the tokenizer; set by tokenizer=NAME."""

    def problems(self) -> Iterable[str]:
        if self.built_from not in (*BUILT_FROM, ""):
            yield (
                f"{type(self).__name__}.built_from={self.built_from!r} should be 'sample' (texts of the data), "
                f"'characters' (all distinct ones) or '' (nothing){nearest(str(self.built_from), BUILT_FROM)}"
            )

    @property
    def built_from(self) -> str:
        """From what the tokenizer is built: the text's distinct "characters", a "sample" of it, or nothing ("").

        A subclass may have a plain attribute of this name instead.
        """
        return ""

    @property
    def sample_mb(self) -> int:
        """Size of the sample in MiB."""
        return 64

    @property
    def known_vocab_size(self) -> int | None:
        """The vocabulary size, if it is known before the text and all files are read."""
        return None


@dataclass
class CharTokenizerConfig(TokenizerConfig):
    """One token per distinct character of the text."""

    name: str = "char"
    """Name of the tokenizer; set by tokenizer=NAME."""

    @property
    def built_from(self) -> str:
        return "characters"


@dataclass
class ByteTokenizerConfig(TokenizerConfig):
    """256 bytes and an end-of-text token."""

    name: str = "byte"
    """Name of the tokenizer; set by tokenizer=NAME."""

    @property
    def known_vocab_size(self) -> int | None:
        """The number of tokens."""
        return 257


@dataclass
class GPT2TokenizerConfig(TokenizerConfig):
    """GPT-2's byte pair encoding with 50,257 tokens, through tiktoken."""

    name: str = "gpt2"
    """Name of the tokenizer; set by tokenizer=NAME."""
    path: str | None = None
    """Vocabulary: a .tiktoken file, vocab.bpe, merges.txt or a folder with one of these; null: tiktoken's cache."""

    @property
    def known_vocab_size(self) -> int | None:
        """The number of tokens."""
        return 50257


@dataclass
class BPETokenizerConfig(TokenizerConfig):
    """Byte pair encoding trained on the text, in any language; needs no network."""

    name: str = "bpe"
    """Name of the tokenizer; set by tokenizer=NAME."""
    vocab_size: int = 4096
    """Maximum vocabulary size: 256 bytes, the end-of-text token, and merges."""
    train_mb: int = 64
    """Maximum amount of text to train the tokenizer on, in MiB, sampled evenly from the source."""
    path: str | None = None
    """An existing tokenizer.json; null: train one."""

    @property
    def built_from(self) -> str:
        """A sample, unless ``path`` names a trained tokenizer."""
        return "" if self.path else "sample"

    @property
    def sample_mb(self) -> int:
        return self.train_mb

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("tokenizer", self, "train_mb")
        if self.vocab_size < 257:
            yield f"tokenizer.vocab_size={self.vocab_size} should be at least 257: 256 bytes and the end-of-text token"


@dataclass
class HFTokenizerConfig(TokenizerConfig):
    """The tokenizer of a Hugging Face model."""

    name: str = "hf"
    """Name of the tokenizer; set by tokenizer=NAME."""
    path: str | None = None
    """Folder of the model, which contains tokenizer.json."""

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if not self.path and not hasattr(cfg.model, "path"):  # else it is missing there
            yield "tokenizer=hf needs tokenizer.path=FOLDER, with the model's tokenizer.json"
