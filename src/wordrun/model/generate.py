"""Generates text token by token: sampling, and the KV cache that makes it fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wordrun.common.errors import first_line
from wordrun.model.base import Model
from wordrun.model.kv_cache import KVCache
from wordrun.model.transformer import Transformer


def why_silent(model: Model, vocab_size: int, block_size: int) -> str:
    """Return why ``model``, on the meta device, cannot generate text; empty: it can.

    A plain module can if its forward pass maps tokens (B, T) to logits (B, T, V).
    """
    if isinstance(model, Transformer):
        return ""
    wanted = f"{type(model).__name__}.forward(tokens) does not return logits (B, T, V) for tokens (B, T)"
    try:
        with torch.no_grad(), torch.device("meta"):
            for length in (1, block_size):
                *rows, classes = model(torch.empty(1, length, dtype=torch.int64)).shape
                if rows != [1, length] or classes < vocab_size:
                    return f"{wanted}, but {(*rows, classes)} for (1, {length})"
    except Exception as error:  # a model may do anything
        return f"{wanted} ({type(error).__name__}: {first_line(error)})"
    return ""


def predictor(model: Model) -> Callable[[Tensor], Tensor]:
    """Return a function that predicts the next token for ``generate``, with a KV cache if the model has one."""
    if isinstance(model, Transformer):
        return Cached(model)
    return torch.inference_mode()(lambda tokens: model.logits_at(tokens, -1))  # type: ignore[no-any-return]


class Cached:
    """Predicts the next token for ``generate`` with a KV cache: tokens (B, T) to logits (B, V).

    If the tokens extend the last call's tokens, only the new ones go through the model. The model's weights must not
    change between calls.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.tokens = torch.empty(0, 0, dtype=torch.long)
        self.caches: list[KVCache] = []

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after ``tokens``."""
        known = self.tokens.shape[1]
        if not (self.caches and known < tokens.shape[1] and tokens[:, :known].equal(self.tokens)):
            known, self.caches = 0, [KVCache() for _ in self.model.blocks]
        self.tokens = tokens
        return self.model(tokens[:, known:], at=-1, caches=self.caches)  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    length: int,
    *,
    block_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    slide: int = 1,
    on_tokens: Callable[[Tensor], None] | None = None,
    stop: Sequence[int] = (),
) -> Tensor:
    """Return ``prompt`` followed by ``length`` generated tokens, (B, T + length), or fewer with ``stop``.

    It has its own random generator, so that sampling during a run does not affect training.

    Args:
        logits_of: maps tokens (B, T) to logits of the next token (B, V). ``Cached`` only processes new tokens.
        prompt: (B, T) token ids, T at least 1.
        length: number of tokens to generate.
        block_size: maximum context length of ``logits_of``, which gets the last tokens.
        temperature: divides the logits; lower is more deterministic.
        top_k: sample from this many most likely tokens.
        top_p: sample from the smallest set of most likely tokens with at least this probability (Holtzman et al. 2019).
        seed: seed of the generator.
        slide: number of tokens to drop from the start of a context that exceeds ``block_size``, after which a cache
            must be recomputed. 1 keeps the context full, but makes a cache useless beyond ``block_size``.
        on_tokens: called with each new column of tokens, (B,) on the CPU.
        stop: tokens any of which ends generation, if the first sequence draws it.
    """
    # The generator is on the CPU, so that every device generates the same text.
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    first = max(0, prompt.shape[1] - block_size)
    for _ in range(length):
        if tokens.shape[1] - first > block_size:
            first += min(slide, block_size)
        drawn = draw(logits_of(tokens[:, first:]).float().cpu() / temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
        if on_tokens is not None:
            on_tokens(drawn[:, 0])
        if stop and int(drawn[0, 0]) in stop:
            break
    return tokens


def draw(logits: Tensor, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample a token for each row of ``logits`` (B, V), as (B, 1), filtered by ``top_k`` and then by ``top_p``."""
    if top_k is not None and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    chances = logits.softmax(-1)
    if top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered
        chances = torch.zeros_like(chances).scatter(1, order, ordered.masked_fill(likelier >= top_p, 0))
    return torch.multinomial(chances, 1, generator=generator)
