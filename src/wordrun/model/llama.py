"""LLaMA (Touvron et al. 2023), Llama 2 and 3 after it, Mistral, Qwen2.5 and Qwen3 (Yang et al. 2025).

Shapes: B sequences, T tokens, C = n_embd, N heads, M = n_kv_head, H = head_size or C / N, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.model import mup
from wordrun.model.attention import Mask
from wordrun.model.block import Block, CausalAttention
from wordrun.model.context_parallel import Context
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.norms import RMSNorm
from wordrun.model.options import LlamaConfig
from wordrun.model.rotary import RotaryEmbedding
from wordrun.model.transformer import Transformer


def new_norm(cfg: LlamaConfig, size: int) -> RMSNorm:
    """Return a norm of vectors with ``size`` elements (Zhang and Sennrich 2019)."""
    return RMSNorm(size, eps=cfg.norm_eps, elementwise_affine=cfg.norm_weights)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary embedding.

    Queries, keys and values have separate matrices, so that tensor-parallel ranks get complete heads of each.
    """

    by_head = MappingProxyType({"q": 1, "k": 1, "v": 1})
    """As in ``gpt.Attention``."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.head_size = cfg.head_size or cfg.n_embd // cfg.n_head
        shared = cfg.key_heads() * self.head_size
        self.q = nn.Linear(cfg.n_embd, cfg.attention_width(), bias=cfg.qkv_bias)
        self.k = nn.Linear(cfg.n_embd, shared, bias=cfg.qkv_bias)
        self.v = nn.Linear(cfg.n_embd, shared, bias=cfg.qkv_bias)
        self.proj = nn.Linear(cfg.attention_width(), cfg.n_embd, bias=False)
        self.q_norm, self.k_norm = (new_norm(cfg, self.head_size) if cfg.qk_norm else nn.Identity() for _ in "qk")
        self.rotary = RotaryEmbedding(self.head_size, cfg.rope_theta, cfg.rope_factor)
        self.attend = CausalAttention(cfg.dropout, mup.attention_scale(cfg))
        self.drop = Dropout(cfg.dropout)

    def limit(self, window: int) -> None:
        """Attend to the last ``window`` tokens only."""
        self.attend = CausalAttention(self.attend.dropout, self.attend.scale, window)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Let each token attend to itself and to earlier tokens; ``x`` and the result are (B, T, C).

        Args:
            x: the normalized residual stream.
            cache: as in ``Block.forward``.
            mask: as in ``Block.forward``.
            context: as in ``CausalAttention.forward``.
            values: value embeddings (B, T, M H), which are added to the values.
        """
        B, T, _ = x.shape
        q, k, v = (layer(x).view(B, T, -1, self.head_size) for layer in (self.q, self.k, self.v))
        if values is not None:
            v = v + values.view_as(v)
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), cache.length if cache else 0, context)
        y = self.attend(*(each.transpose(1, 2) for each in (q, k, v)), cache, mask, context)
        return self.drop(self.proj(y))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Hidden units gated by SiLU of a second linear layer: SwiGLU (Shazeer 2020)."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_hidden, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_hidden, bias=False)
        self.proj = nn.Linear(cfg.n_hidden, cfg.n_embd, bias=False)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token independently; ``x`` and the result are (B, T, C)."""
        return self.drop(self.proj(F.silu(self.gate(x)) * self.up(x)))  # type: ignore[no-any-return]


class Llama(Transformer):
    """Blocks of grouped-query attention and gated MLP with RMS norms; the options make it any of the models above.

    LLaMA has no dropout; model.dropout adds it in the same places as in GPT.
    """

    cfg: LlamaConfig
    first_layers = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")

    def __init__(
        self, cfg: LlamaConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
    ) -> None:
        super().__init__(cfg, vocab_size, layers, multiple)
        local = set(cfg.local_layers())
        for layer, block in self.blocks.items():
            if int(layer) in local:
                parts: Any = block
                parts.attention.limit(cfg.window)

    @property
    def tied(self) -> bool:  # type: ignore[override]
        """Whether the output layer shares its weights with the token embedding."""
        return self.cfg.tie

    def new_block(self) -> Block:
        """Return a block."""
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), MLP(self.cfg))

    def new_norm(self) -> nn.Module:
        """Return a norm of the residual stream."""
        return new_norm(self.cfg, self.cfg.n_embd)
