"""What training needs of a language model besides its architecture: its initialization, and how ranks divide it.

``Transformer`` adds the architecture. This module depends only on the names of its layers, on ``tied`` and
``first_layers``, and on ``by_head`` and ``head_size`` of each attention.

Shapes: B sequences, T tokens, C = n_embd.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wordrun.model import lora
from wordrun.model.base import Model, Rows
from wordrun.model.context_parallel import Context
from wordrun.model.options import TransformerConfig
from wordrun.model.output_layer import OutputLayer


class TokenBatch(Protocol):
    """The parts of a batch that a language model uses."""

    @property
    def tokens(self) -> Tensor:
        """(B, T) int64."""

    @property
    def targets(self) -> Tensor:
        """(B, T) the next tokens, -100 for no loss."""

    @property
    def documents(self) -> Tensor | None:
        """(B, T) document number of each token, if attention must stay within documents."""

    @property
    def scale(self) -> Tensor | None:
        """The factor for the mean loss of each sequence, () or (B,); None: 1."""


class LanguageModel(Model):
    """A language model with blocks between an embedding and an output layer, or a pipeline stage of one.

    The first stage has the embedding ``tokens``, the last has ``norm`` and the output layer ``head``. Parameters have
    the same names and the same initial values in every stage as in the full model, so that any layout of ranks holds
    the same model.

    Args:
        cfg: the model's options.
        vocab_size: number of tokens, unless ``cfg`` sets it.
        layers: numbers of the stage's blocks; None: all.
        multiple: pad the vocabulary to a multiple of this: embedding and output layer may have more rows than tokens.
    """

    uses = ("tokens", "targets", "documents", "scale")
    computes_losses_in_fp32 = True
    tokens: nn.Embedding
    norm: nn.Module
    head: OutputLayer
    tied: bool
    """Whether the output layer shares its weights with the token embedding."""
    first_layers: tuple[str, ...]
    """The linear layers of a block that read the residual stream; tensor parallelism divides their outputs. Layers
    named proj write to the stream."""
    context: Context | None = None
    """The ranks among which each sequence is divided for training and evaluation; None: it is not."""

    def __init__(
        self, cfg: TransformerConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = cfg.vocab_size or vocab_size
        self.padded_vocab_size = math.ceil(self.vocab_size / multiple) * multiple
        if self.padded_vocab_size > self.vocab_size:
            self.unpadded_rows = {"tokens.weight": self.vocab_size, "head.weight": self.vocab_size}
        self.layers = range(cfg.n_layer) if layers is None else layers
        self.is_first = 0 in self.layers
        self.is_last = cfg.n_layer - 1 in self.layers

    # The initial weights

    def tie(self) -> None:
        """Let the output layer use the embedding's weights, if the model ties them and both are in this stage."""
        if self.tied and self.is_first and self.is_last:
            self.head.weight = self.tokens.weight

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of the matrix ``name``.

        0.02, and 0.02 / sqrt(2 n_layer) for projections into the residual stream, so that its variance does not grow
        with depth (Radford et al. 2019, section 2.3). With muP, it is divided by sqrt(width / base width) for matrices
        of the blocks. One factor of LoRA's adapters starts at 0.
        """
        if name.endswith(lora.B):
            return 0.0
        std = 0.02 / math.sqrt(self.cfg.width_ratio()) if name.startswith("blocks.") else 0.02
        return std / math.sqrt(2 * self.cfg.n_layer) if name.endswith("proj.weight") else std

    def _draw(self, seed: int, name: str, parameter: Tensor) -> Tensor:
        # The last pipeline stage has the output layer without the embedding it is tied to.
        return super()._draw(seed, "tokens.weight" if self.tied and name == "head.weight" else name, parameter)

    # Optimizers, and the counting of operations

    def matrices(self) -> dict[str, Rows]:
        """Return the matrices of the blocks, and how those of the attention divide into heads."""
        found = super().matrices()
        sizes = dict(self.named_parameters())
        for number, block in self.blocks.items():
            attention: Any = block.attention
            for layer, kinds in attention.by_head.items():
                name = f"blocks.{number}.attention.{layer}.weight"
                found[name] = Rows(len(sizes[name]) // (kinds * attention.head_size), kinds)
        return found

    def flops_per_token(self) -> int:
        """Return the floating-point operations of one token's forward and backward pass of the full model.

        6 for every weight of a matrix product (2 forward, 4 backward) and 12 C T for each block's attention of width C
        over T tokens or a shorter window, causal mask ignored, as in appendix B of PaLM (Chowdhery et al. 2022). The
        embedding is not a matrix product and does not count; the output layer does. Grouped-query attention saves
        weights, but no operations of the attention itself. With LoRA, frozen weights count 4, as they have no
        gradients, and its adapters do not count.
        """
        cfg, block = self.cfg, next(iter(self.blocks.values()))
        weights = sum(layer.weight.numel() for layer in block.modules() if isinstance(layer, nn.Linear))
        weights = cfg.n_layer * weights + self.padded_vocab_size * cfg.n_embd
        return (4 if cfg.lora_rank else 6) * weights + 12 * cfg.attention_width() * sum(cfg.attention_spans())

    # Tensor parallelism

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how tensor-parallel ranks shard the matrices, as torch's parallel styles by module name."""
        return tensor_parallel_styles(next(iter(self.blocks.values()), nn.Module()), self.first_layers)

    # Context parallelism

    def divide_sequences(self, context: Context) -> None:
        """Train and evaluate on this rank's share of each sequence; the ranks of ``context`` have the others."""
        self.context = context

    def local_share(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens, targets and documents of ``batch``: this rank's share of each sequence, if it is divided."""
        tokens, targets, documents = batch.tokens, batch.targets, batch.documents
        if not self.context:
            return tokens, targets, documents
        share = self.context.share
        return share(tokens), share(targets), None if documents is None else share(documents)

    # Pipeline parallelism

    def stage_inputs(self, batches: Sequence[TokenBatch]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return what pipeline stages compute on for ``batches``, which go through the pipeline together.

        Returns:
            The first stage's input (B, T); keyword arguments of every stage's forward pass; the targets (B, T).
        """
        every_tokens, every_targets, every_documents = zip(*map(self.local_share, batches), strict=True)
        tokens, targets = torch.cat(every_tokens), torch.cat(every_targets)
        documents = [each for each in every_documents if each is not None]
        every = {"documents": torch.cat(documents)} if documents else {}
        return tokens, every | self.in_every_stage(tokens), targets

    def in_every_stage(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return arguments that every pipeline stage needs besides documents, computed from ``tokens`` (B, T)."""
        return {}

    def stage_output_shape(self, tokens: Tensor, tp: int) -> tuple[int, int, int]:
        """Return the shape of a stage's output for ``tokens`` (B, T), sharded over ``tp`` ranks."""
        return tokens.shape[0], tokens.shape[1] // tp, self.cfg.n_embd


def tensor_parallel_styles(block: nn.Module, first_layers: Iterable[str]) -> dict[str, Any]:
    """Return torch's parallel style of each module, by its name.

    As in Megatron-LM (Shoeybi et al. 2019), attention is split by heads, the MLP by hidden units, embedding and
    output layer by vocabulary, and everything in between by tokens (sequence parallelism, Korthikanti et al. 2022).
    Norms of queries and keys work on the heads that a rank has.

    Args:
        block: one of the blocks, which are alike.
        first_layers: names of the layers of a block that read its normalized input; they are divided by columns.
    """
    from torch.distributed.tensor import Replicate, Shard, parallel as tp

    gathered = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    by_head = tp.SequenceParallel(sequence_dim=2, use_local_output=True)
    heads = ("attention.q_norm", "attention.k_norm")
    normed = [name for name, module in block.named_modules() if name in heads and [*module.parameters()]]
    return {
        "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm_1": tp.SequenceParallel(),
        "blocks.*.attention": gathered,
        "blocks.*.attention.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm_2": tp.SequenceParallel(),
        "blocks.*.mlp": gathered,
        "blocks.*.mlp.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        **{f"blocks.*.{name}": tp.ColwiseParallel() for name in first_layers},
        **{f"blocks.*.{name}": by_head for name in normed},
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
