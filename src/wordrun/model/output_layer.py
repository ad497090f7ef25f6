"""The output layer: logits of the next token, and their cross entropy.

Shapes: B sequences, T tokens, C = n_embd, V vocabulary with padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.model import chunked_loss, kernel_thresholds


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
        if not chunked_loss.applies(self.weight) or not (many if chunked is None else chunked):
            return cross_entropy(self(x), targets)
        x, weight, group = chunked_loss.on_this_rank(self._scaled(x), self.weight)
        losses = chunked_loss.cross_entropy(
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
