"""A decoder-only transformer: blocks between an embedding and an output layer.

Shapes: B sequences, T tokens, C = n_embd, V vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.model.attention import Mask, document_mask
from wordrun.model.block import Block
from wordrun.model.context_parallel import Context
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.language_model import LanguageModel, TokenBatch
from wordrun.model.options import TransformerConfig
from wordrun.model.output_layer import OutputLayer, cross_entropy


class Transformer(LanguageModel):
    """A decoder, or a pipeline stage with consecutive blocks of one; arguments as in ``LanguageModel``.

    A family of models defines ``new_block``, ``new_norm``, ``tied`` and ``first_layers``, and ``embed`` if it embeds
    more than tokens.
    """

    def __init__(
        self, cfg: TransformerConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
    ) -> None:
        super().__init__(cfg, vocab_size, layers, multiple)
        if self.is_first:
            self.add_embedding()
        self.blocks = nn.ModuleDict({str(layer): self.new_block() for layer in self.layers})
        if self.is_last:
            self.norm = self.new_norm()
            self.head = OutputLayer(cfg.n_embd, self.vocab_size, self.padded_vocab_size, 1 / cfg.width_ratio())
        self.tie()

    def add_embedding(self) -> None:
        """Add the modules that ``embed`` uses, including ``tokens``."""
        self.tokens = nn.Embedding(self.padded_vocab_size, self.cfg.n_embd)
        self.drop = Dropout(self.cfg.dropout)

    def new_block(self) -> Block:
        """Return a block. The layers named proj write to the residual stream, which affects their initial values."""
        raise NotImplementedError

    def new_norm(self) -> nn.Module:
        """Return a norm, as in the blocks and before the output layer."""
        raise NotImplementedError

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

    def additions(self, layer: str, tokens: Tensor | None) -> dict[str, Tensor]:
        """Return further arguments for the attention of block ``layer``, computed from ``tokens`` (B, T)."""
        return {}

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
                ``at`` and ``caches``, this rank's share of them, if there is a ``context``.
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
            return self.head.losses(x, targets, chunked=self.chunked_loss, compiled=self.compiled_loss)
        return self.head(x if at is None else x[:, at])  # type: ignore[no-any-return]

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
        return self.norm(x) if self.is_last else x

    def attention_mask(self, documents: Tensor, context: Context | None) -> Mask:
        """Return what keeps attention within ``documents`` (B, T)."""
        cfg, p = self.cfg, self.cfg.dropout if self.training else 0.0
        facts = p, cfg.attention_width() // cfg.n_head, cfg.attention_spans()
        compiled = any(map(torch_private.is_compiled, (self, *self.blocks.values())))
        return (context.mask if context else document_mask)(documents, *facts, compiled=compiled)

    def leave_uncompiled(self) -> None:
        """Leave masks on a CPU uncompiled, which depend on the lengths of documents."""
        if next(self.parameters()).device.type == "cpu":
            self.attention_mask = torch.compiler.disable(self.attention_mask)  # type: ignore[method-assign,no-untyped-call]

    def losses(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross entropy of each sequence in nats per token, (B,)."""
        tokens, targets, documents = self.local_share(batch)
        losses: Tensor = self(tokens, documents=documents, targets=targets)
        return scaled(losses, batch)

    def losses_and_outputs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the losses of ``batch``, (B,), and the logits, (B, T, V), which ``losses`` does not keep."""
        tokens, targets, documents = self.local_share(batch)
        logits = self(tokens, documents=documents)
        losses = self.losses(batch) if self.has_own_losses() else scaled(cross_entropy(logits, targets), batch)
        return losses, logits

    @classmethod
    def has_own_losses(cls) -> bool:
        """Return whether a class outside of wordrun defines ``losses``."""
        owner = next(each for each in cls.__mro__ if "losses" in vars(each))
        return owner.__module__.partition(".")[0] != "wordrun"

    def logits_at(self, tokens: Tensor, at: int, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the logits (B, V) at position ``at`` of ``tokens`` (B, T), without computing the others."""
        return (forward or self)(tokens, at=at)


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return the residual stream ``x`` in bf16 if autocast computes in bf16, as with bf16 parameters.

    This halves the memory traffic between the matrix products. In fp16, the stream could overflow.
    """
    kind = x.device.type
    bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.bfloat16() if bf16 else x


def scaled(losses: Tensor, batch: TokenBatch) -> Tensor:
    """Return the mean ``losses`` (B,) over all positions as means over the positions that count."""
    if batch.scale is None:
        return losses
    return (losses.full_tensor() if torch_private.is_sharded(losses) else losses) * batch.scale
