"""A decoder-only transformer: blocks between an embedding and an output layer.

Shapes: B sequences, T tokens, C = n_embd, V vocabulary with padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.model import chunked_loss, kernel_thresholds, lora
from wordrun.model.attention import Mask, document_mask
from wordrun.model.base import Model, Rows
from wordrun.model.block import Block, TokenBatch
from wordrun.model.context_parallel import Context
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.options import TransformerConfig


class Transformer(Model):
    """A decoder, or a pipeline stage with consecutive blocks of one.

    The first stage has the embedding, the last has the norm and the output layer. Parameters have the same names and
    the same initial values in every stage as in the full model, so that any layout of ranks holds the same model.

    The embedding and the output layer may have more rows than there are tokens. The logits of this padding are -inf,
    so it has zero probability and zero gradients, and its weights stay 0.

    Args:
        cfg: the model's options.
        vocab_size: number of tokens, unless ``cfg`` sets it.
        layers: numbers of the stage's blocks; None: all.
        multiple: pad the vocabulary to a multiple of this.
    """

    uses: tuple[str, ...] = ("tokens", "targets", "documents", "scale")
    uncompiled: tuple[str, ...] = ("feature_losses",)  # compiles its kernel itself
    computes_losses_in_fp32 = True
    softcap = 0.0
    """Bound of the logits, approached smoothly; 0: none."""
    context: Context | None = None
    """The ranks among which each sequence is divided for training and evaluation; None: it is not."""
    first_layers: tuple[str, ...]
    """The linear layers of a block that read the residual stream; tensor parallelism splits their outputs."""

    def __init__(
        self, cfg: TransformerConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size = cfg.vocab_size or vocab_size
        self.padded_vocab_size = math.ceil(vocab_size / multiple) * multiple
        if self.padded_vocab_size > vocab_size:
            self.unpadded_rows = {"tokens.weight": vocab_size, "head.weight": vocab_size}
        self.output_scale = 1 / cfg.width_ratio()
        self.layers = range(cfg.n_layer) if layers is None else layers
        self.is_first = 0 in self.layers
        self.is_last = cfg.n_layer - 1 in self.layers
        if self.is_first:
            self.add_embedding()
        self.blocks = nn.ModuleDict({str(layer): self.new_block() for layer in self.layers})
        if self.is_last:
            self.norm = self.new_norm()
            self.head = nn.Linear(cfg.n_embd, self.padded_vocab_size, bias=False)
        self.tie()
        if cfg.lora_rank:
            lora.adapt(self, self.blocks, cfg)

    def divide_sequences(self, context: Context) -> None:
        """Train and evaluate on this rank's part of each sequence."""
        self.context = context

    def add_embedding(self) -> None:
        """Add the modules that ``embed`` uses, including ``tokens``."""
        self.tokens = nn.Embedding(self.padded_vocab_size, self.cfg.n_embd)
        self.drop = Dropout(self.cfg.dropout)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares its weights with the token embedding."""
        raise NotImplementedError

    def new_block(self) -> Block:
        """Return a block. The layers named proj write to the residual stream, which affects their initial values."""
        raise NotImplementedError

    def new_norm(self) -> nn.Module:
        """Return a norm, as in the blocks and before the output layer."""
        raise NotImplementedError

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

    def _draw(self, seed: int, name: str, parameter: Tensor) -> Tensor:
        # The last pipeline stage has the output layer without the embedding it is tied to.
        return super()._draw(seed, "tokens.weight" if self.tied and name == "head.weight" else name, parameter)

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of the matrix ``name``.

        0.02, and 0.02 / sqrt(2 n_layer) for projections into the residual stream, so that its variance does not grow
        with depth (Radford et al. 2019, section 2.3). One factor of LoRA's adapters starts at 0. With muP, matrices
        of the blocks have 1 / sqrt(width) of it.
        """
        if name.endswith(lora.B):
            return 0.0
        std = 0.02 / math.sqrt(self.cfg.width_ratio()) if name.startswith("blocks.") else 0.02
        return std / math.sqrt(2 * self.cfg.n_layer) if name.endswith("proj.weight") else std

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

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how tensor-parallel ranks shard the matrices, as torch's parallel styles by module name.

        As in Megatron-LM (Shoeybi et al. 2019), attention is split by heads, the MLP by hidden units, embedding and
        output layer by vocabulary, and everything in between by tokens (sequence parallelism, Korthikanti et al. 2022).
        """
        from torch.distributed.tensor import Replicate, Shard, parallel as tp

        gathered = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return {
            "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.norm_1": tp.SequenceParallel(),
            "blocks.*.attention": gathered,
            "blocks.*.attention.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm_2": tp.SequenceParallel(),
            "blocks.*.mlp": gathered,
            "blocks.*.mlp.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
            **{f"blocks.*.{name}": tp.ColwiseParallel() for name in self.first_layers},
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }

    def embed(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the input of the first block, (B, T, C).

        Args:
            tokens: (B, T).
            cache: the first block's KV cache of earlier tokens.
            documents: (B, T) document number of each token, if documents must not affect each other.
            context: the ranks that have the other tokens of the sequences; None: there are none.
        """
        return self.drop(self.tokens(tokens))  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Let the output layer use the embedding's weights, if the model ties them and both are in this stage."""
        if self.tied and self.is_first and self.is_last:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        x: Tensor,
        at: int | None = None,
        caches: Sequence[KVCache] | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the logits or, before the last stage, the residual stream for the next stage.

        Args:
            x: (B, T) token ids, T at most block_size; after the first stage, the previous stage's output. Without
                ``at`` and ``caches``, this rank's part of them, if there is a ``context``.
            at: compute the logits of this token only.
            caches: KV caches of the tokens before ``x``, one per block of this stage.
            documents: (B, T) document number of each token, if attention must stay within documents.
            targets: (B, T) the next tokens, -100 for no loss; return the last stage's losses rather than its logits.
            tokens: (B, T) token ids, for stages after the first of a model that needs them there.

        Returns:
            (B, T, V), or (B, V) with ``at``, -inf for padding; (B,) with ``targets``; before the last stage, (B, T, C).
        """
        x = self.features(x, caches, documents, tokens, self.context if at is None and caches is None else None)
        if not self.is_last:
            return x
        if targets is not None:
            return self.feature_losses(x, targets)
        return self.output(x if at is None else x[:, at])

    def output(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of the features ``x`` (..., C), -inf for padding."""
        logits = self.head(x)
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.unpadded_rows:
            mask_padding(logits, self.vocab_size)
        return logits  # type: ignore[no-any-return]

    def feature_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy (B,) of each sequence from its features (B, T, C) and ``targets`` (B, T)."""
        many = targets.numel() * self.padded_vocab_size > kernel_thresholds.LARGE
        if not chunked_loss.applies(self.head) or not (many if self.chunked_loss is None else self.chunked_loss):
            return self.criterion(self.output(x), targets)
        x, weight, group = chunked_loss.on_this_rank(x, self.head.weight)
        losses = chunked_loss.cross_entropy(
            x.flatten(0, 1),
            weight,
            targets.flatten(),
            self.vocab_size,
            self.softcap,
            compiled=self.compiled_loss,
            group=group,
        )
        return losses.view(targets.shape).mean(1)

    def features(
        self,
        x: Tensor,
        caches: Sequence[KVCache] | None = None,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the residual stream (B, T, C) at the end of this stage, the input of the output layer in the last."""
        given = {"context": context} if context else {}
        if self.is_first:
            tokens = x
            x = in_compute_dtype(self.embed(tokens, caches[0] if caches else None, documents, **given))
            x = torch_private.waited(x)
        mask = None if documents is None else self.attention_mask(documents, context)
        for (layer, block), cache in zip(self.blocks.items(), caches or repeat(None), strict=False):
            x = block(x, cache=cache, mask=mask, **self.additions(layer, tokens), **given)
        if not self.is_last:
            return x
        x = self.norm(x)
        return x if self.output_scale == 1 else x * self.output_scale  # type: ignore[no-any-return]

    def attention_mask(self, documents: Tensor, context: Context | None) -> Mask:
        """Return what keeps attention within ``documents`` (B, T)."""
        cfg, p = self.cfg, self.cfg.dropout if self.training else 0.0
        facts = p, cfg.attention_width() // cfg.n_head, cfg.attention_spans()
        compiled = any(map(torch_private.is_compiled, (self, *self.blocks.values())))
        return (context.mask if context else document_mask)(documents, *facts, compiled=compiled)

    def leave_uncompiled(self) -> None:
        """Also leave masks on a CPU uncompiled, which depend on the lengths of documents."""
        if next(self.parameters()).device.type == "cpu":
            self.uncompiled = (*self.uncompiled, "attention_mask")
        super().leave_uncompiled()

    def additions(self, layer: str, tokens: Tensor | None) -> dict[str, Tensor]:
        """Return further arguments for the attention of block ``layer``, computed from ``tokens`` (B, T)."""
        return {}

    def logits_at(self, tokens: Tensor, at: int, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the logits (B, V) at position ``at`` of ``tokens`` (B, T), without computing the others."""
        return (forward or self)(tokens, at=at)

    def losses(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross entropy of each sequence in nats per token, (B,)."""
        tokens, targets, documents = self.part_of(batch)
        losses: Tensor = self(tokens, documents=documents, targets=targets)
        return scaled(losses, batch)

    def losses_and_outputs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the losses of ``batch``, (B,), and the logits, (B, T, V), which ``losses`` does not keep."""
        tokens, targets, documents = self.part_of(batch)
        logits = self(tokens, documents=documents)
        return scaled(self.criterion(logits, targets), batch), logits

    def part_of(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens, targets and documents of ``batch``: this rank's part of each sequence, if it is divided."""
        tokens, targets, documents = batch.tokens, batch.targets, batch.documents
        if not self.context:
            return tokens, targets, documents
        part = self.context.part
        return part(tokens), part(targets), None if documents is None else part(documents)

    @staticmethod
    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of each sequence in nats per token, (B,).

        Args:
            logits: (B, T, V).
            targets: (B, T); the loss of -100 is 0.
        """
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)

    def stage_inputs(self, batches: Sequence[TokenBatch]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the inputs of pipeline stages for ``batches``, which go through the pipeline together.

        Returns:
            The first stage's input (B, T); keyword arguments of every stage; the targets of ``criterion``, (B, T).
        """
        every_tokens, every_targets, every_documents = zip(*map(self.part_of, batches), strict=True)
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


def scaled(losses: Tensor, batch: TokenBatch) -> Tensor:
    """Return the mean ``losses`` (B,) over all positions as means over the positions that count."""
    return losses if batch.scale is None else unsharded(losses) * batch.scale


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return the residual stream ``x`` in bf16 if autocast computes in bf16, as with bf16 parameters.

    Half the memory traffic between the matrix products; in fp16, the stream could overflow.
    """
    kind = x.device.type
    bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.bfloat16() if bf16 else x


def unsharded(tensor: Tensor) -> Tensor:
    """Return the full tensor, on every tensor-parallel rank."""
    return tensor.full_tensor() if torch_private.is_sharded(tensor) else tensor


@torch.no_grad()
def mask_padding(logits: Tensor, start: int) -> None:
    """Set the ``logits`` (..., V) from index ``start`` on to -inf, in place and without autograd.

    Autograd would copy the gradients of all logits to mask those that the softmax makes exactly 0 anyway.
    """
    if torch_private.is_sharded(logits):  # sharded by vocabulary, over the tensor-parallel ranks
        rank, logits = logits.device_mesh.get_local_rank(), logits.to_local()
        start -= rank * logits.shape[-1]
    logits[..., max(0, start) :] = -torch.inf
