"""Distributed data parallel: every rank has the full model and its own share of the batch; gradients are averaged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from wordrun.backend.base import BackendSpec
from wordrun.backend.compile import compile_options, prepare
from wordrun.backend.options import DDPConfig
from wordrun.backend.torch_backend import TorchBackend
from wordrun.dist import mpi, torch_private
from wordrun.model.base import Model
from wordrun.model.construction import materialize


def average_over_mpi(communicator: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of CPU gradients with MPI, which uses shared memory and the fabric where gloo uses TCP."""
    gradients = bucket.buffer()
    with torch.profiler.record_function("mpi:all_reduce"):  # the profiler knows only of torch's own collectives
        communicator.Allreduce(mpi.in_place(), gradients.numpy())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients.div_(communicator.size))
    return done


class DDPBackend(TorchBackend):
    """``train.backend=DDP``."""

    def __init__(self, spec: BackendSpec) -> None:
        options = spec.options_of(DDPConfig)
        model = materialize(spec.make_model(), spec.cfg.train.seed, spec.device)
        prepare(model, spec.cfg, compile_options(spec.device, spec.layout))
        super().__init__(spec, [model])
        # A single process has nothing to average.
        self.replica = None if self.alone else self._replicate(spec, options, model)
        if not (self.alone or options.find_unused_parameters or options.static_graph):
            self.unused.require_all()  # DDP averages a bucket of gradients when it has all of them

    def _replicate(self, spec: BackendSpec, options: DDPConfig, model: Model) -> DistributedDataParallel:
        """Return the wrapper that averages the gradients of ``model`` over the ranks."""
        # Buffers are averaged after the step. DDP would overwrite them with rank 0's before the last micro-step.
        replica = DistributedDataParallel(
            model,
            process_group=self.group,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            **torch_private.without_buffer_broadcast(),
        )
        if options.compress == "bf16":
            # Wrapped, because torch accepts the bare hook only with NCCL, although gloo also sums bf16.
            replica.register_comm_hook(self.group, lambda group, bucket: bf16_compress_hook(group, bucket))
        elif self.device.type == "cpu" and spec.mesh is None and mpi.in_use(spec.world):  # MPI has all ranks
            # Wrapped, because torch rejects hooks whose annotations are strings, as all annotations in this file are.
            replica.register_comm_hook(mpi.communicator(), lambda comm, bucket: self._timed(comm, bucket))
        # torch records a static graph in the first pass, which must therefore be a real one; and if it looks for
        # unused parameters, it keeps the first buckets.
        if not (options.static_graph or options.find_unused_parameters):
            torch_private.settle_buckets(replica)
        return replica

    def _timed(self, communicator: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        with self.timer():
            return average_over_mpi(communicator, bucket)

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``; gradients are averaged in the backward pass of the last micro-step."""
        # Calling the model directly accumulates gradients on this rank only.
        with self.unused.named(self.parts[0]):
            return self.forward_losses(batch, self.replica if last else None).mean()

    def close(self) -> None:
        """Release the reducer while the process group has other references."""
        # With the last reference, it would destroy the group while holding the GIL, which gloo's threads may need.
        if self.replica is not None:
            torch_private.release_reducer(self.replica)
