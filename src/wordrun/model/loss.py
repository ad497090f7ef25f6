"""Cross entropy of an output layer with a large vocabulary, whose logits exist once and in the compute dtype.

Shapes: N tokens, C features, V vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wordrun import kernels


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float = 0.0, *, compiled: bool = False
) -> Tensor:
    """Return the cross entropy of each token in nats, (N,) fp32.

    The forward pass turns the logits into their gradients in place, so that the backward pass needs no others. Autograd
    would keep the logits and, in fp32, the log-probabilities and two gradients of their size.

    Args:
        x: features, (N, C).
        weight: of the output layer, (V, C).
        targets: token ids, (N,); the loss of a negative one is 0.
        vocab_size: the logits from here on are padding, with probability 0.
        softcap: each logit z becomes softcap * tanh(z / softcap); 0: it stays as it is.
        compiled: compile the softmax and its gradient with torch.compile.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    kernel = _compiled() if compiled else _softmax
    keep = torch.is_grad_enabled()
    known = targets.clamp(min=0)
    losses: Tensor = _CrossEntropy.apply(x, weight, known, vocab_size, softcap, dtype, kernel, keep)  # type: ignore[no-untyped-call]
    return losses * (targets >= 0)


class _CrossEntropy(torch.autograd.Function):
    """The logits' gradient is kept for a loss of 1 per token; the backward pass scales the other factor by rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float, dtype: torch.dtype,
        kernel: Callable[..., Tensor], keep: bool,
    ) -> Tensor:  # fmt: skip
        rows = len(x) if kernel is not _softmax else max(1, kernels.CHUNK // len(weight))
        a, w = x.to(dtype), weight.to(dtype)
        logits = torch.empty(len(x) if keep else min(rows, len(x)), len(weight), dtype=dtype, device=x.device)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for start in range(0, len(x), rows):
            part = slice(start, min(start + rows, len(x)))
            into = logits[part] if keep else logits[: part.stop - start]
            torch.mm(a[part], w.t(), out=into)
            losses[part] = kernel(into, targets[part], vocab_size, softcap, keep)
        ctx.save_for_backward(a, w, logits if keep else None)
        ctx.dtypes = x.dtype, weight.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, of_logits = ctx.saved_tensors
        scale = gradients[0][:, None]
        of_x = ((of_logits @ weight) * scale).to(ctx.dtypes[0])
        of_weight = (of_logits.t() @ (x * scale).to(x.dtype)).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, *[None] * 6


def _softmax(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float, gradient: bool) -> Tensor:
    """Return the losses (N,), and replace the ``logits`` (N, V) by the gradient of each row's loss if ``gradient``."""
    slope: Tensor | float = 1.0
    if softcap:
        bounded = torch.tanh(logits.float() / softcap)
        exact = bounded * softcap
        slope = bounded.square_().neg_().add_(1)  # of the bounded logits
        slope[:, vocab_size:] = 0
    else:
        exact = logits
    exact[:, vocab_size:] = -torch.inf
    exact = torch.log_softmax(exact, 1, dtype=torch.float32)
    losses = -exact.gather(1, targets[:, None])[:, 0]
    if gradient and torch.compiler.is_compiling():  # a comparison can be fused, a scatter cannot
        target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        logits.copy_((exact.exp() - target.float()) * slope)
    elif gradient:
        exact.exp_().scatter_add_(1, targets[:, None], torch.full_like(losses, -1.0)[:, None])
        logits.copy_(exact * slope if softcap else exact)
    return losses


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    """Return the compiled function, one for all models."""
    return torch.compile(_softmax)
