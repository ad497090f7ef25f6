"""What every model here is: a stack of blocks between an embedding and an output layer, and facts about itself.

Shapes: B sequences, T tokens, C = n_embd, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.config import ModelConfig
from wordrun.model.attention import within
from wordrun.model.cache import Past

DRAWN_ON_CPU = 2**25
"""Matrices up to this many elements begin with values drawn on the CPU, the same on every kind of device.

Larger ones are drawn where they live: the CPU would take seconds for each.
"""


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1 = norm_1
        self.attention = attention
        self.norm_2 = norm_2
        self.mlp = mlp

    def forward(self, x: Tensor, past: Past | None = None, seen: Tensor | None = None) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x: (B, T, C), as the result.
            past: what came before.
            seen: (B, 1, T, T), which tokens each one attends to; None: itself and all before.
        """
        x = x + self.attention(self.norm_1(x), past=past, seen=seen)
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder, or a run of its blocks: the part of it that is one stage of a pipeline.

    The first part has the embedding, the last has the norm and the output layer. Parameters have the same names in
    every part as in the whole, and begin with the same values whoever draws them, so that any layout of ranks holds
    the same model.
    """

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

    @property
    def tied(self) -> bool:
        """Whether the output layer shares its weights with the token embedding."""
        raise NotImplementedError

    def new_block(self) -> Block:
        """Return a block, (B, T, C) to (B, T, C). What it adds to the residual stream comes from layers named proj."""
        raise NotImplementedError

    def new_norm(self) -> nn.Module:
        """Return one of the norms: there are two in a block, and one before the output layer."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Return the floating-point operations of one token's forward and backward pass of the whole model."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float:
        """Return the deviation of the normal distribution from which the matrix ``name`` is drawn.

        0.02, and 0.02 / sqrt(2 n_layer) for the projections that end in the residual stream: with that its variance
        does not grow with depth (Radford et al. 2019, section 2.3).
        """
        return 0.02 / math.sqrt(2 * self.cfg.n_layer) if name.endswith("proj.weight") else 0.02

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how the ranks of a tensor-parallel group share the matrices: module names to torch's styles.

        As in Megatron-LM (Shoeybi et al. 2019) attention goes by heads, the MLP by hidden units, embedding and output
        layer by vocabulary. Between them each rank has a run of the tokens (sequence parallelism, Korthikanti et al.
        2022). A model adds the layers with which its attention and its MLP begin.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as tp

        gathered = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return {
            "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.norm_1": tp.SequenceParallel(),
            "blocks.*.attention": gathered,
            "blocks.*.attention.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm_2": tp.SequenceParallel(),
            "blocks.*.mlp": gathered,
            "blocks.*.mlp.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return where the residual stream begins, (B, T, C); ``start`` is the position of the first token."""
        return self.tokens(tokens)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Share the weights again that are to be shared, where both are in this part."""
        if self.tied and self.is_first and self.is_last:
            self.head.weight = self.tokens.weight

    def forward(
        self, x: Tensor, targets: Tensor | None = None, at: int | None = None, pasts: Sequence[Past] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return what the next part needs; of the last part the losses, or the logits.

        Args:
            x: (B, T) token numbers, T at most block_size; for a later part, what the one before returns.
            targets: (B, T) the tokens that should follow.
            at: the token whose logits alone are wanted.
            pasts: what came before ``x``, for each block of this part; ``x`` is added to it.
            documents: (B, T) numbers of the documents that tokens belong to, if attention is to stay within them.

        Returns:
            (B, T, C); of the last part with targets (B,), the mean over each sequence's tokens in nats, else (B, T, V),
            or (B, V) of token ``at``.
        """
        x = self.features(x, pasts, documents)
        if not self.is_last:
            return x
        logits = self.head(x if at is None else x[:, at])
        return logits if targets is None else losses_of_sequences(logits, targets)

    def features(self, x: Tensor, pasts: Sequence[Past] | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the residual stream (B, T, C) at the end of this part; normalised at the end of the last."""
        if self.is_first:
            x = self.embed(x, pasts[0].length if pasts else 0)
        seen = None if documents is None else within(documents)
        for block, past in zip(self.blocks.values(), pasts or repeat(None), strict=False):
            x = block(x, past=past, seen=seen)
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
                device = torch.device("cpu") if parameter.numel() <= DRAWN_ON_CPU else parameter.device
                stream = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
                values = parameter if parameter.device == device else torch.empty_like(parameter, device=device)
                parameter.copy_(values.normal_(std=self.initial_std(name), generator=stream))
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
