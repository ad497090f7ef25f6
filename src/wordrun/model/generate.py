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

    It has a random generator of its own, so that sampling during a run changes nothing else.

    Args:
        logits_of: predicts the next token: (B, T) to logits, (B, V). ``Cached`` does so at the cost of the new tokens.
        prompt: (B, T) token numbers, T at least 1.
        length: number of tokens to add.
        block_size: largest number of tokens that ``logits_of`` accepts; it gets the last ones.
        temperature: divides the logits; lower is more deterministic.
        top_k: sample from this many most likely tokens.
        top_p: sample from the smallest set of most likely tokens with at least this probability (Holtzman et al. 2019).
        seed: of the generator.
        slide: beyond ``block_size`` the text loses this many tokens at its beginning at a time, after which a cache has
            to be computed anew. 1 always keeps block_size tokens, and makes a cache useless beyond them.
        on_tokens: called with each new column of tokens, (B,) on the CPU.
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
