"""What every model here is: a stack of blocks between an embedding and an output layer, and facts about itself.

Shapes: B sequences, T tokens, C = n_embd, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.config import ModelConfig


@dataclass(frozen=True)
class Kept:
    """What a block keeps of each token between its forward and its backward pass."""

    width: int
    """Elements per token."""
    of: str = "compute"
    """Type of the elements: compute (the type of the matrix products), stream (the residual stream's), fp32 or byte."""
    product: bool = False
    """Result of a matrix product, which selective activation checkpointing keeps."""
    needed: bool = True
    """Whether the backward pass reads it; if not, selective activation checkpointing alone keeps it."""
    whole: bool = False
    """Whether each rank of a tensor-parallel group has all of it, rather than a share."""


class Transformer(nn.Module):
    """A decoder, or a run of its blocks: the part of it that is one stage of a pipeline.

    The first part has the embedding, the last has the norm and the output layer. Parameters have the same names in
    every part as in the whole, and begin with the same values whoever draws them, so that any layout of ranks holds
    the same model.
    """

    tied: bool
    """Whether the output layer shares its weights with the token embedding."""

    def __init__(self, cfg: ModelConfig, vocab_size: int, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.layers = range(cfg.n_layer) if layers is None else layers
        self.is_first = 0 in self.layers
        self.is_last = cfg.n_layer - 1 in self.layers
        if self.is_first:
            self.add_embedding()
        self.blocks = nn.ModuleDict({str(layer): self.new_block() for layer in self.layers})
        if self.is_last:
            self.norm = self.new_norm()
            self.head = nn.Linear(cfg.n_embd, vocab_size, bias=False)
        self.tie()

    def add_embedding(self) -> None:
        """Make the modules that ``embed`` uses, ``tokens`` among them."""
        self.tokens = nn.Embedding(self.vocab_size, self.cfg.n_embd)

    def new_block(self) -> nn.Module:
        """Return a block, (B, T, C) to (B, T, C)."""
        raise NotImplementedError

    def new_norm(self) -> nn.Module:
        """Return the norm before the output layer."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float:
        """Return the deviation of the normal distribution from which the matrix ``name`` is drawn."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Return the floating-point operations of one token's forward and backward pass of the whole model."""
        raise NotImplementedError

    def kept_by_block(self, on_cpu: bool) -> list[Kept]:
        """Return what one block keeps for its backward pass, besides its input.

        Args:
            on_cpu: on a CPU rather than an accelerator, where other kernels keep other things.
        """
        raise NotImplementedError

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how the ranks of a tensor-parallel group share the matrices: module names to torch's styles."""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        """Return where the residual stream begins, (B, T, C)."""
        return self.tokens(tokens)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Share the weights again that are to be shared, where both are in this part."""
        if self.tied and self.is_first and self.is_last:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, targets: Tensor | None = None, at: int | None = None) -> Tensor:
        """Return what the next part needs; of the last part the losses, or the logits.

        Args:
            x: (B, T) token numbers, T at most block_size; for a later part, what the one before returns.
            targets: (B, T) the tokens that should follow.
            at: the token whose logits alone are wanted.

        Returns:
            (B, T, C); of the last part with targets (B,), the mean over each sequence's tokens in nats, else (B, T, V),
            or (B, V) of token ``at``.
        """
        x = self.features(x)
        if not self.is_last:
            return x
        logits = self.head(x if at is None else x[:, at])
        return logits if targets is None else losses_of_sequences(logits, targets)

    def features(self, x: Tensor) -> Tensor:
        """Return the residual stream (B, T, C) at the end of this part; normalised at the end of the last."""
        if self.is_first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.norm(x) if self.is_last else x

    def num_parameters(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def initialise(self, seed: int, module: nn.Module | None = None, prefix: str = "") -> None:
        """Give the parameters their first values: vectors of norms 1, other vectors 0, matrices normal.

        Every matrix has a random stream of its own, made of ``seed`` and its name, so that a rank can draw the part
        that it holds without the others.

        Args:
            seed: of the weights.
            module: initialise this module of the model alone.
            prefix: what the names of its parameters begin with in the whole model.
        """
        for name, parameter in (module or self).named_parameters(prefix=prefix.rstrip(".")):
            if self.tied and name == "head.weight":  # alone in the last part of a pipeline, and yet the embedding
                name = "tokens.weight"
            if parameter.dim() >= 2:
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                stream = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little"))
                parameter.normal_(std=self.initial_std(name), generator=stream)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def losses_of_sequences(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of each sequence in nats, (B,).

    Args:
        logits: (B, T, V).
        targets: (B, T).
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)
