"""Context parallelism: each sequence is divided among ranks, which exchange what attention needs.

Rank r of n holds an early and a late chunk of each sequence, numbers r and 2n - 1 - r of 2n. Later tokens attend to
more tokens, so this gives all ranks the same work.

Shapes: B sequences, T tokens on this rank, n ranks, N query heads, M key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun.dist import torch_private
from wordrun.model.attention import Mask, causal_attention, document_mask
from wordrun.model.kernel_thresholds import ROWS
from wordrun.model.kv_cache import Position


@lru_cache(maxsize=8)
def chunks(tokens: int, ranks: int, device: torch.device) -> Tensor:
    """Return the positions of the tokens that each rank holds of a sequence, (ranks, tokens / ranks), in order."""
    early, late = torch.arange(tokens, device=device).view(2, ranks, -1).unbind()
    return torch.cat([early, late.flip(0)], dim=1)


class Context:
    """The ranks among which each sequence is divided.

    It is not a dataclass: with mixed precision, FSDP copies dataclasses among a module's arguments, to cast them.

    Args:
        group: their process group.
        kind: how attention reaches the other ranks' tokens: heads or gather (see ``_attention``).
        compiled: whether the model is compiled. The attention among ranks stays uncompiled: collectives and the choice
            of blocks take little time.
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

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's share of ``x`` (B, n T, ...), (B, T, ...)."""
        return x[:, self.positions(x.shape[1] // self.size, x.device)]

    @torch.no_grad()
    def gathered(self, x: Tensor) -> Tensor:
        """Return the complete tensor (B, n T, ...), of which ``x`` (B, T, ...) is this rank's part; no gradients."""
        return self.in_order(self._gather(x).transpose(0, 1).flatten(1, 2), dim=1)

    def _gather(self, x: Tensor) -> Tensor:
        """Return the tensors like ``x`` of all ranks, (n, ...)."""
        parts = x.new_empty(self.size, *x.shape)
        torch_private.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts

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
        """Return the ``mask`` that keeps ``attention`` within ``documents`` (B, T).

        Args:
            documents: document number of each of this rank's tokens.
            facts: further arguments of ``document_mask``.
            compiled: whether the mask is for compiled blocks.
        """
        complete = self.gathered(documents)
        return document_mask(complete, *facts, compiled=compiled) if self.kind == "heads" else complete

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        p: float,
        mask: Mask | None,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return ``causal_attention`` of the complete sequences, for this rank's queries, (B, N, T, H).

        heads: Ranks exchange tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023), so that each has full sequences
            of N / n query heads and M / n key heads.
        gather: Ranks gather all keys and values (Llama 3, section 3.3.2), those of a few heads at a time, and again
            for the backward pass, so that these need no more memory than a rank's own.

        Args:
            q: queries of this rank's tokens, (B, N, T, H).
            k: keys of the same tokens, (B, M, T, H).
            v: their values, (B, M, T, H).
            p: dropout probability of the attention weights; only for heads.
            mask: from ``mask``; None: attention over all earlier tokens.
            scale: as in ``causal_attention``.
            window: as in ``causal_attention``.
        """
        if self.kind != "heads":
            assert p == 0
            few = max(1, k.shape[1] // self.size)
            of_heads = few * q.shape[1] // k.shape[1], few, few
            groups = zip(*(torch.split(x, n, dim=1) for x, n in zip((q, k, v), of_heads, strict=True)), strict=True)
            attend = partial(causal_attention, p=0.0, scale=scale, window=window)
            found = [_Gathered.apply(*group, self, mask, attend) for group in groups]  # type: ignore[no-untyped-call]
            return torch.cat(found, dim=1)
        n, sizes = self.size, [x.shape[1] // self.size for x in (q, k, v)]
        B, _, T, H = q.shape
        heads = torch.cat([x.reshape(B, n, -1, T, H) for x in (q, k, v)], dim=2).flatten(1, 2)
        complete = self.in_order(_AllToAll.apply(heads, self.group, 1, 2), dim=2)  # type: ignore[no-untyped-call]
        q, k, v = torch.split(complete, sizes, dim=1)
        y = causal_attention(q, k, v, p, mask, scale, window)
        back: Tensor = _AllToAll.apply(self.by_rank(y, dim=2), self.group, 2, 1)  # type: ignore[no-untyped-call]
        return back

    def complete(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the keys and values of all ranks, (2, B, M, n T, H), without gradients."""
        return self.in_order(self._gather(torch.stack([k, v])).movedim(0, 3).flatten(3, 4), dim=3)

    def blocks(self, tokens: int, documents: Tensor | None = None) -> Iterator[tuple[slice, int, Tensor | None]]:
        """Yield at most ``ROWS`` of this rank's ``tokens`` at a time.

        Yields:
            Which of this rank's tokens; the number of keys up to the last of them; their mask, if there are documents.
        """
        count = tokens // 2
        for half, chunk in enumerate((self.rank, 2 * self.size - 1 - self.rank)):
            for start in range(0, count, ROWS):
                first, end = chunk * count + start, chunk * count + min(start + ROWS, count)
                mask = None
                if documents is not None:
                    mask = (documents[:, None, first:end, None] == documents[:, None, None, :end]).tril(first)
                begin = half * count + start
                yield slice(begin, begin + end - first), end, mask


def positions_of(
    tokens: int, device: torch.device, start: int | Position = 0, context: Context | None = None
) -> Tensor:
    """Return the positions of consecutive ``tokens``, the first at ``start``, or of this rank's part of a sequence."""
    if isinstance(start, Position):
        return start.value
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
    """Return what all ranks send to this one, joined along ``joined``; ``x`` is divided along ``divided``."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=divided))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=joined)


class _Gathered(torch.autograd.Function):
    """Attention to the keys and values of all ranks, which are gathered and attended to again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        documents: Tensor | None,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *([] if documents is None else [documents]))
        ctx.context, ctx.attend = context, attend
        k, v = context.complete(k, v)
        found = [
            attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], mask=mask)
            for rows, end, mask in context.blocks(q.shape[2], documents)
        ]
        return torch.cat(found, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, *documents), context = ctx.saved_tensors, ctx.context
        kv, d_q = context.complete(k, v), torch.empty_like(q)
        d_kv = torch.zeros_like(kv, dtype=torch.float32)
        for rows, end, mask in context.blocks(q.shape[2], *documents):
            some = [each.detach().requires_grad_() for each in (q[:, :, rows], *kv[:, :, :, :end])]
            with torch.enable_grad():
                y = ctx.attend(*some, mask=mask)
            d_q[:, :, rows], *of_keys = torch.autograd.grad(y, some, gradients[0][:, :, rows])
            d_kv[:, :, :, :end] += torch.stack(of_keys)
        parts = context.by_rank(d_kv, dim=3).unflatten(3, (context.size, -1)).movedim(3, 0)
        mine = torch.empty_like(parts[0])
        torch_private.reduce_scatter_single(mine, parts.flatten(0, 1), group=context.group)
        return d_q, *mine.type_as(q), None, None, None
