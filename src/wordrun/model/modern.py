"""A GPT with changes since GPT-2 that make training faster. Each is an option, with its source beside it.

Most were found or combined in the speed runs of modded-nanogpt (Jordan et al. 2024) and nanochat (Karpathy 2025).

Shapes: B sequences, T tokens, C = n_embd, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.common.errors import ConfigError
from wordrun.dist import torch_private
from wordrun.model import llama
from wordrun.model.block import Block
from wordrun.model.context_parallel import Context
from wordrun.model.dropout import Dropout
from wordrun.model.kv_cache import KVCache
from wordrun.model.options import ModernConfig

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"relu2": lambda x: x * F.relu(x), "gelu": F.gelu}  # on a CPU, the gradient of square() takes 10 times as long
)
"""By the names that model.mlp takes; relu2 is Primer's squared ReLU (So et al. 2021)."""


MULTIPLIER = 6364136223846793005
"""Multiplier of Knuth's linear congruential generator modulo 2^64, which hashes n-grams."""


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, cfg: ModernConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.mlp]
        self.up = nn.Linear(cfg.n_embd, cfg.n_hidden, bias=False)
        self.proj = nn.Linear(cfg.n_hidden, cfg.n_embd, bias=False)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token independently; ``x`` and the result are (B, T, C)."""
        return self.drop(self.proj(self.activation(self.up(x))))  # type: ignore[no-any-return]


class Modern(llama.Llama):
    """Llama's attention with norms of queries and keys, another MLP, a bound of the logits, and more embeddings.

    Value embeddings (Zhou et al. 2024; modded-nanogpt): in the blocks of model.value_layers, each token has a learned
    vector that is added to its values, so that attention also moves the token itself. Embeddings of n-grams give the
    first block what small models otherwise spend blocks on: the tokens that precede each one.
    """

    cfg: ModernConfig

    def __init__(
        self, cfg: ModernConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
    ) -> None:
        super().__init__(cfg, vocab_size, layers, multiple)
        if self.is_last:
            self.head.bound_logits(cfg.softcap)
        shared = cfg.attention_width() * cfg.key_heads() // cfg.n_head
        here = [layer for layer in self.layers if layer in cfg.layers_with_values()]
        if here:
            self.values = nn.ModuleDict({str(layer): nn.Embedding(self.vocab_size, shared) for layer in here})

    @property
    def first_layers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The linear layers of a block that read the residual stream."""
        gated = ("mlp.gate",) if self.cfg.mlp == "swiglu" else ()
        return ("attention.q", "attention.k", "attention.v", "mlp.up", *gated)

    def add_embedding(self) -> None:
        """Add the embeddings of tokens and n-grams."""
        super().add_embedding()
        self.ngrams = nn.ModuleList(nn.Embedding(rows, self.cfg.n_embd) for rows in self.cfg.ngram_rows)

    def new_block(self) -> Block:
        mlp = llama.MLP(self.cfg) if self.cfg.mlp == "swiglu" else MLP(self.cfg)
        return Block(self.new_norm(), llama.Attention(self.cfg), self.new_norm(), mlp)

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of the matrix ``name``.

        With model.zero_init, each block starts as the identity, and all tokens are equally likely.
        """
        if self.cfg.zero_init and (name.endswith("proj.weight") or (name == "head.weight" and not self.tied)):
            return 0.0
        return super().initial_std(name)

    def embed(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the embeddings of the tokens, and of each with those before it, (B, T, C)."""
        x = self.tokens(tokens)
        if context and self.ngrams:
            tokens, documents = context.gathered(tokens), None if documents is None else context.gathered(documents)
        keys = ngrams(tokens, len(self.ngrams), cache, documents)
        for embedding, rows, key in zip(self.ngrams, self.cfg.ngram_rows, keys, strict=True):
            x = x + embedding((context.share(key) if context else key) % rows)
        if self.cfg.embed_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=self.cfg.norm_eps)
        return self.drop(x)  # type: ignore[no-any-return]

    def additions(self, layer: str, tokens: Tensor | None) -> dict[str, Tensor]:
        """Return the value embeddings of ``tokens`` (B, T) if block ``layer`` has them."""
        if int(layer) not in self.cfg.layers_with_values():
            return {}
        return {"values": self.values[layer](tokens)}

    def in_every_stage(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the tokens, if there are value embeddings."""
        return {"tokens": tokens} if self.cfg.value_layers else {}

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how tensor-parallel ranks shard the matrices; value embeddings are divided as the heads are."""
        from torch.distributed.tensor import Replicate, Shard, parallel as tp

        if self.cfg.ngram_rows and not torch_private.tells_tables_apart():
            raise ConfigError(
                f"model.ngram_rows={self.cfg.ngram_rows} on tensor-parallel ranks needs torch 2.11 or newer, not "
                f"{torch.__version__}: upgrade torch, leave model.ngram_rows empty, or use backend.tp=1"
            )
        tables = {
            "ngrams": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "values": tp.ColwiseParallel(),
        }
        plan = super().tensor_parallel_plan()
        # By their names, because torch 2.8 would apply the style of "ngrams.*" to all modules of the model.
        for name, module in self.named_children():
            if name in tables:
                plan |= {f"{name}.{key}": tables[name] for key, _ in module.named_children()}
        return plan


def ngrams(tokens: Tensor, earlier: int, cache: KVCache | None, documents: Tensor | None) -> Iterator[Tensor]:
    """Yield hashes of n-grams, (B, T) int64, for n = 2, 3, ..., ``earlier`` + 1; equal n-grams have equal hashes.

    An n-gram is a token with the n - 1 tokens before it. Before the first token of a document is token 0.

    Args:
        tokens: (B, T).
        earlier: n - 1 of the longest n-grams.
        cache: has the tokens before these; None: there are none.
        documents: (B, T) document number of each token; None: each sequence is one document.
    """
    T, key = tokens.shape[1], tokens
    joined = (cache or KVCache()).with_earlier(tokens, earlier)
    for back in range(1, earlier + 1):
        before = joined[:, earlier - back : earlier - back + T]
        if documents is not None:
            before = before * (F.pad(documents, (back, 0))[:, :T] == documents)
        key = key * MULTIPLIER + before + 1
        yield key * MULTIPLIER >> 33  # the high bits depend on all of it
