"""The output layer: logits of the next token, and their cross entropy.

With a large vocabulary, ``chunked_cross_entropy`` keeps the logits only once, in the compute dtype: as in Liger
Kernel's fused linear cross entropy (Hsu et al. 2024), the forward pass already computes the gradient of the logits, and
overwrites the logits with it. ``train.chunked_loss`` chooses it.

Shapes: B sequences, T tokens (N in all), C = n_embd, V vocabulary with padding, or this rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.model import kernel_thresholds


def can_chunk(weight: Any) -> bool:
    """Return whether this rank holds the ``weight`` of the output layer, or its tensor-parallel shard of rows.

    It does not if a wrapper gathers the weights only during the module's call, as DeepSpeed does with stage 3.
    """
    if weight.dim() != 2:
        return False
    if not torch_private.is_sharded(weight):
        return type(weight) is nn.Parameter
    return weight.device_mesh.mesh_dim_names == ("tp",) and weight.placements[0].is_shard(0)


def on_this_rank(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, dist.ProcessGroup | None]:
    """Return all of the features ``x``, this rank's rows of ``weight``, and the group of ranks that have other rows.

    The backward pass adds up the gradient of ``x`` over these ranks. The gradient of ``weight`` is a shard, as it is.
    """
    if not torch_private.is_sharded(weight):
        return x, weight, None
    from torch.distributed.tensor import Partial, Replicate

    features: Any = x  # sharded by tokens
    features = features.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return features, weight.to_local(), weight.device_mesh.get_group()


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float = 0.0,
    *,
    compiled: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the cross entropy of each token in nats, (N,) fp32.

    The forward pass replaces the logits by their gradients, which are all that the backward pass needs. Autograd would
    keep the logits and, in fp32, the log-probabilities and two gradients of the same size.

    Args:
        x: features, (N, C).
        weight: of the output layer, (V, C).
        targets: token ids, (N,); the loss of a negative one is 0.
        vocab_size: number of tokens; logits beyond it are padding, with probability 0.
        softcap: each logit z becomes softcap * tanh(z / softcap); 0: it stays as it is.
        compiled: compile the softmax and its gradient with torch.compile, unless there is a ``group``.
        group: the ranks that have the shards of the vocabulary, in its order and of equal sizes, all with the same
            ``x``; then the gradient of ``x`` is this shard's share of the sum.
    """
    keep = torch.is_grad_enabled()
    known = targets.clamp(min=0)
    kernel: Callable[..., Tensor] = _compiled() if compiled else _softmax
    if group:
        kernel = partial(_softmax_of_shards, group=group)
        first = dist.get_rank(group) * len(weight)
        known, vocab_size = known - first, vocab_size - first
    rows = len(x) if compiled and not group else max(1, kernel_thresholds.CHUNK // len(weight))
    softmax = partial(kernel, vocab_size=vocab_size, softcap=softcap, gradient=keep)
    losses: Tensor = _CrossEntropy.apply(x, weight, known, softmax, rows, keep)  # type: ignore[no-untyped-call]
    return losses * (targets >= 0)


class _CrossEntropy(torch.autograd.Function):
    """The logits' gradient is kept for a loss of 1 per token; the backward pass scales the other factor by rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: Callable[[Tensor, Tensor], Tensor],
        rows: int,
        keep: bool,
    ) -> Tensor:
        """Return the losses (N,), with ``rows`` of the logits at a time; ``keep`` the gradient of all logits."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        a, w = x.to(dtype), weight.to(dtype)
        logits = torch.empty(len(x) if keep else min(rows, len(x)), len(weight), dtype=dtype, device=x.device)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for start in range(0, len(x), rows):
            part = slice(start, min(start + rows, len(x)))
            into = logits[part] if keep else logits[: part.stop - start]
            torch.mm(a[part], w.t(), out=into)
            losses[part] = softmax(into, targets[part])
        ctx.save_for_backward(a, w, logits if keep else None)
        ctx.dtypes = x.dtype, weight.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, of_logits = ctx.saved_tensors
        scale = gradients[0][:, None]
        of_x = ((of_logits @ weight) * scale).to(ctx.dtypes[0])
        of_weight = (of_logits.t() @ (x * scale).to(x.dtype)).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, *[None] * 4


def _softmax(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float, gradient: bool) -> Tensor:
    """Return the losses (N,), and replace the ``logits`` (N, V) by the gradient of each row's loss if ``gradient``."""
    exact, slope = _bounded(logits, vocab_size, softcap)
    exact = torch.log_softmax(exact, 1, dtype=torch.float32)
    losses = -exact.gather(1, targets[:, None])[:, 0]
    if gradient and torch.compiler.is_compiling():  # a comparison can be fused, a scatter cannot
        target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        logits.copy_((exact.exp() - target.float()) * slope)
    elif gradient:
        exact.exp_().scatter_add_(1, targets[:, None], torch.full_like(losses, -1.0)[:, None])
        logits.copy_(exact * slope if softcap else exact)
    return losses


def _softmax_of_shards(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float, gradient: bool, group: dist.ProcessGroup
) -> Tensor:
    """Do as ``_softmax`` with a shard of the logits; targets and ``vocab_size`` are relative to its first column."""
    exact, slope = _bounded(logits, vocab_size, softcap)
    exact = exact.float()
    largest = exact.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    exact.sub_(largest[:, None])
    here = (targets >= 0) & (targets < logits.shape[1])
    index = targets.clamp(0, logits.shape[1] - 1)[:, None]
    of_target = torch.where(here, exact.gather(1, index)[:, 0], 0)
    exact.exp_()
    sums = torch.stack([exact.sum(1), of_target])
    dist.all_reduce(sums, group=group)
    if gradient:
        exact.div_(sums[0][:, None]).scatter_add_(1, index, -here.float()[:, None])
        logits.copy_(exact * slope if softcap else exact)
    losses: Tensor = sums[0].log() - sums[1]
    return losses


def _bounded(logits: Tensor, vocab_size: int, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Return the soft-capped ``logits``, -inf in the padding, and their derivative with respect to ``logits``."""
    slope: Tensor | float = 1.0
    bounded = logits
    if softcap:
        slope = torch.tanh(logits.float() / softcap)
        bounded = slope * softcap
        slope.square_().neg_().add_(1)
        slope[:, max(0, vocab_size) :] = 0
    bounded[:, max(0, vocab_size) :] = -torch.inf
    return bounded, slope


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    """Return the compiled function, one for all models."""
    return torch.compile(_softmax)


class OutputLayer(nn.Linear):
    """A linear layer without biases from features to logits, which may be scaled, bounded and padded.

    It may have more rows than there are tokens. The logits of these padding rows are -inf, so that they have zero
    probability and zero gradients, and their weights stay 0.

    Args:
        n_embd: C.
        vocab_size: number of tokens.
        padded_vocab_size: V.
        scale: factor of the features, which muP lowers with the width; 1: none.
    """

    def __init__(self, n_embd: int, vocab_size: int, padded_vocab_size: int, scale: float = 1.0) -> None:
        super().__init__(n_embd, padded_vocab_size, bias=False)
        self.vocab_size, self.scale, self.softcap = vocab_size, scale, 0.0

    def bound_logits(self, softcap: float) -> None:
        """Replace each logit z by softcap tanh(z / softcap) (Gemma 2), which is below ``softcap``; 0: do not."""
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of the features ``x`` (..., C), -inf for padding."""
        logits = super().forward(self._scaled(x))
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.out_features > self.vocab_size:
            _mask_padding(logits, self.vocab_size)
        return logits

    def losses(self, x: Tensor, targets: Tensor, *, chunked: bool | None = None, compiled: bool = False) -> Tensor:
        """Return the mean cross entropy of each sequence in nats per token, (B,).

        Args:
            x: features, (B, T, C).
            targets: the next tokens, (B, T), -100 for no loss.
            chunked: turn logits into their gradients chunk by chunk, if possible; None: if there are many.
            compiled: compute chunks by a compiled function.
        """
        many = targets.numel() * self.out_features > kernel_thresholds.LARGE
        if not can_chunk(self.weight) or not (many if chunked is None else chunked):
            return cross_entropy(self(x), targets)
        x, weight, group = on_this_rank(self._scaled(x), self.weight)
        losses = chunked_cross_entropy(
            x.flatten(0, 1), weight, targets.flatten(), self.vocab_size, self.softcap, compiled=compiled, group=group
        )
        return losses.view(targets.shape).mean(1)

    def leave_uncompiled(self) -> None:
        """Leave ``losses`` as it is in a compiled model: it compiles its kernel itself."""
        self.losses = torch.compiler.disable(self.losses)  # type: ignore[method-assign,no-untyped-call]

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of each sequence in nats per token, (B,) fp32.

    Args:
        logits: (B, T, V).
        targets: (B, T); the loss of -100 is 0.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


@torch.no_grad()
def _mask_padding(logits: Tensor, start: int) -> None:
    """Set the ``logits`` (..., V) from index ``start`` on to -inf, in place and without autograd.

    Autograd would copy the gradients of all logits to mask those that the softmax makes exactly 0 anyway.
    """
    if torch_private.is_sharded(logits):  # sharded by vocabulary, over the tensor-parallel ranks
        rank, logits = logits.device_mesh.get_local_rank(), logits.to_local()
        start -= rank * logits.shape[-1]
    logits[..., max(0, start) :] = -torch.inf
