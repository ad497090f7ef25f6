"""Distributed data parallel: the model on every rank, each on its own share of the batch, gradients averaged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from wordrun.backend.base import Job
from wordrun.backend.native import NativeBackend, prepare_blocks
from wordrun.config import DDPConfig
from wordrun.data.batch import Batch
from wordrun.dist import mpi
from wordrun.model import Transformer, materialise, outline


def average_over_mpi(communicator: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients on the CPU by MPI, which has shared memory and the fabric where gloo has TCP."""
    gradients = bucket.buffer()
    communicator.Allreduce(mpi.in_place(), gradients.numpy())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients.div_(communicator.size))
    return done


class DDPBackend(NativeBackend):
    """``train.backend=DDP``."""

    def make_parts(self, job: Job) -> list[Transformer]:
        """Return the whole model."""
        cfg, options = job.cfg, job.cfg.backend
        assert isinstance(options, DDPConfig)
        model = materialise(outline(cfg.model, job.vocab_size), cfg.train.seed, self.device)
        prepare_blocks(model, cfg)
        self.alone = job.world.size == 1
        self.replica = DistributedDataParallel(
            model,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )
        if options.compress == "bf16":
            # Not the hook itself, which torch refuses to any but NCCL, though gloo sums bf16 as well.
            self.replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        elif self.device.type == "cpu" and not self.alone and mpi.in_use(job.world):
            # torch looks into a hook's annotations and takes no strings, which all of this file's are.
            self.replica.register_comm_hook(mpi.communicator(), lambda comm, bucket: average_over_mpi(comm, bucket))
        return [model]

    def micro_step(self, batch: Batch, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``; the gradients are averaged with the last one's backward pass."""
        # The bare module's gradients add up where they are. Alone there is nobody to average with.
        module = self.replica if last and not self.alone else self.parts[0]
        with self.autocast():
            return module(batch.tokens, batch.targets, documents=batch.documents).mean()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give back the reducer, while the process group that it holds is still somebody else's, too."""
        # Freed later and last, it would destroy the group under Python's lock, for which gloo's threads may be waiting.
        self.replica.reducer = self.replica.logger = None  # type: ignore[assignment]
