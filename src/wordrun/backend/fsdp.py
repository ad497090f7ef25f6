"""Fully sharded data parallel (Zhao et al. 2023; ZeRO-3, Rajbhandari et al. 2020), with tensor parallelism below it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from wordrun.backend import split
from wordrun.backend.base import BackendSpec
from wordrun.backend.native import NativeBackend
from wordrun.backend.options import FSDPConfig
from wordrun.config.rules import context_attention
from wordrun.dist import torch_private
from wordrun.dist.mesh import AXES, EXPERT_AXES
from wordrun.model.context import Context
from wordrun.model.transformer import Transformer


class FSDPBackend(NativeBackend):
    """``train.backend=FSDP`` and ``TP``; ``TP`` is the same with ``backend.tp`` above 1.

    Gradients are reduce-scattered after each micro-step, so that no rank keeps them unsharded. If parameters stay
    unsharded between the passes (``reshard_after_forward=false``), gradients are reduced once per step.

    Args:
        spec: config, ranks, and factories of the model and the optimizer.
        stages: block numbers of each of this rank's pipeline stages; None: all blocks.
    """

    def __init__(self, spec: BackendSpec, stages: Sequence[Sequence[int] | None] = (None,)) -> None:
        self.options = options = spec.options_of(FSDPConfig)
        shape = spec.layout.of_parameters.shape
        self.mesh = spec.mesh or init_device_mesh(spec.device.type, shape, mesh_dim_names=AXES)
        self.experts_mesh = None
        if spec.layout.ep > 1:
            at = spec.layout.of_experts
            self.experts_mesh = init_device_mesh(spec.device.type, at, mesh_dim_names=EXPERT_AXES)
        splitter = split.Splitter(spec, self.mesh, options, self.experts_mesh)
        self.sharded = splitter.sharded
        super().__init__(spec, [splitter.build(layers) for layers in stages])
        self.context = self._context(spec)
        for part in self.parts:
            if self.context:
                cast("Transformer", part).divide_sequences(self.context)
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    torch_private.time_collectives(module, self.timer)

    def _context(self, spec: BackendSpec) -> Context | None:
        """Return the ranks among which each sequence is divided; None: it is not."""
        layout = spec.layout
        if layout.cp == 1:
            return None
        axes = init_device_mesh(spec.device.type, layout.shape, mesh_dim_names=AXES)
        kind = context_attention(self.options, spec.cfg, layout)
        return Context(axes.get_group("cp"), kind, compiled=spec.cfg.train.compile is not False)

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``."""
        (model,) = self.parts
        if isinstance(model, FSDPModule):
            if not self.options.reshard_after_forward:
                model.set_requires_gradient_sync(last)
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
        return self.forward_losses(batch).mean()

    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), and append the model's outputs to ``outputs``."""
        losses = super().losses(batch, outputs)
        if self.context is None:
            return losses
        if outputs:
            outputs[-1] = self.context.gathered(outputs[-1])
        return self.context.mean(losses)

    def backward(self, loss: Tensor) -> None:
        """Accumulate and reduce the gradients of ``loss``."""
        with self._loss_context():
            super().backward(loss)

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of forward passes; autocast only for losses that need it, as the weights have a dtype."""
        if self.layout.tp == 1 and not all(part.computes_losses_in_fp32 for part in self.parts):
            return super().forward_context()
        return self._loss_context()

    def _loss_context(self) -> AbstractContextManager[None]:
        """Return the context in which cross entropy accepts logits sharded by vocabulary."""
        return loss_parallel() if self.layout.tp > 1 else nullcontext()

    def complete_gradients(self) -> None:
        """Finish reducing the gradients after the backward passes."""
        if self.layout.tp > 1 and not self.sharded:
            split.reduce_gradients(self.parameters)

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradient shards."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def total_norm(self) -> Tensor:
        """Return the gradient norm of the full model."""
        return split.total_norm(self.gradients(), self.mesh, self.device, self.experts_mesh)

    def holders(self) -> Any:
        """Return the process group of the ranks along shard and tp or, if there are none, along replicate."""
        axes = [axis for axis in ("shard", "tp") if self.mesh[axis].size() > 1] or ["replicate"]
        if len(axes) == 1:
            return self.mesh.get_group(axes[0]) if self.mesh[axes[0]].size() > 1 else None
        size = self.layout.shards * self.layout.tp  # the innermost axes, so these ranks are consecutive
        firsts = range(0, self.layout.size, size)
        ranks = [list(range(first, first + size)) for first in firsts]
        return dist.new_subgroups_by_enumeration(ranks)[0]  # type: ignore[no-untyped-call]

    def buffer_groups(self) -> list[Any]:
        """Return the process groups whose ranks hold the same buffers."""
        return [self.mesh.get_group(axis) for axis in ("replicate", "shard", "tp") if self.mesh[axis].size() > 1]

    def model_state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Reshard the weights, which an evaluation may have left gathered, and return them."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().model_state(once=once)
