"""What a transformer consists of, and what it computes on.

Shapes: B sequences, T tokens, C = n_embd.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from wordrun.model.attention import Mask
from wordrun.model.kv_cache import KVCache


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream, optionally after another norm."""

    def __init__(self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.attention = norm_1, attention
        self.norm_2, self.mlp = norm_2, mlp
        self.post_norm_1: nn.Module = nn.Identity()
        self.post_norm_2: nn.Module = nn.Identity()

    def add_post_norms(self, after_attention: nn.Module, after_mlp: nn.Module) -> None:
        """Normalize what attention and MLP add to the residual stream."""
        self.post_norm_1, self.post_norm_2 = after_attention, after_mlp

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Mask | None = None, **additions: Any) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x: (B, T, C), like the result.
            cache: KV cache of earlier tokens; the keys and values of ``x`` are appended.
            mask: which tokens attend to which, from ``document_mask`` or ``context``; None: causal attention.
            additions: further arguments of this block's attention.
        """
        x = x + self.post_norm_1(self.attention(self.norm_1(x), cache=cache, mask=mask, **additions))
        return x + self.post_norm_2(self.mlp(self.norm_2(x)))  # type: ignore[no-any-return]


class TokenBatch(Protocol):
    """The parts of a batch that a transformer uses."""

    @property
    def tokens(self) -> Tensor:
        """(B, T) int64."""

    @property
    def targets(self) -> Tensor:
        """(B, T) the next tokens."""

    @property
    def documents(self) -> Tensor | None:
        """(B, T) document number of each token, if attention must stay within documents."""

    @property
    def scale(self) -> Tensor | None:
        """The factor for the mean loss of each sequence, () or (B,); None: 1."""
