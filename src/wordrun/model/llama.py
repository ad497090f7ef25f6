"""LLaMA (Touvron et al. 2023), Llama 2 and 3 after it, Mistral, Qwen2.5, Qwen3 (Yang et al. 2025) and Gemma 3.

Shapes: B sequences, T tokens, C = n_embd, N heads, M = n_kv_head, H = head_size or C / N, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.model import mup
from wordrun.model.attention import Mask
from wordrun.model.block import Block
from wordrun.model.context_parallel import Context, attention
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.norms import RMSNorm
from wordrun.model.options import LlamaConfig
from wordrun.model.transformer import Transformer

TRAINED_LENGTH = 8192
"""Context length in tokens of Llama 3, which rope_factor extends."""
GATES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}
)
"""Activations by the names that model.gate takes."""


def rotary_table(T: int, H: int, theta: float, factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding's angles (Su et al. 2021), both (T, 1, H) in fp32.

    Element h of a head is rotated together with element h + H / 2, by theta^(-2h / H) from one token to the next. (The
    paper pairs neighbors; this is the order of Hugging Face's weights.) The first half of the sines is negative, as
    ``rotate`` needs it.

    Args:
        T: tokens.
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
    angles = torch.arange(T, dtype=torch.float32, device=device)[:, None, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


# Outside inference mode, because backward passes cannot use inference tensors.
_kept_table = lru_cache(maxsize=8)(torch.inference_mode(False)(rotary_table))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` (B, T, heads, H) with each pair of elements rotated, computed in fp32."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)


def new_norm(cfg: LlamaConfig, size: int) -> RMSNorm:
    """Return a norm of vectors with ``size`` elements."""
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
        self.rope_theta, self.rope_factor = cfg.rope_theta, cfg.rope_factor
        self.window: int | None = None
        self.dropout, self.scale = cfg.dropout, mup.attention_scale(cfg)
        shared = (cfg.n_kv_head or cfg.n_head) * self.head_size
        self.q = nn.Linear(cfg.n_embd, cfg.attention_width(), bias=cfg.qkv_bias)
        self.k = nn.Linear(cfg.n_embd, shared, bias=cfg.qkv_bias)
        self.v = nn.Linear(cfg.n_embd, shared, bias=cfg.qkv_bias)
        self.proj = nn.Linear(cfg.attention_width(), cfg.n_embd, bias=False)
        self.q_norm, self.k_norm = (new_norm(cfg, self.head_size) if cfg.qk_norm else nn.Identity() for _ in "qk")
        self.drop = Dropout(cfg.dropout)

    def limit(self, window: int, rope_theta: float) -> None:
        """Attend to the last ``window`` tokens only, with another base of the rotary embedding."""
        self.window, self.rope_theta = window, rope_theta

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Let each token attend to itself and earlier tokens; arguments and result as in ``Block.forward``."""
        B, T, _ = x.shape
        q, k, v = (layer(x).view(B, T, -1, self.head_size) for layer in (self.q, self.k, self.v))
        if values is not None:
            v = v + values.view_as(v)
        q, k = self.q_norm(q), self.k_norm(k)
        table = self.table(q, cache.length if cache else 0, context)
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, *table), rotate(k, *table), v))
        if cache is not None:
            k, v = cache.append(k, v)
        y = attention(q, k, v, self.dropout if self.training else 0.0, mask, self.scale, context, self.window)
        return self.drop(self.proj(y.transpose(1, 2).reshape(B, T, -1)))  # type: ignore[no-any-return]

    def table(self, q: Tensor, start: int = 0, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """Return the rotary table for ``q`` (B, T, heads, H) from position ``start``, which all blocks share."""
        # torch.compile fuses the computation; tensor subclasses, such as fake tensors, must not be cached.
        kept = type(q) is Tensor and not torch.compiler.is_compiling()
        make = _kept_table if kept else rotary_table
        end = start + q.shape[1] * (context.size if context else 1)
        # During generation, one table serves many tokens.
        T = 2 ** math.ceil(math.log2(end)) if start else end
        cos, sin = make(T, self.head_size, self.rope_theta, self.rope_factor, q.device)
        if context:
            positions = context.positions(q.shape[1], q.device)
            return cos[positions], sin[positions]
        return cos[start:end], sin[start:end]


class MLP(nn.Module):
    """Hidden units gated by SiLU or GELU of a second linear layer: SwiGLU or GeGLU (Shazeer 2020)."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_hidden, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_hidden, bias=False)
        self.proj = nn.Linear(cfg.n_hidden, cfg.n_embd, bias=False)
        self.drop = Dropout(cfg.dropout)
        self.activation = GATES[cfg.gate]

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token independently; ``x`` and the result are (B, T, C)."""
        return self.drop(self.proj(self.activation(self.gate(x)) * self.up(x)))  # type: ignore[no-any-return]


class Llama(Transformer):
    """Rotary embedding, RMS norms (Zhang and Sennrich 2019), SwiGLU, grouped-query attention; biases by model.qkv_bias.

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
            parts: Any = block
            if int(layer) in local:
                parts.attention.limit(cfg.window, cfg.rope_local_theta or cfg.rope_theta)
            if cfg.post_norm:
                parts.add_post_norms(self.new_norm(), self.new_norm())

    @property
    def tied(self) -> bool:
        return self.cfg.tie

    def new_block(self) -> Block:
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), MLP(self.cfg))

    def new_norm(self) -> nn.Module:
        return new_norm(self.cfg, self.cfg.n_embd)

    def embed(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the embeddings of the tokens, (B, T, C)."""
        x = self.tokens(tokens)
        return self.drop(x * math.sqrt(self.cfg.n_embd) if self.cfg.embed_scale else x)  # type: ignore[no-any-return]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how tensor-parallel ranks shard the matrices; each normalizes its own heads."""
        from torch.distributed.tensor import parallel as tp

        by_head = tp.SequenceParallel(sequence_dim=2, use_local_output=True)
        norms = ("q_norm", "k_norm") if self.cfg.qk_norm else ()
        plan = {**super().tensor_parallel_plan(), **{f"blocks.*.attention.{name}": by_head for name in norms}}
        if self.cfg.post_norm and self.cfg.norm_weights:
            plan |= dict.fromkeys(
                ("blocks.*.post_norm_1", "blocks.*.post_norm_2"), tp.SequenceParallel(use_local_output=True)
            )
        return plan
