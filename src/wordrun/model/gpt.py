"""GPT-2 (Radford et al. 2019), with nanoGPT's initialisation and choice of biases.

Shapes: B sequences, T tokens, C = n_embd, N heads, H = C / N, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.config import ModelConfig
from wordrun.model.dropout import Dropout, causal_attention


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_head = cfg.n_head
        self.dropout = cfg.dropout
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token gathers from itself and the tokens before it; x and result (B, T, C)."""
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, N, T, H)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with a GELU between, four times as wide inside."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself; x and result (B, T, C)."""
        return self.drop(self.proj(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.attention = Attention(cfg)
        self.norm_2 = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block; x and result (B, T, C)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next token. The output layer shares its weights with the token embedding."""

    def __init__(self, cfg: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.tokens = nn.Embedding(vocab_size, cfg.n_embd)
        self.positions = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.drop = Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.head = nn.Linear(cfg.n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew: normal with deviation 0.02, biases 0, norms 1.

        The projections that end in the residual stream get 0.02 / sqrt(2 n_layer), so that its variance
        does not grow with depth (Radford et al. 2019, section 2.3).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                std = 0.02 / math.sqrt(2 * self.cfg.n_layer) if name.endswith(".proj") else 0.02
                if module is not self.head:  # tied: drawn as the embedding already
                    nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss of each sequence where ``targets`` are given, else the logits of the last token.

        Args:
            tokens: (B, T) token numbers, T at most block_size.
            targets: (B, T) the tokens that should follow.

        Returns:
            (B,) mean over each sequence's tokens in nats, or (B, V).
        """
        x = self.features(tokens)
        if targets is None:
            return self.head(x[:, -1])  # type: ignore[no-any-return]
        logits = self.head(x).float()  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the normalised residual stream (B, T, C) at the end of the blocks."""
        T = tokens.shape[1]
        x = self.drop(self.tokens(tokens) + self.positions.weight[:T])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Return the floating-point operations of one token's forward and backward pass.

        6 for every weight of a matrix product (2 forward, 4 backward) and 12 n_layer C T for the
        attention of T tokens, without taking the causal mask off, as in appendix B of PaLM (Chowdhery et al. 2022).
        Embedding look-ups are no products and do not count; the output layer is one and does.
        """
        cfg = self.cfg
        weights = 12 * cfg.n_layer * cfg.n_embd**2 + self.vocab_size * cfg.n_embd
        return 6 * weights + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size
