"""Causal attention over all earlier tokens, the last ones of them, or those in the same document.

Shapes: B sequences, T queries, S keys, N query heads, M key heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from wordrun.dist import torch_private
from wordrun.model import flex
from wordrun.model.dropout import dropout
from wordrun.model.kernel_thresholds import keeps_weights, skips_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Runs = tuple[int | Tensor, ...]
"""The tokens of all sequences, in order: the lengths of documents, and masks (n, n) for n tokens in short documents."""


class UncompiledRuns:
    """Runs whose attention a compiled block leaves to uncompiled code.

    torch.compile does not look into this class; it would compile the block again for a tuple of other lengths.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.attention = _uncompiled()


Mask = Tensor | Runs | UncompiledRuns | dict[int, "BlockMask"]
"""Which tokens attend to which. A tensor (B, 1, T, T): True where they do. A dictionary: see ``flex``."""


def document_mask(
    documents: Tensor, p: float = 0.0, head_size: int = 0, spans: Collection[int] = (), *, compiled: bool = False
) -> Mask:
    """Return the causal attention mask within each of ``documents`` (B, T) (Llama 3, section 3.2).

    Only small masks are materialized: a CPU computes the attention of each document by itself, or of some short ones
    together; a GPU leaves out the blocks of tokens that share no document.

    Args:
        documents: document number of each token.
        p: dropout probability of the attention weights.
        head_size: elements of a head.
        spans: the largest number of tokens to which a token attends, for each kind of block of the model.
        compiled: whether it is for compiled blocks.
    """
    (B, T), device = documents.shape, documents.device.type
    if skips_blocks(device, B * T * T, p, head_size):
        return flex.block_masks(documents, spans)
    if device == "cpu" and not torch.compiler.is_compiling():
        ends = (documents.diff(dim=1, append=documents[:, -1:] + 1).flatten() != 0).nonzero().flatten() + 1
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        long = len(lengths) * LONG <= documents.numel()
        if long or T > TOGETHER:
            runs = tuple(lengths if long else _runs(lengths))
            return UncompiledRuns(runs) if compiled else runs
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


LONG = 64
"""Mean number of tokens in a document from which a CPU is faster with each document by itself (measured)."""
TOGETHER = 256
"""Most tokens in shorter documents that it computes together, under one mask."""


def _runs(lengths: Sequence[int]) -> Iterator[int | Tensor]:
    """Yield masks (n, n) for runs of documents of these ``lengths``, and the lengths of those that are long."""
    run: list[int] = []
    for length in [*lengths, TOGETHER]:
        if sum(run) + length > TOGETHER and run:
            numbers = torch.repeat_interleave(torch.tensor(run))
            yield (numbers[:, None] == numbers).tril() if len(run) > 1 else run[0]
            run = []
        run.append(length)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    mask: Mask | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v, each token attending to itself and earlier tokens, (B, N, T, H).

    Args:
        q: queries, (B, N, T, H).
        k: keys, (B, M, S, H): M divides N, and N / M consecutive query heads share a key head. The queries belong to
            the last T of S tokens; dropout requires T = S.
        v: values, (B, M, S, H).
        p: dropout probability of the attention weights.
        mask: see ``Mask``; None: causal attention.
        scale: factor of the products; None: 1 / sqrt(H).
        window: number of tokens to which each attends, the last one being itself; None: to all earlier ones.
    """
    if isinstance(mask, UncompiledRuns):
        return mask.attention(q, k, v, p, mask, scale, window)
    if isinstance(mask, tuple):
        return _by_document(q, k, v, p, mask, scale, window)
    if isinstance(mask, dict):
        return flex.attention(q, k, v, mask[min(window or k.shape[2], k.shape[2])], scale)
    if window is not None and window < k.shape[2]:
        return _windowed(q, k, v, p, mask, scale, window)
    bf16, compiled = q.dtype == torch.bfloat16, torch.compiler.is_compiling()
    by_hand = (
        q.device.type == "cpu"
        and q.shape[2] == k.shape[2]
        and keeps_weights(p, q.shape[2], bf16=bf16, compiled=compiled)
    )
    grouped = q.shape[1] != k.shape[1]
    if grouped and (by_hand or not _shares_heads(q, mask)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if not by_hand:
        T, S = q.shape[2], k.shape[2]
        # A single query attends to all keys; several need a mask.
        if mask is None and T not in (1, S):
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        causal = mask is None and T == S
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=p, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    B, N, T, H = q.shape
    hidden = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    alpha = H**-0.5 if scale is None else scale
    scores = torch.baddbmm(hidden, q.reshape(B * N, T, H), k.reshape(B * N, T, H).transpose(1, 2), alpha=alpha)
    if mask is not None:
        scores = scores.view(B, N, T, T).masked_fill(~mask, -math.inf).view(B * N, T, T)
    weights = torch.softmax(scores, dim=-1)
    if p > 0:
        weights = dropout(weights, p)
    return (weights @ v.reshape(B * N, T, H)).view(B, N, T, H)


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, p: float, mask: Tensor | None, scale: float | None, window: int
) -> Tensor:
    """Return the attention of each of the queries to the last ``window`` keys before it, including its own.

    As many queries as the window has tokens are computed at a time, with only the keys that they need, so that time and
    memory grow with T rather than T^2.
    """
    T, S = q.shape[2], k.shape[2]
    found = []
    for start in range(0, T, window):
        end = min(start + window, T)
        at = S - T + start  # position of the first of these queries, and of the first key they need
        first = max(0, at - window + 1)
        keys = slice(first, S - T + end)
        near = None
        if first < at and (end - start > 1 or mask is not None):
            make = _kept_band if type(q) is Tensor and not torch.compiler.is_compiling() else _band
            near = make(end - start, keys.stop - first, window, q.dtype, q.device)
        if mask is not None:
            here = mask[:, :, start:end, keys]
            near = here if near is None else torch.where(here, near, -math.inf)
        found.append(causal_attention(q[:, :, start:end], k[:, :, keys], v[:, :, keys], p, near, scale))
    return torch.cat(found, dim=2)


def _band(T: int, S: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what to add to the products of T queries, the last of S tokens, so that they attend within ``window``."""
    distance = torch.arange(T, device=device)[:, None] + (S - T) - torch.arange(S, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(T, S, dtype=dtype, device=device).masked_fill(hidden, -math.inf)


# Shared by all blocks; outside inference mode, because backward passes cannot use inference tensors.
_kept_band = lru_cache(maxsize=4)(torch.inference_mode(False)(_band))


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, p: float, runs: Runs, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention of each of ``runs`` of tokens, one or more documents each, by itself."""
    masks = [None if isinstance(run, int) else run for run in runs]
    lengths = [run if isinstance(run, int) else len(run) for run in runs]
    # Split rather than sliced: the gradient of a slice has the size of the full tensor.
    parts = (torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (q, k, v))
    found = []
    for mask, *tokens in zip(masks, *parts, strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in tokens)
        document_mask = None if mask is None else mask[None, None]
        found.append(causal_attention(one_q, one_k, one_v, p, document_mask, scale, window)[0].transpose(0, 1))
    return torch.cat(found).view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


@lru_cache(maxsize=1)
def _uncompiled() -> Callable[..., Tensor]:
    """Return ``_by_document`` for ``UncompiledRuns``; always the same function, so that compiled blocks stay valid."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, p: float, mask: UncompiledRuns, scale: float | None, window: int | None
    ) -> Tensor:
        return _by_document(q, k, v, p, mask.runs, scale, window)

    return torch.compiler.disable(attention)  # type: ignore[no-untyped-call, no-any-return]


def _shares_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch has a fused kernel for grouped-query attention with ``q``.

    On CUDA it has one for half precision without a mask; otherwise it would materialize the T x T weights.
    """
    if q.device.type == "cuda":
        return mask is None and q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cpu" and torch_private.CPU_SHARES_HEADS
