"""The block of all transformers, pre-norm attention and MLP, and the core of the attention.

Shapes: B sequences, T tokens, C = n_embd, N query heads, M key heads, H head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wordrun.model.attention import Mask, causal_attention
from wordrun.model.context_parallel import Context
from wordrun.model.kv_cache import KVCache


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.attention = norm_1, attention
        self.norm_2, self.mlp = norm_2, mlp

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Mask | None = None, **additions: Any) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x: (B, T, C), like the result.
            cache: KV cache of earlier tokens; the keys and values of ``x`` are appended.
            mask: which tokens attend to which, from ``document_mask`` or ``context``; None: causal attention.
            additions: further arguments of this block's attention, such as ``context``, the ranks that have the other
                tokens of the sequences.
        """
        x = x + self.attention(self.norm_1(x), cache=cache, mask=mask, **additions)
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    """The core of the attention, between its linear layers: each token attends to itself and to earlier tokens.

    Args:
        dropout: dropout probability of the attention weights, in training.
        scale: factor of the products of queries and keys; None: 1 / sqrt(H).
        window: number of tokens to which each attends, the last one being itself; None: all earlier ones.
    """

    def __init__(self, dropout: float, scale: float | None, window: int | None = None) -> None:
        super().__init__()
        self.dropout, self.scale, self.window = dropout, scale, window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the attention of the queries, (B, T, N H).

        Args:
            q: queries, (B, N, T, H).
            k: keys of the same tokens, (B, M, T, H).
            v: their values, (B, M, T, H).
            cache: keys and values of earlier tokens, to which these are appended.
            mask: as in ``Block.forward``.
            context: the ranks that have the other tokens of the sequences; None: there are none.
        """
        attend = context.attention if context else causal_attention
        if cache is not None:
            k, v = cache.append(k, v)
            attend = cache.attention
        y: Tensor = attend(q, k, v, self.dropout if self.training else 0.0, mask, self.scale, self.window)
        return y.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return f"dropout={self.dropout}, scale={self.scale}, window={self.window}"
