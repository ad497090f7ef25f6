"""Models: plain ``nn.Module`` that state facts about themselves; backends bring the parallel code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wordrun.config import ModelConfig, part_of
from wordrun.model.base import Transformer
from wordrun.model.gpt import GPT
from wordrun.model.llama import Llama

__all__ = ["GPT", "Llama", "Transformer", "build", "materialise", "outline"]


def outline(cfg: ModelConfig, vocab_size: int, layers: Sequence[int] | None = None) -> Transformer:
    """Return the model that ``cfg`` describes, or a part of it, without memory: all on torch's meta device.

    Args:
        cfg: shapes.
        vocab_size: size of the tokenizer's vocabulary, which ``cfg.vocab_size`` may exceed.
        layers: numbers of the blocks of the part; None: all.
    """
    with torch.device("meta"):
        model: Transformer = part_of("model", cfg).load()(cfg, cfg.vocab_size or vocab_size, layers)
    return model


def build(cfg: ModelConfig, vocab_size: int, seed: int = 0, device: torch.device | str = "cpu") -> Transformer:
    """Return the model that ``cfg`` describes, whole, on ``device`` and with the first values that ``seed`` makes."""
    return materialise(outline(cfg, vocab_size), seed, device)


def materialise(model: Transformer, seed: int, device: torch.device | str) -> Transformer:
    """Give an outline memory on ``device`` and its first values."""
    model.to_empty(device=device)
    model.tie()
    model.initialise(seed)
    return model
