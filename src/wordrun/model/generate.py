"""Text from a model, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from wordrun.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt: Tensor, length: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Tensor:
    """Return ``prompt`` and ``length`` further tokens of it, (B, T + length).

    The draws come from a random stream of their own, so that sampling in the middle of a run changes nothing else.

    Args:
        model: predicts the next token; its train or eval mode is kept.
        prompt: (B, T) token numbers, T at least 1.
        length: number of tokens to add.
        temperature: divides the logits; towards 0 the likeliest token always wins.
        top_k: draw from this many likeliest tokens alone.
        seed: of the draws.
    """
    training = model.training
    model.eval()
    # On the CPU whatever the device: the same text everywhere.
    stream = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[:, -model.cfg.block_size :]).float().cpu() / temperature  # (B, V)
        if top_k is not None and top_k < logits.shape[1]:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=stream)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
    model.train(training)
    return tokens
