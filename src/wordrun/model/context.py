"""Context parallelism: each sequence is divided among ranks, which exchange what attention needs.

Rank r of n holds an early and a late chunk of each sequence, numbers r and 2n - 1 - r of 2n. Later tokens attend to
more tokens, so this gives all ranks the same work.

Shapes: B sequences, T tokens on this rank, n ranks, N query heads, M key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun import compat_context
from wordrun.model.attention import Mask, causal_attention, document_mask


@lru_cache(maxsize=8)
def chunks(tokens: int, ranks: int, device: torch.device) -> Tensor:
    """Return the positions of the tokens that each rank holds of a sequence, (ranks, tokens / ranks), in order."""
    early, late = torch.arange(tokens, device=device).view(2, ranks, -1).unbind()
    return torch.cat([early, late.flip(0)], dim=1)


class Context:
    """The ranks among which each sequence is divided.

    Not a dataclass: with mixed precision, FSDP copies those that a module is called with, to cast their fields.

    Args:
        group: their process group.
        kind: how attention reaches the other ranks' tokens: heads, gather or ring (see ``_attention``).
        compiled: whether the model is compiled. Its attention is not: collectives and the choice of blocks take little
            time.
    """

    def __init__(self, group: Any, kind: str, *, compiled: bool = False) -> None:
        self.group, self.kind = group, kind
        self.attention: Callable[..., Tensor] = self._attention
        if compiled:  # else the decorator would import the compiler in every run
            self.attention = torch.compiler.disable(self._attention)  # type: ignore[no-untyped-call]

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """This rank's number among them."""
        return dist.get_rank(self.group)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions, (tokens,), of this rank's ``tokens`` tokens of a sequence."""
        return chunks(tokens * self.size, self.size, device)[self.rank]

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of ``x`` (B, n T, ...), (B, T, ...)."""
        return x[:, self.positions(x.shape[1] // self.size, x.device)]

    @torch.no_grad()
    def gathered(self, x: Tensor) -> Tensor:
        """Return the complete (B, n T, ...) of which ``x`` (B, T, ...) is this rank's part, without gradients."""
        parts = x.new_empty(self.size, *x.shape)
        compat_context.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return self.in_order(parts.transpose(0, 1).flatten(1, 2), dim=1)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x``, whose parts of all ranks follow each other along ``dim``, in the order of the sequence."""
        tokens = x.shape[dim]
        return x.index_select(dim, chunks(tokens, self.size, x.device).flatten().argsort())

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x``, in the order of the sequence along ``dim``, grouped by the ranks that hold its parts."""
        return x.index_select(dim, chunks(x.shape[dim], self.size, x.device).flatten())

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of the ranks' ``losses``."""
        losses = losses.clone()
        dist.all_reduce(losses, group=self.group)
        return losses / self.size

    def mask(self, documents: Tensor, *facts: Any, compiled: bool = False) -> Mask:
        """Return what ``attention`` needs to keep within ``documents`` (B, T); ``facts`` as for ``document_mask``."""
        complete = self.gathered(documents)
        return document_mask(complete, *facts, compiled=compiled) if self.kind == "heads" else complete

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, mask: Mask | None, scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``causal_attention`` of the complete sequences, for this rank's queries, (B, N, T, H).

        heads: Ranks exchange tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023), so that each has full sequences
            of N / n query heads and M / n key heads.
        gather: Ranks gather all keys and values (Llama 3, section 3.3.2), those of a few heads at a time.
        ring: Keys and values travel from rank to rank (Ring Attention, Liu et al. 2023), so that no rank ever has
            more than two parts of them.

        Args:
            q: queries of this rank's tokens, (B, N, T, H).
            k: keys of the same tokens, (B, M, T, H).
            v: their values, (B, M, T, H).
            p: dropout probability of the attention weights; only for heads.
            mask: from ``mask``; None: attention over all earlier tokens.
            scale: as in ``causal_attention``.
            window: as in ``causal_attention``; only for heads.
        """
        if self.kind != "heads":
            assert p == 0
            assert window is None or window >= q.shape[2] * self.size
            assert not isinstance(mask, (tuple, dict))
            result: Tensor = _Exchange.apply(q, k, v, mask, self, scale)  # type: ignore[no-untyped-call]
            return result
        n, sizes = self.size, [x.shape[1] // self.size for x in (q, k, v)]
        B, _, T, H = q.shape
        heads = torch.cat([x.reshape(B, n, -1, T, H) for x in (q, k, v)], dim=2).flatten(1, 2)
        complete = self.in_order(_AllToAll.apply(heads, self.group, 1, 2), dim=2)  # type: ignore[no-untyped-call]
        q, k, v = torch.split(complete, sizes, dim=1)
        y = causal_attention(q, k, v, p, mask, scale, window)
        back: Tensor = _AllToAll.apply(self.by_rank(y, dim=2), self.group, 2, 1)  # type: ignore[no-untyped-call]
        return back


def attention(
    q: Tensor, k: Tensor, v: Tensor, p: float, mask: Mask | None = None, scale: float | None = None,
    context: Context | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return ``causal_attention``, over the tokens of all ranks of ``context`` if there is one."""
    compute = context.attention if context else causal_attention
    return compute(q, k, v, p, mask, scale, window)


def positions_of(tokens: int, device: torch.device, start: int = 0, context: Context | None = None) -> Tensor:
    """Return the positions of consecutive ``tokens``, the first at ``start``, or of this rank's part of a sequence."""
    return context.positions(tokens, device) if context else torch.arange(start, start + tokens, device=device)


class _AllToAll(torch.autograd.Function):
    """Divides a tensor along one dimension among the ranks, and joins what they receive along another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, divided: int, joined: int) -> Tensor:
        ctx.args = group, joined, divided
        return _all_to_all(x, group, divided, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], *ctx.args), None, None, None


def _all_to_all(x: Tensor, group: Any, divided: int, joined: int) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=divided))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=joined)


class _Exchange(torch.autograd.Function):
    """Attention over the keys and values of all ranks, one rank's part after the other.

    The parts' results are merged by the logarithms of their softmax's denominators (online softmax, Milakov and
    Gimelshein 2018). Only this rank's part is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, context: Context, scale: float | None
    ) -> Tensor:
        q, kv = q.contiguous(), torch.stack([k, v])
        out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        visit = _ring if context.kind == "ring" else _gather
        for source, heads, each in visit(kv, context):
            block = _Block(context, source, documents, q, scale)
            mine, columns = (slice(None), _queries(heads, q, k), block.rows), block.columns
            new_out, new_lse = block.forward(q[mine], *each[:, :, :, columns])
            total = torch.logaddexp(lse[mine], new_lse)
            # A row without a key so far has -inf on both sides.
            weight = torch.exp(new_lse - total).nan_to_num(0.0).unsqueeze(-1)
            out[mine] = torch.lerp(out[mine], new_out.float(), weight)
            lse[mine] = total
        out = out.type_as(q)
        ctx.save_for_backward(q, kv, out, lse, *([] if documents is None else [documents]))
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, out, lse, *documents), context = ctx.saved_tensors, ctx.context
        d_out = gradients[0].contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)

        def of_part(source: int, heads: slice, each: Tensor) -> Tensor:
            """Return the gradient of keys and values that ``source`` has, adding to that of the queries."""
            block = _Block(context, source, documents[0] if documents else None, q, ctx.scale)
            mine, columns = (slice(None), _queries(heads, q, kv[0]), block.rows), block.columns
            d_kv = torch.zeros_like(each, dtype=torch.float32)
            k, v = each[:, :, :, columns].unbind()
            d_mine, dk, dv = block.backward(d_out[mine], q[mine], k, v, out[mine], lse[mine])
            dq[mine] += d_mine
            d_kv[0, :, :, columns], d_kv[1, :, :, columns] = dk, dv
            return d_kv

        d_kv = (_ring_gradients if context.kind == "ring" else _gather_gradients)(kv, context, of_part)
        dk, dv = d_kv.type_as(kv)
        return dq.type_as(q), dk, dv, None, None, None


class _Block:
    """The attention of this rank's queries to the keys of ``source``: which of them, and by which kernel."""

    def __init__(self, context: Context, source: int, documents: Tensor | None, q: Tensor, scale: float | None) -> None:
        tokens = q.shape[2]
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        self.rows = slice(tokens // 2, None) if source > context.rank else slice(None)
        self.columns = slice(tokens // 2) if source < context.rank else slice(None)
        self.causal = source == context.rank
        self.mask: Tensor | None = None
        if documents is not None:
            own, theirs = chunks(documents.shape[1], context.size, documents.device)[[context.rank, source]]
            own, theirs = own[self.rows], theirs[self.columns]
            self.mask = documents[:, None, own, None] == documents[:, None, None, theirs]
            if self.causal:
                self.mask = self.mask.tril()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention (B, N, queries, H), and the logarithm of the denominators of its softmax."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if self.mask is None and compat_context.has_flash_attention(q):
            return compat_context.flash_attention(q, k, v, causal=self.causal, scale=self.scale)
        scores = self._scores(q, k)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)  # of queries without a key
        return weights.type_as(v) @ v, lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; ``out`` and ``lse`` are of the attention to all keys."""
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        if self.mask is None and compat_context.has_flash_attention(q):
            dq, dk, dv = compat_context.flash_attention_backward(
                d_out, q, k, v, out, lse, causal=self.causal, scale=self.scale
            )
        else:
            weights = torch.exp(self._scores(q, k) - lse[..., None])
            dv = weights.type_as(v).mT @ d_out
            shift = (d_out.float() * out).sum(-1, keepdim=True)
            d_scores = (weights * ((d_out @ v.mT) - shift) * self.scale).type_as(q)
            dq, dk = d_scores @ k, d_scores.mT @ q
        dk, dv = (x.view(len(x), -1, shared, *x.shape[2:]).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = (q @ k.mT).float() * self.scale
        mask = self.mask
        if mask is None and self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores


def _queries(heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the heads of ``q`` that use these ``heads`` of ``k``."""
    shared = q.shape[1] // k.shape[1]
    return slice(heads.start * shared, heads.stop * shared)


Part = Callable[[int, slice, Tensor], Tensor]
"""Computes the gradient of keys and values, given the rank that they are of, their heads, and themselves."""


def _few_heads(kv: Tensor, context: Context) -> Iterator[slice]:
    """Yield the heads of ``kv`` in groups so small that one, gathered from all ranks, is no larger than ``kv``."""
    count = kv.shape[2]
    few = max(1, count // context.size)
    yield from (slice(first, min(first + few, count)) for first in range(0, count, few))


def _gathered(kv: Tensor, context: Context, heads: slice) -> tuple[Tensor, ...]:
    """Return the parts of all ranks like the ``heads`` of ``kv``."""
    mine = kv[:, :, heads].contiguous()
    parts = mine.new_empty(context.size, *mine.shape)
    compat_context.all_gather_single(parts.flatten(0, 1), mine, group=context.group)
    return parts.unbind()


def _gather(kv: Tensor, context: Context) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the parts of all ranks like ``kv``, with the number of the rank and the heads."""
    for heads in _few_heads(kv, context):
        yield from ((source, heads, part) for source, part in enumerate(_gathered(kv, context, heads)))


def _gather_gradients(kv: Tensor, context: Context, of_part: Part) -> Tensor:
    """Return the gradient of this rank's ``kv``: the sum of what all ranks compute by ``of_part``, in fp32."""
    total = torch.empty_like(kv, dtype=torch.float32)
    for heads in _few_heads(kv, context):
        parts = _gathered(kv, context, heads)
        gradients = torch.stack([of_part(source, heads, part) for source, part in enumerate(parts)])
        mine = torch.empty_like(gradients[0])
        compat_context.reduce_scatter_single(mine, gradients.flatten(0, 1), group=context.group)
        total[:, :, heads] = mine
    return total


def _ring(kv: Tensor, context: Context) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield what ``_gather`` does, each with all heads, as they arrive; this rank's first."""
    for step in range(context.size):
        arriving = _pass_on(kv, context) if step < context.size - 1 else None
        yield (context.rank - step) % context.size, slice(0, kv.shape[2]), kv
        if arriving:
            kv = arriving()


def _ring_gradients(kv: Tensor, context: Context, of_part: Part) -> Tensor:
    """Return what ``_gather_gradients`` does; gradients travel with their keys and values, and once more to return."""
    total = torch.zeros_like(kv, dtype=torch.float32)
    for source, heads, part in _ring(kv, context):
        total += of_part(source, heads, part)
        total = _pass_on(total, context)()
    return total


def _pass_on(x: Tensor, context: Context) -> Callable[[], Tensor]:
    """Send ``x`` to the next rank, and return a function that waits for that of the previous one."""
    received = torch.empty_like(x)
    after, before = (dist.get_global_rank(context.group, (context.rank + n) % context.size) for n in (1, -1))
    sent = [
        dist.P2POp(dist.isend, x, after, context.group),
        dist.P2POp(dist.irecv, received, before, context.group),
    ]
    works = dist.batch_isend_irecv(sent)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait
