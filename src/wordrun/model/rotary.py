"""Rotary position embedding (Su et al. 2021), with Llama 3.1's scaling for long contexts.

Shapes: B sequences, T tokens, H head size.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from wordrun.model.context_parallel import Context
from wordrun.model.kv_cache import Position

TRAINED_LENGTH = 8192
"""Context length in tokens of Llama 3, which model.rope_factor extends."""


class RotaryEmbedding(nn.Module):
    """Rotates the queries and keys of each head by angles that grow with the token's position.

    Args:
        head_size: H, which must be even.
        theta: base; larger values give slower rotations.
        factor: divides the frequency of slow rotations, as in ``rotary_table``; 1: leaves all as they are.
    """

    def __init__(self, head_size: int, theta: float, factor: float) -> None:
        super().__init__()
        self.head_size, self.theta, self.factor = head_size, theta, factor

    def forward(
        self, q: Tensor, k: Tensor, start: int | Position = 0, context: Context | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``q`` and ``k``, both (B, T, heads, H), rotated.

        Args:
            q: queries.
            k: keys of the same tokens.
            start: position of the first token.
            context: how sequences are divided over ranks, from which the positions of this rank's tokens follow.
        """
        cos, sin = self._table(q, start, context)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def _table(self, q: Tensor, start: int | Position, context: Context | None) -> tuple[Tensor, ...]:
        """Return cosines and sines, (T, 1, H), for the tokens of ``q``; all blocks share the table that is kept."""
        if isinstance(start, Position):
            facts = self.head_size, self.theta, self.factor, q.device
            return start.shared(facts, lambda: rotary_table(start.value, *facts))
        # torch.compile fuses the computation; tensor subclasses, such as fake tensors, must not be cached.
        cached = type(q) is Tensor and not torch.compiler.is_compiling()
        make = _kept_table if cached else rotary_table
        end = start + q.shape[1] * (context.size if context else 1)
        # With a start, text is generated token by token: a table up to the next power of two serves many steps.
        T = 2 ** math.ceil(math.log2(end)) if start else end
        cos, sin = make(T, self.head_size, self.theta, self.factor, q.device)
        if context:
            positions = context.positions(q.shape[1], q.device)
            return cos[positions], sin[positions]
        return cos[start:end], sin[start:end]

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return f"head_size={self.head_size}, theta={self.theta}, factor={self.factor}"


def rotary_table(T: int | Tensor, H: int, theta: float, factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles for T tokens, both (T, 1, H) in fp32.

    Element h of a head is rotated together with element h + H / 2, by theta^(-2h / H) radians from one token to the
    next. (The paper pairs neighbors; this is the order of Hugging Face's weights.) The first half of the sines is
    negative, as ``rotate`` needs it.

    Args:
        T: number of tokens, the first one at position 0, or their positions, (T,).
        H: size of a head.
        theta: base.
        factor: slows down rotations with a period above TRAINED_LENGTH tokens; periods below a quarter of it are
            unchanged, and the factor is interpolated in between (Llama 3.1).
        device: device of the result.
    """
    speeds = 1 / theta ** (torch.arange(0, H, 2, dtype=torch.float32, device=device) / H)  # radians per token
    if factor != 1:
        rounds = TRAINED_LENGTH * speeds / (2 * math.pi)
        kept = ((rounds - 1) / (4 - 1)).clamp(0, 1)
        speeds = speeds * (kept + (1 - kept) / factor)
    positions = T.float() if isinstance(T, Tensor) else torch.arange(T, dtype=torch.float32, device=device)
    angles = positions[:, None, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


# Outside inference mode, because backward passes cannot use inference tensors.
_kept_table = lru_cache(maxsize=8)(torch.inference_mode(False)(rotary_table))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` (B, T, heads, H) with each pair of elements rotated, computed in fp32, in the dtype of ``x``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)
