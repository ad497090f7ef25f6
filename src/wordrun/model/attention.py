"""Causal attention over all earlier tokens, over a window of them, or within documents; and the masks for documents.

``causal_attention`` chooses the implementation: torch's fused kernels, matrix products that keep all
attention weights in memory (on CPUs, where that is faster), window by window, document by document, or torch's
FlexAttention, which skips blocks of tokens.

Shapes: B sequences, T queries, S keys, n blocks of tokens, N query heads, M key heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wordrun.dist import torch_private
from wordrun.model.dropout import dropout
from wordrun.model.kernel_thresholds import keeps_weights, skips_blocks

if TYPE_CHECKING:  # the import would load torch's compiler
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens in a block; FlexAttention's default, for which its kernels are tuned."""
Runs = tuple[int | Tensor, ...]
"""Divides all tokens of the sequences into consecutive runs: an integer is the length of a run of one document; a mask
(n, n) is that of n tokens in several short documents."""


class UncompiledRuns:
    """Runs whose attention a compiled block leaves to uncompiled code.

    torch.compile does not look into this class. For a tuple, it would compile the block anew for each set of lengths.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.attention = _uncompiled()


Mask = Tensor | Runs | UncompiledRuns | dict[int, "BlockMask"]
"""Which tokens attend to which. A tensor (B, 1, T, T): True where they do. A dictionary: see
``block_masks``."""


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
        compiled: whether the mask is for compiled blocks.
    """
    (B, T), device = documents.shape, documents.device.type
    if skips_blocks(device, B * T * T, p, head_size):
        return block_masks(documents, spans)
    if device == "cpu" and not torch.compiler.is_compiling():
        ends = (documents.diff(dim=1, append=documents[:, -1:] + 1).flatten() != 0).nonzero().flatten() + 1
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        long = len(lengths) * LONG <= documents.numel()
        if long or T > TOGETHER:
            runs = tuple(lengths if long else _runs(lengths))
            return UncompiledRuns(runs) if compiled else runs
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


LONG = 64
"""Mean number of tokens of documents from which a CPU is faster if it computes each separately (measured)."""
TOGETHER = 256
"""Maximum number of tokens in a run of short documents, whose attention a CPU computes at once, with a mask."""


def _runs(lengths: Sequence[int]) -> Iterator[int | Tensor]:
    """Yield runs of documents of these ``lengths``: a mask (n, n) for several short ones, the length of a long one."""
    run: list[int] = []
    for length in [*lengths, TOGETHER]:  # the last one only ends the last run
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
        return block_sparse_attention(q, k, v, mask[min(window or k.shape[2], k.shape[2])], scale)
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

    The queries are processed in chunks of ``window``, each with only the keys that it needs, so that time and memory
    grow with T rather than T^2.
    """
    T, S = q.shape[2], k.shape[2]
    found = []
    for start in range(0, T, window):
        end = min(start + window, T)
        at = S - T + start  # position of the first of these queries; ``first`` is that of the first key they need
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
    """Return the bias that confines the attention of T queries, the last of S tokens, to their ``window``."""
    distance = torch.arange(T, device=device)[:, None] + (S - T) - torch.arange(S, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(T, S, dtype=dtype, device=device).masked_fill(hidden, -math.inf)


# Shared by all blocks; outside inference mode, because backward passes cannot use inference tensors.
_kept_band = lru_cache(maxsize=4)(torch.inference_mode(False)(_band))


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, p: float, runs: Runs, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention, computed separately for each of ``runs`` of tokens."""
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


def block_masks(documents: Tensor, spans: Iterable[int]) -> dict[int, BlockMask]:
    """Return FlexAttention's masks of causal attention within ``documents`` (B, T), by the span that each is for.

    They have no T x T values: for each block of 128 tokens there is a list of the blocks of keys that its queries need,
    and within those the mask is computed where it is used. Blocks of tokens that share no document are skipped.

    Args:
        documents: document number of each token.
        spans: the largest number of tokens to which a token attends, for each kind of block of the model.
    """
    T = documents.shape[1]
    return {span: _block_mask(documents, span) for span in sorted({min(span, T) for span in spans})}


def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Return FlexAttention (B, N, T, H) of ``q`` (B, N, T, H) to ``k`` and ``v`` (B, M, T, H) under ``mask``."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # which does not cover FlexAttention
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    y: Tensor = _flex_kernel()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def _flex_kernel() -> Callable[..., Any]:
    """Return FlexAttention, compiled unless it is being compiled already: uncompiled, it would compute all weights."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    return kernel if torch.compiler.is_compiling() else _compiled_flex_kernel()  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _compiled_flex_kernel() -> Callable[..., Any]:
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
    ahead = (number[:, None] - number) * BLOCK  # how far a block's first query is ahead of a block's first key
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
    """Return the number of True values per row of ``blocks`` (B, n, n), (B, 1, n), and an order with them first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
