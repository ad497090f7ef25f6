"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor], prompt: Tensor, length: int, *, block_size: int, temperature: float = 1.0,
    top_k: int | None = None, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Return ``prompt`` and ``length`` further tokens of it, (B, T + length).

    The draws come from a random stream of their own, so that sampling in the middle of a run changes nothing else.

    Args:
        logits_of: predicts the next token: (B, T) to the logits of the last one's successor, (B, V).
        prompt: (B, T) token numbers, T at least 1.
        length: number of tokens to add.
        block_size: tokens that ``logits_of`` can look at, the last ones.
        temperature: divides the logits; towards 0 the likeliest token always wins.
        top_k: draw from this many likeliest tokens alone.
        seed: of the draws.
    """
    # On the CPU whatever the device: the same text everywhere.
    stream = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = logits_of(tokens[:, -block_size:]).float().cpu() / temperature  # (B, V)
        if top_k is not None and top_k < logits.shape[1]:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=stream)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
    return tokens
