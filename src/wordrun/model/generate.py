"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wordrun.model.cache import KVCache
from wordrun.model.transformer import Transformer


class Cached:
    """Predicts the next token for ``generate``: tokens (B, T) to logits (B, V).

    Tokens that extend those of the last call cost a forward pass of the new ones only. The model's weights must not
    change between calls.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.tokens = torch.empty(0, 0, dtype=torch.long)
        self.caches: list[KVCache] = []

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the successor of ``tokens``."""
        known = self.tokens.shape[1]
        if not (self.caches and known < tokens.shape[1] and tokens[:, :known].equal(self.tokens)):
            known, self.caches = 0, [KVCache() for _ in self.model.blocks]
        self.tokens = tokens
        return self.model(tokens[:, known:], at=-1, caches=self.caches)  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor], prompt: Tensor, length: int, *, block_size: int, temperature: float = 1.0,
    top_k: int | None = None, top_p: float = 1.0, seed: int = 0, slide: int = 1,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return ``prompt`` and ``length`` further tokens of it, (B, T + length).

    The draws come from a random stream of their own, so that sampling in the middle of a run changes nothing else.

    Args:
        logits_of: predicts the next token: (B, T) to the logits of the last one's successor, (B, V). A
            ``Cached`` model does so at the cost of the tokens that are new to it.
        prompt: (B, T) token numbers, T at least 1.
        length: number of tokens to add.
        block_size: tokens that ``logits_of`` can look at, the last ones.
        temperature: divides the logits; towards 0 the likeliest token always wins.
        top_k: draw from this many likeliest tokens alone.
        top_p: draw from the fewest likeliest tokens that have this probability together (Holtzman et al. 2019).
        seed: of the draws.
        slide: when the text outgrows ``block_size`` its beginning is left out, this many tokens at a time, and the
            model reads the rest anew: all that it knows of a token depends on those before it. 1 always shows it
            block_size tokens and makes a cache useless beyond them.
        on_tokens: is called with each new column of tokens, (B,) on the CPU, as soon as it is drawn.
    """
    # On the CPU whatever the device: the same text everywhere.
    stream = torch.Generator().manual_seed(seed)
    tokens = prompt
    first = max(0, prompt.shape[1] - block_size)
    for _ in range(length):
        if tokens.shape[1] - first > block_size:
            first += min(slide, block_size)
        drawn = draw(logits_of(tokens[:, first:]).float().cpu() / temperature, top_k, top_p, stream)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
        if on_tokens is not None:
            on_tokens(drawn[:, 0])
    return tokens


def draw(logits: Tensor, top_k: int | None, top_p: float, stream: torch.Generator) -> Tensor:
    """Return a token for each row of ``logits`` (B, V), as (B, 1): of the ``top_k`` likeliest and then of ``top_p``."""
    if top_k is not None and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    chances = logits.softmax(-1)
    if top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered
        chances = torch.zeros_like(chances).scatter(1, order, ordered.masked_fill(likelier >= top_p, 0))
    return torch.multinomial(chances, 1, generator=stream)
