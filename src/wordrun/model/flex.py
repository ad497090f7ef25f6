"""Attention within documents by torch's FlexAttention, which skips the blocks of tokens that share no document.

It needs no mask of T x T values: for each block of 128 tokens there is a list of the blocks of keys that its queries
need, and within those the mask is computed where it is used.

Shapes: B sequences, T tokens, n blocks of tokens, N query heads, M key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # the import takes as long as that of torch's compiler
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens in a block; FlexAttention's default, for which its kernels are tuned."""


def block_masks(documents: Tensor, spans: Iterable[int]) -> dict[int, BlockMask]:
    """Return the masks of causal attention within ``documents`` (B, T), by the number of tokens that each attends to.

    Args:
        documents: document number of each token.
        spans: the largest number of tokens to which a token attends, for each kind of block of the model.
    """
    T = documents.shape[1]
    return {span: _block_mask(documents, span) for span in sorted({min(span, T) for span in spans})}


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Return the attention (B, N, T, H) of ``q`` (B, N, T, H) to ``k`` and ``v`` (B, M, T, H) under ``mask``."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # which does not cover FlexAttention
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    y: Tensor = _kernel()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def _kernel() -> Callable[..., Any]:
    """Return FlexAttention, compiled unless it is being compiled already: uncompiled, it would compute all weights."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    return kernel if torch.compiler.is_compiling() else _compiled()  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _block_mask(documents: Tensor, span: int) -> BlockMask:
    """Return the mask of causal attention to ``span`` tokens within ``documents`` (B, T)."""
    from torch.nn.attention.flex_attention import BlockMask

    T, device = documents.shape[1], documents.device
    n = -(-T // BLOCK)
    padded = documents[:, torch.arange(n * BLOCK, device=device).clamp(max=T - 1)]
    low, high = torch.aminmax(padded.view(-1, n, BLOCK), dim=-1)
    number = torch.arange(n, device=device)
    ahead = (number[:, None] - number) * BLOCK  # of the first query to the first key; in a block, they differ by less
    shares = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    some = shares & (ahead >= 0) & (ahead - BLOCK + 1 < span)
    alike = (low == high)[:, :, None] & (low == high)[:, None, :]
    full = some & alike & (ahead > 0) & (ahead + BLOCK - 1 < span)

    def attends(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query >= key if span >= T else (query >= key) & (query - key < span)
        return near & (documents[b, query] == documents[b, key])

    lists = (*_lists(some & ~full), *_lists(full))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(T, T))


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many are True in each row of ``blocks`` (B, n, n), (B, 1, n), and the order that puts them first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
