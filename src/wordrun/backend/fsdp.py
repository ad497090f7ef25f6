"""Fully sharded data parallel (Zhao et al. 2023; ZeRO-3, Rajbhandari et al. 2020), with tensor parallelism below it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from wordrun.backend import split
from wordrun.backend.base import Job
from wordrun.backend.native import NativeBackend
from wordrun.backend.stopwatch import Stopwatch
from wordrun.config import FSDPConfig
from wordrun.data.batch import Batch
from wordrun.model import Transformer


class FSDPBackend(NativeBackend):
    """``train.backend=FSDP``, and ``TP``, which is the same with ``backend.tp`` above 1.

    Gradients are summed shard by shard after each micro-step, so that no rank ever keeps them whole. Where parameters
    stay whole between the passes (``reshard_after_forward=false``) there is room, and gradients travel once a step.
    """

    def make_parts(self, job: Job) -> list[Transformer]:
        """Return this rank's share of the model."""
        options = job.cfg.backend
        assert isinstance(options, FSDPConfig)
        self.options = options
        self.mesh = split.device_mesh(job.layout, self.device)
        splitter = split.Splitter(job, self.mesh, self.device, self.dtype, options)
        self.sharded = splitter.sharded
        return self.split(splitter)

    def split(self, splitter: split.Splitter) -> list[Transformer]:
        """Return what this rank holds."""
        return [splitter.build()]

    def micro_step(self, batch: Batch, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``."""
        (model,) = self.parts
        if isinstance(model, FSDPModule):
            if not self.options.reshard_after_forward:
                model.set_requires_gradient_sync(last)
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
        with self.vocabulary_in_pieces():
            return split.whole(model(batch.tokens, batch.targets, documents=batch.documents)).mean()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` up, and share them out."""
        with self.vocabulary_in_pieces():
            super().backward(loss)

    @contextlib.contextmanager
    def vocabulary_in_pieces(self) -> Iterator[None]:
        """Let the cross entropy work on logits of which each tensor-parallel rank has a part of the vocabulary."""
        with loss_parallel() if self.layout.tp > 1 else contextlib.nullcontext():
            yield

    def update(self, learning_rate: float, clock: Stopwatch) -> Tensor:
        """Clip, let the optimizer take its step, and return the norm of the gradients."""
        self.complete_gradients()
        return super().update(learning_rate, clock)

    def complete_gradients(self) -> None:
        """Do what is left of the gradients' way over the ranks after the backward passes."""
        if self.layout.tp > 1 and not self.sharded:
            split.settle(self.parameters)

    def gradients(self) -> list[Tensor]:
        """Return this rank's pieces of the gradients."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients together, of all ranks."""
        return split.total_norm(self.gradients(), self.mesh, self.device)

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients down to optimizer.grad_clip where their ``norm`` is above it."""
        split.clip(self.gradients(), norm, self.grad_clip)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,)."""
        with self.vocabulary_in_pieces():
            return split.whole(self.parts[0](batch.tokens, batch.targets, documents=batch.documents))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens``, (B, V)."""
        return split.whole(self.parts[0](self.padded(tokens), at=tokens.shape[1] - 1))

    def state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Return parameters and optimizer state; what an evaluation has left gathered is given up first."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().state(once=once)

    def padded(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` with as many behind them as make them divisible; no earlier token sees those."""
        return F.pad(tokens, (0, -tokens.shape[1] % self.layout.tp))
