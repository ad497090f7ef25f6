"""Build tokenizers, and read those that wordrun has saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part, part_of, parts
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import GPT2TokenizerConfig, TokenizerConfig
from wordrun.data.tokenizers.subword import gpt2_if_present


def build(cfg: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer that ``cfg`` describes, built from ``texts`` if it needs some (``cfg.built_from``).

    Raises:
        ConfigError: if its file is missing or invalid, or it reads ``texts`` although ``cfg.built_from`` is empty.
    """
    part = part_of("tokenizer", cfg)
    with part.blamed():
        tokenizer: Tokenizer = part.load().build(cfg, texts if cfg.built_from else _NoTexts(part, type(cfg).__name__))
    return tokenizer


@dataclass(frozen=True)
class _NoTexts:
    """Takes the place of texts if ``built_from`` is empty: false as a condition; iterating over it is an error."""

    part: Part
    options: str

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return _reject_texts(self.part, self.options)


def _reject_texts(part: Part, options: str) -> Iterator[str]:
    raise ConfigError(
        f"{part}: build reads texts, but {options} has no built_from: add built_from = 'sample' to it (texts of the "
        "data), or 'characters' (all distinct ones)",
        page="extend/tokenizer.md#a-tokenizer",
    )


def from_json(text: str, source: Path | str = "this") -> Tokenizer:
    """Return the tokenizer saved by any class's ``to_json``.

    Args:
        text: the JSON.
        source: where it comes from, for messages.

    Raises:
        ConfigError: if wordrun did not save it.
    """
    kinds = parts("tokenizer")
    try:
        tokenizer: Tokenizer = kinds[json.loads(text)["kind"]].load().from_json(text)
    except Exception as error:  # the text may be anything
        raise ConfigError(
            f"{source} is not a tokenizer that wordrun saved ({type(error).__name__}: {str(error)[:80]}): "
            f"expected JSON with one of the kinds {', '.join(kinds)}"
        ) from None
    return tokenizer


def from_checkpoint(text: str, source: Path | str = "this") -> Tokenizer:
    """Return the tokenizer saved in a checkpoint; GPT-2's vocabulary, if not saved, is looked for on this machine.

    Raises:
        ConfigError: if wordrun did not save it.
    """
    tokenizer = from_json(text, source)
    return gpt2_if_present(GPT2TokenizerConfig()) if tokenizer.missing else tokenizer
