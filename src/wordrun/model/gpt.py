"""GPT-2 (Radford et al. 2019), with nanoGPT's initialization and choice of biases.

Shapes: B sequences, T tokens, C = n_embd, N heads, H = C / N, V vocabulary.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.model import mup
from wordrun.model.attention import Mask
from wordrun.model.block import Block, CausalAttention
from wordrun.model.context_parallel import Context, positions_of
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.norms import LayerNorm
from wordrun.model.options import GPTConfig
from wordrun.model.transformer import Transformer


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    by_head = MappingProxyType({"qkv": 3})
    """Layers whose outputs are ordered by head, and the number of vectors that each head has in them."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.head_size = cfg.n_embd // cfg.n_head
        # Rows are ordered by head, and by q, k, v within a head, so that tensor-parallel ranks get complete heads.
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.attend = CausalAttention(cfg.dropout, mup.attention_scale(cfg))
        self.drop = Dropout(cfg.dropout)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, mask: Mask | None = None, context: Context | None = None
    ) -> Tensor:
        """Let each token attend to itself and to earlier tokens; ``x`` and the result are (B, T, C).

        Args:
            x: the normalized residual stream.
            cache: as in ``Block.forward``.
            mask: as in ``Block.forward``.
            context: as in ``CausalAttention.forward``.
        """
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, 3, self.head_size)
        # Each (B, N, T, H). With unbind first, the backward pass assembles the gradients in one copy.
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(3))
        return self.drop(self.proj(self.attend(q, k, v, cache, mask, context)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with a GELU between them, and 4 n_embd hidden units."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.gelu = cfg.gelu
        self.up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token independently; ``x`` and the result are (B, T, C)."""
        return self.drop(self.proj(F.gelu(self.up(x), approximate=self.gelu)))  # type: ignore[no-any-return]


class GPT(Transformer):
    """Learned positions, layer norms, GELU; the output layer shares its weights with the token embedding."""

    cfg: GPTConfig
    tied = True
    first_layers = ("attention.qkv", "mlp.up")

    def add_embedding(self) -> None:
        """Add the embeddings of tokens and positions."""
        super().add_embedding()
        self.positions = nn.Embedding(self.cfg.block_size, self.cfg.n_embd)

    def new_block(self) -> Block:
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), MLP(self.cfg))

    def new_norm(self) -> nn.Module:
        return LayerNorm(self.cfg.n_embd, bias=self.cfg.bias)

    def embed(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the sum of token and position embeddings, (B, T, C)."""
        positions = positions_of(tokens.shape[1], tokens.device, cache.length if cache else 0, context)
        return self.drop(self.tokens(tokens) + self.positions(positions))  # type: ignore[no-any-return]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate, Shard, parallel as tp

        return {
            **super().tensor_parallel_plan(),
            "positions": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        }
