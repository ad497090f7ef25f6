"""Models: plain ``nn.Module`` classes; backends add the parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from wordrun.config import ModelConfig
from wordrun.model.base import Model
from wordrun.model.gpt import GPT
from wordrun.model.llama import Llama
from wordrun.model.transformer import Transformer
from wordrun.registry import part_of

__all__ = ["GPT", "Llama", "Model", "Transformer", "build", "materialise", "meta_model"]

M = TypeVar("M", bound=Model)


def meta_model(
    cfg: ModelConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
) -> Transformer:
    """Return the model that ``cfg`` describes, or a pipeline stage of it, on the meta device: shapes without memory.

    Args:
        cfg: the model's options.
        vocab_size: size of the tokenizer's vocabulary, which ``cfg.vocab_size`` may exceed.
        layers: numbers of the stage's blocks; None: all.
        multiple: pad the vocabulary to a multiple of this.
    """
    with torch.device("meta"):
        model: Transformer = part_of("model", cfg).load()(cfg, cfg.vocab_size or vocab_size, layers, multiple)
    return model


def build(cfg: ModelConfig, vocab_size: int, seed: int = 0, device: torch.device | str = "cpu") -> Transformer:
    """Return the model that ``cfg`` describes on ``device``, initialised with ``seed``."""
    return materialise(meta_model(cfg, vocab_size), seed, device)


def materialise(model: M, seed: int, device: torch.device | str) -> M:
    """Allocate a meta model on ``device`` and initialise it."""
    model.to_empty(device=device)
    model.tie()
    model.initialise(seed)
    return model
