"""Distributed data parallel: the model on every rank, each on its own share of the batch, gradients averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from wordrun.backend.base import MakeOptimizer, StepResult
from wordrun.backend.precision import choose_dtype
from wordrun.backend.stopwatch import Stopwatch
from wordrun.config import Config, DDPConfig
from wordrun.data.loader import Batch
from wordrun.dist import World, mpi
from wordrun.model import GPT


def average_over_mpi(communicator: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients on the CPU by MPI, which has shared memory and the fabric where gloo has TCP."""
    gradients = bucket.buffer()
    communicator.Allreduce(mpi.in_place(), gradients.numpy())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients.div_(communicator.size))
    return done


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
        if self.device.type == "cpu" and world.size > 1 and mpi.at_work(world):
            # torch looks into a hook's annotations and takes no strings, which all of this file's are.
            self.replica.register_comm_hook(mpi.communicator(), lambda comm, bucket: average_over_mpi(comm, bucket))
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.model)
        self.grad_clip = cfg.optimizer.grad_clip or float("inf")
        # Only fp16 has too few exponent bits for small gradients; bf16 needs no scaling.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``; gradients travel with the last of them alone."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            # The bare module's gradients add up where they are. Alone there is nobody to average with.
            average = number == len(batches) and self.dp_size > 1
            with self.autocast():
                loss = (self.replica if average else self.model)(batch.tokens, batch.targets).mean() / len(batches)
            clock.lap("forward")
            self.scaler.scale(loss).backward()
            clock.lap("backward")
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        return StepResult(torch.stack(losses).sum(), norm)

    def _clip(self) -> Tensor:
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        # On a CPU the norm is at hand, and most steps need no clipping; an accelerator would have to be waited for.
        if self.device.type != "cpu" or norm > self.grad_clip:
            clip_grads_with_norm_(self.parameters, self.grad_clip, norm)
        return norm

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
