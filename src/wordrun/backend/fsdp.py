"""Fully sharded data parallel (Zhao et al. 2023; ZeRO-3, Rajbhandari et al. 2020), with tensor parallelism below it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from wordrun.backend import split
from wordrun.backend.base import BackendSpec
from wordrun.backend.native import NativeBackend
from wordrun.backend.stopwatch import Stopwatch
from wordrun.config import FSDPConfig


class FSDPBackend(NativeBackend):
    """``train.backend=FSDP``, and ``TP``, which is the same with ``backend.tp`` above 1.

    Gradients are reduce-scattered after each micro-step, so that no rank ever keeps unsharded ones. Where parameters
    stay unsharded between the passes (``reshard_after_forward=false``), gradients are reduced once a step.

    Args:
        spec: what to build from.
        stages: the numbers of the blocks of each stage that this rank has; None: all blocks.
    """

    def __init__(self, spec: BackendSpec, stages: Sequence[Sequence[int] | None] = (None,)) -> None:
        options = spec.cfg.backend
        assert isinstance(options, FSDPConfig)
        self.options = options
        self.mesh = split.device_mesh(spec.layout, spec.device)
        splitter = split.Splitter(spec, self.mesh, options)
        self.sharded = splitter.sharded
        super().__init__(spec, [splitter.build(layers) for layers in stages])

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``."""
        (model,) = self.parts
        if isinstance(model, FSDPModule):
            if not self.options.reshard_after_forward:
                model.set_requires_gradient_sync(last)
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
        with self.sharded_cross_entropy():
            return split.full(model.losses(batch)).mean()

    def backward(self, loss: Tensor) -> None:
        """Accumulate and reduce the gradients of ``loss``."""
        with self.sharded_cross_entropy():
            super().backward(loss)

    @contextlib.contextmanager
    def sharded_cross_entropy(self) -> Iterator[None]:
        """Let the cross entropy work on logits that tensor-parallel ranks split by vocabulary."""
        with loss_parallel() if self.layout.tp > 1 else contextlib.nullcontext():
            yield

    def update(self, learning_rate: float, clock: Stopwatch) -> Tensor:
        """Clip the gradients, take the optimizer's step and return the gradients' norm."""
        self.complete_gradients()
        return super().update(learning_rate, clock)

    def complete_gradients(self) -> None:
        """Finish reducing the gradients after the backward passes."""
        if self.layout.tp > 1 and not self.sharded:
            split.reduce_gradients(self.parameters)

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def total_norm(self) -> Tensor:
        """Return the norm of the gradients of the full model."""
        return split.total_norm(self.gradients(), self.mesh, self.device)

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients down to optimizer.grad_clip where their ``norm`` is above it."""
        split.clip(self.gradients(), norm, self.grad_clip)

    @torch.no_grad()
    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each example of ``batch``, (B,)."""
        with self.sharded_cross_entropy():
            return split.full(self.parts[0].losses(batch))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens``, (B, V)."""
        return split.full(self.parts[0](self.padded(tokens), at=tokens.shape[1] - 1))

    def buffer_groups(self) -> list[Any]:
        """Return the process groups whose ranks hold the same buffers."""
        return [self.mesh.get_group(axis) for axis in ("replicate", "shard", "tp") if self.mesh[axis].size() > 1]

    def model_state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Return the weights, resharded first, as an evaluation may have left them gathered."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().model_state(once=once)

    def padded(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` padded at the end to a multiple of ``backend.tp``; no earlier token attends to those."""
        return F.pad(tokens, (0, -tokens.shape[1] % self.layout.tp))
