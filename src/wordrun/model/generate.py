"""Generates text token by token: sampling, and the KV cache that makes it fast."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wordrun.common.errors import first_line
from wordrun.model.base import Model
from wordrun.model.kv_cache import FixedKVCache, KVCache, Position
from wordrun.model.transformer import Transformer

log = logging.getLogger(__name__)


def why_silent(model: Model, vocab_size: int, block_size: int) -> str:
    """Return why ``model``, on the meta device, cannot generate text; empty: it can.

    A plain module can if its forward pass maps tokens (B, T) to logits (B, T, V), or if it defines ``continued``.
    """
    if isinstance(model, Transformer) or type(model).continued is not Model.continued:
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


def fast_predictor(model: Model, device: torch.device) -> Callable[[Tensor], Tensor]:
    """As ``predictor``, for tokens on the CPU and a ``model`` on ``device`` in the dtype of the computation."""
    if isinstance(model, Transformer) and device.type == "cuda":
        return Graphed(model)
    predict = predictor(model)
    return lambda tokens: predict(tokens.to(device))


def generate_by(model: Model, device: torch.device) -> Callable[..., Tensor]:
    """Return ``generate`` with ``model`` on ``device`` in place of its first argument, or what the model has for it."""
    predict = fast_predictor(model, device)

    def run(prompt: Tensor, length: int, **sampling: Any) -> Tensor:
        found = model.continued(prompt, length, **sampling)
        return generate(predict, prompt, length, **sampling) if found is None else found

    return run


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
        return self.further(tokens[:, known:])

    def further(self, tokens: Tensor) -> Tensor:
        """Return the logits after ``tokens`` (B, T), which follow those in the caches."""
        return self.model(tokens, at=-1, caches=self.caches)  # type: ignore[no-any-return]


class Graphed(Cached):
    """As ``Cached``, for tokens on the CPU and a model on any device; a CUDA device computes single tokens by a graph.

    Launching the forward pass of one token kernel by kernel takes the host longer than a small model's computation
    takes the device; a graph of all kernels is launched at once. It runs the same kernels at the same addresses for
    each token, so the caches have room for a fixed number of tokens. When the room is used up, it is doubled, and the
    graph recorded again.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.device = next(model.parameters()).device
        self.position = Position(0, 0, self.device)
        self.step: Callable[[Tensor], Tensor] = self.one_token

    def further(self, tokens: Tensor) -> Tensor:
        start, tokens = self.tokens.shape[1] - tokens.shape[1], tokens.to(self.device)
        fixed = [each for each in self.caches if isinstance(each, FixedKVCache)]
        if tokens.shape[1] > 1 or start == 0:
            if fixed:  # such as another turn of a conversation
                self.caches = [each.grown(start) for each in fixed]
            return super().further(tokens)
        if not fixed or start == self.position.capacity:
            self._make_room(start, tokens)
        return self.step(tokens)

    def one_token(self, tokens: Tensor) -> Tensor:
        """Return the logits after one token, (B, 1), in each sequence, which is appended to the fixed caches."""
        logits = super().further(tokens)
        self.position.advance()
        return logits

    def _make_room(self, length: int, tokens: Tensor) -> None:
        """Prepare ``step`` for ``tokens`` (B, 1) at position ``length`` and for those after them."""
        begun = [each.grown(length) if isinstance(each, FixedKVCache) else each for each in self.caches]
        self._fix(begun, length)
        self.step = self.one_token
        if self.device.type != "cuda":
            return
        try:
            self.one_token(tokens)  # libraries choose kernels and allocate in the first call, which a graph cannot
            self._fix(begun, length)
            self.step = self._recorded(tokens.clone())
        except RuntimeError as error:
            log.warning("text is generated without a CUDA graph, which is slower: %s", first_line(error))
            self._fix(begun, length)

    def _fix(self, begun: Sequence[KVCache], length: int) -> None:
        """Continue with fixed caches after ``begun``, which have ``length`` tokens."""
        room = max(LEAST_ROOM, 2 ** math.ceil(math.log2(2 * length)))
        # Kernels of attention want a multiple of 8.
        self.position = Position(min(room, -(-self.model.cfg.block_size // 8) * 8), length, self.device)
        self.caches = [FixedKVCache(each, self.position) for each in begun]

    def _recorded(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return ``one_token`` as a CUDA graph that reads ``tokens`` (B, 1)."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.one_token(tokens)

        def replayed(further: Tensor) -> Tensor:
            tokens.copy_(further)
            graph.replay()
            return logits.clone()

        return replayed


LEAST_ROOM = 256
"""Least number of tokens for which ``Graphed`` makes room."""


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
        drawn = draw(logits_of(tokens[:, first:]), temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
        if on_tokens is not None:
            on_tokens(drawn[:, 0])
        if stop and int(drawn[0, 0]) in stop:
            break
    return tokens


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample a token for each row of ``logits`` (B, V), as (B, 1) on the CPU, filtered by ``top_k``, then by ``top_p``.

    Only the logits of the ``top_k`` most likely tokens leave the device.
    """
    ids = None
    if top_k is not None and top_k < logits.shape[1]:
        logits, ids = (each.cpu() for each in logits.topk(top_k))
        ids, order = ids.sort()  # as in the vocabulary: devices differ in the order of equal logits
        logits = logits.gather(1, order)
    chances = (logits.float().cpu() / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered
        chances = torch.zeros_like(chances).scatter(1, order, ordered.masked_fill(likelier >= top_p, 0))
    drawn = torch.multinomial(chances, 1, generator=generator)
    return drawn if ids is None else ids.gather(1, drawn)
