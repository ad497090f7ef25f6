"""Distributed data parallel: the model on every rank, each on its own share of the batch, gradients averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wordrun.backend.base import MakeOptimizer, StepResult
from wordrun.backend.precision import choose_dtype
from wordrun.backend.stopwatch import Stopwatch
from wordrun.config import Config, DDPConfig
from wordrun.data.loader import Batch
from wordrun.dist import World
from wordrun.model import GPT


class DDPBackend:
    """``train.backend=DDP``."""

    def __init__(self, cfg: Config, world: World, model: GPT, make_optimizer: MakeOptimizer) -> None:
        options = cfg.backend
        assert isinstance(options, DDPConfig)
        self.device = torch.device(world.device)
        self.dp_rank, self.dp_size = world.rank, world.size
        self.dtype = choose_dtype(cfg.train.dtype, self.device)
        self.model = model.to(self.device)
        if cfg.train.compile:
            self.model.compile()
        self.replica = DistributedDataParallel(
            self.model,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )
        self.optimizer = make_optimizer(self.model)
        self.grad_clip = cfg.optimizer.grad_clip or float("inf")
        # Only fp16 has too few exponent bits for small gradients; bf16 needs no scaling.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``; gradients travel with the last of them alone."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            # Alone there is nobody to average with, and the reducer would only cost time: 6 % of a small step.
            average = number == len(batches) and self.dp_size > 1
            with contextlib.nullcontext() if average else self.replica.no_sync():
                with self.autocast():
                    loss = self.replica(batch.tokens, batch.targets).mean() / len(batches)
                clock.lap("forward")
                self.scaler.scale(loss).backward()
                clock.lap("backward")
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        return StepResult(torch.stack(losses).sum(), norm)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,)."""
        with self.autocast():
            return self.model(batch.tokens, batch.targets)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give back the reducer, while the process group that it holds is still somebody else's, too."""
        # Freed later and last, it would destroy the group under Python's lock, for which gloo's threads may be waiting.
        self.replica.reducer = self.replica.logger = None  # type: ignore[assignment]

    def autocast(self) -> torch.autocast:
        """Return the context in which the model computes in ``dtype``."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)
