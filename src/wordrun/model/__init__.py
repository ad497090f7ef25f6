"""Models: plain ``nn.Module`` that state facts about themselves; backends bring the parallel code."""

from __future__ import annotations

from wordrun.config import ModelConfig
from wordrun.model.gpt import GPT

__all__ = ["GPT", "build"]


def build(cfg: ModelConfig, vocab_size: int) -> GPT:
    """Return the model that ``cfg`` describes, initialised from torch's random stream.

    Args:
        cfg: shapes.
        vocab_size: size of the tokenizer's vocabulary, which ``cfg.vocab_size`` may exceed.
    """
    return GPT(cfg, cfg.vocab_size or vocab_size)
