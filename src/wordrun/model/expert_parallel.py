"""Expert parallelism: each rank has some of the experts, and tokens travel to the rank of their expert and back.

GShard (Lepikhin et al. 2020), without a capacity: all-to-all collectives send as many tokens as there are.

Shapes: n ranks, E experts, N tokens on this rank, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun.dist import torch_private


@dataclass(frozen=True)
class Exchange:
    """The ranks among which the experts are divided: rank 0 has the first E / n experts, rank 1 the next, and so on."""

    group: Any
    """Their process group."""
    size: int
    """Their number."""

    def __call__(self, experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of the experts of all ranks for ``tokens``, (N, C); every rank must call this.

        Args:
            experts: returns the outputs of this rank's experts, given tokens sorted by expert and how many each has.
            tokens: sorted by expert, (N, C).
            counts: how many of them each expert has, (E,).
        """
        from_each = torch.empty_like(counts)
        dist.all_to_all_single(from_each, counts.contiguous(), group=self.group)
        from_each = from_each.view(self.size, -1)
        sent, received = counts.view(self.size, -1).sum(1).tolist(), from_each.sum(1).tolist()
        arrived: Tensor = _Sent.apply(tokens, sent, received, self.group)  # type: ignore[no-untyped-call]
        # The received tokens are sorted by the rank they come from, then by expert.
        mine = torch.arange(from_each.shape[1], device=tokens.device).repeat(self.size)
        order = mine.repeat_interleave(from_each.flatten()).argsort(stable=True)
        y = experts(arrived.index_select(0, order), from_each.sum(0)).index_select(0, order.argsort())
        return _Sent.apply(y, received, sent, self.group)  # type: ignore[no-any-return,no-untyped-call]


class _Sent(torch.autograd.Function):
    """Sends rows to other ranks; in the backward pass, their gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        """Return what arrives: ``received`` rows from each rank for ``sent`` rows of ``x`` to each."""
        ctx.args = received, sent, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of ``x``."""
        return _all_to_all(gradients[0], *ctx.args), None, None, None


def _all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Return the ``received`` rows from each rank, after sending ``sent`` rows of ``x`` to each."""
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=group)
    return arrived


def rows_of_rank(weight: Tensor, ranks: int) -> Tensor:
    """Return this rank's rows of ``weight``, the gradient of which is divided by the number of ``ranks``.

    The tokens of all ranks contribute to the gradient, and the loss is the mean over the ranks. ``fully_shard`` divides
    only by the number of ranks that have the same experts.
    """
    mine = weight.to_local() if torch_private.is_sharded(weight) else weight
    return _Divided.apply(mine, ranks) if ranks > 1 else mine  # type: ignore[no-any-return,no-untyped-call]


class _Divided(torch.autograd.Function):
    """Returns its first argument, and divides its gradient by the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        """Return ``x``."""
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of ``x``."""
        return gradients[0] / ctx.by, None
