"""Fully sharded data parallel (Zhao et al. 2023; ZeRO-3, Rajbhandari et al. 2020), also of tensor-parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from wordrun.backend.base import BackendSpec
from wordrun.backend.clipping import total_norm
from wordrun.backend.compile import compile_options, prepare_block, prepare_rest
from wordrun.backend.mixed_precision import TORCH_DTYPES
from wordrun.backend.options import FSDPConfig
from wordrun.backend.torch_backend import TorchBackend
from wordrun.common.errors import ConfigError
from wordrun.config.registry import part_of
from wordrun.config.rules import context_attention
from wordrun.dist import torch_private
from wordrun.dist.mesh import AXES, EXPERT_AXES
from wordrun.model.base import Model
from wordrun.model.context_parallel import Context
from wordrun.model.expert_parallel import Exchange
from wordrun.model.moe import Experts
from wordrun.model.transformer import Transformer


class FSDPBackend(TorchBackend):
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
        splitter = Splitter(spec, self.mesh, options, self.experts_mesh)
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
        """Return the context-parallel ranks, among which each sequence is divided; None: it is not divided."""
        layout = spec.layout
        if layout.cp == 1:
            return None
        axes = init_device_mesh(spec.device.type, layout.shape, mesh_dim_names=AXES)
        kind = context_attention(self.options, spec.cfg, layout)
        return Context(axes.get_group("cp"), kind, compiled=spec.cfg.train.compile is not False)

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        (model,) = self.parts
        if isinstance(model, FSDPModule):
            if not self.options.reshard_after_forward:
                model.set_requires_gradient_sync(last)
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
        return self.forward_losses(batch).mean()

    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
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
        """Return the context of forward passes: autocast only if a loss needs it, since FSDP casts the weights."""
        if self.layout.tp == 1 and not all(part.computes_losses_in_fp32 for part in self.parts):
            return super().forward_context()
        return self._loss_context()

    def _loss_context(self) -> AbstractContextManager[None]:
        """Return the context in which cross entropy accepts logits sharded by vocabulary."""
        return loss_parallel() if self.layout.tp > 1 else nullcontext()

    def complete_gradients(self) -> None:
        """Finish reducing the gradients after the backward passes."""
        if self.layout.tp > 1 and not self.sharded:
            reduce_gradients(self.parameters)

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradient shards."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def total_norm(self) -> Tensor:
        return total_norm(self.gradients(), self.mesh, self.device, self.experts_mesh)

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
        return [self.mesh.get_group(axis) for axis in ("replicate", "shard", "tp") if self.mesh[axis].size() > 1]

    def model_state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Reshard the weights, which an evaluation may have left gathered, and return them."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().model_state(once=once)


@dataclass(frozen=True)
class Splitter:
    """Builds models, or stages of one, sharded over ``mesh``."""

    spec: BackendSpec
    mesh: DeviceMesh
    options: FSDPConfig
    experts_mesh: DeviceMesh | None = None
    """The mesh of the experts, if ranks divide them."""

    @property
    def sharded(self) -> bool:
        """Whether ``fully_shard`` is used.

        It is not used with one rank along its axes, where it takes 10 % more time for nothing, nor with zero-bubble
        schedules: it misses weight gradients that are computed after the activation gradients (torch 2.13).
        """
        return self.spec.layout.dp * self.spec.layout.cp > 1 and not self.options.zero_bubble

    def build(self, layers: Sequence[int] | None = None) -> Model:
        """Return this rank's shards of the model, or of the pipeline stage with the blocks ``layers``.

        Blocks are initialized, split for tensor parallelism and sharded one by one, so that no rank ever holds more
        than its shards and one block (or the embedding).

        Args:
            layers: numbers of the blocks; None: all.
        """
        spec = self.spec
        model: Model = spec.make_model() if layers is None else spec.make_model(layers=layers)
        inner, part = model.inner_models(), part_of("model", spec.cfg.model)
        if inner and (spec.layout.tp > 1 or spec.layout.pp > 1):
            raise ConfigError(
                f"{part}: {', '.join(name[:-1] for name in inner)} is another model inside "
                f"of it, which train.backend={spec.cfg.train.backend} cannot divide: use train.backend=DDP or FSDP",
                page="extend/model.md#a-teacher-or-a-reference",
            )
        if self.sharded:
            check_shared(model)
        plan = model.tensor_parallel_plan() if spec.layout.tp > 1 else {}
        inside = {name.removeprefix("blocks.*."): style for name, style in plan.items() if name.startswith("blocks.")}
        outside = {name: style for name, style in plan.items() if not name.startswith("blocks.")}
        options = compile_options(spec.device, spec.layout)
        for at, (name, block) in enumerate(model.named_blocks().items()):
            self._fill(model, block, f"{name}.")
            self._split(block, inside)
            if self.experts_mesh is not None:
                for experts in [module for module in block.modules() if isinstance(module, Experts)]:
                    self._divide(experts, self.experts_mesh)
            key = name.rpartition(".")[2]
            prepare_block(block, int(key) if key.isdecimal() else at, spec.cfg, options)
            if self.sharded:
                self._shard(block, self.mesh)
        for prefix, each in inner.items():
            self._build_inner(model, each, prefix)
        for prefix, module in model.outside_blocks():
            self._fill(model, module, prefix, recurse=False)
        model.tie()
        self._split(model, {name: style for name, style in outside.items() if hasattr(model, name.partition(".")[0])})
        model.tie()  # splitting untied the parameters
        prepare_rest(model, spec.cfg, options)
        if self.sharded:
            # Inputs are left to autocast, which does not cast the targets of a loss.
            self._shard(model, self.mesh, casts=model.computes_losses_in_fp32)
            self._prefetch([block for block in model.named_blocks().values() if isinstance(block, FSDPModule)])
            if part.origin:  # its ``losses`` may first call a block or an inner model
                torch_private.make_root(model)
        elif spec.dtype != torch.float32:
            model.forward = torch.autocast(spec.device.type, dtype=spec.dtype)(model.forward)  # type: ignore[method-assign]
        return model

    def _build_inner(self, model: Model, inner: Model, prefix: str) -> None:
        """Fill and shard a model inside of ``model``, so that ``losses`` can also call it outside of ``forward``.

        Args:
            model: the complete model.
            inner: one of its ``inner_models``, or one inside of them.
            prefix: prefix of its parameters' names in the complete model.
        """
        for at, each in inner.inner_models().items():
            self._build_inner(model, each, prefix + at)
        for name, block in inner.named_blocks().items():
            self._fill(model, block, f"{prefix}{name}.")
            if self.sharded:
                self._shard(block, self.mesh)
        for at, module in inner.outside_blocks():
            self._fill(model, module, prefix + at, recurse=False)
        inner.tie()
        if self.sharded:
            self._shard(inner, self.mesh, casts=inner.computes_losses_in_fp32)

    def _fill(self, model: Model, module: nn.Module, prefix: str, *, recurse: bool = True) -> None:
        module.to_empty(device=self.spec.device, recurse=recurse)
        model.initialize(self.spec.cfg.train.seed, module, prefix, recurse=recurse)

    def _split(self, module: nn.Module, plan: dict[str, Any]) -> None:
        if plan:
            parallelize(module, self.mesh["tp"], plan)

    def _divide(self, experts: Experts, mesh: DeviceMesh) -> None:
        """Keep this rank's experts, sharded over the ranks that have the same ones."""
        for layer in (experts.gate, experts.up, experts.proj):
            mine = distribute_tensor(layer.weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            layer.weight = nn.Parameter(mine)
        experts.divide_experts(Exchange(mesh.get_group("ep"), mesh["ep"].size()))
        self._shard(experts, mesh, "expert_shard")
        torch_private.hide_hooks(experts)

    def _shard(self, module: nn.Module, mesh: DeviceMesh, axis: str = "shard", *, casts: bool = True) -> None:
        spec, options = self.spec, self.options
        mesh = mesh["replicate", axis] if spec.layout.replicate > 1 else mesh[axis]
        precision, offload = MixedPrecisionPolicy(), OffloadPolicy()
        if spec.dtype != torch.float32:
            precision = MixedPrecisionPolicy(spec.dtype, TORCH_DTYPES[options.reduce_dtype], cast_forward_inputs=casts)
        if options.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=spec.device.type != "cpu")
        reshard = options.reshard_after_forward
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
        if spec.device.type == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo in torch 2.8 sums instead of averaging

    def _prefetch(self, blocks: list[FSDPModule]) -> None:
        """Make each block prefetch the parameters of the next blocks, with their experts, in both passes."""
        count = self.options.prefetch
        units = [[unit for unit in block.modules() if isinstance(unit, FSDPModule)] for block in blocks]  # type: ignore[attr-defined]
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch([*chain(*units[i + 1 : i + 1 + count])])
            block.set_modules_to_backward_prefetch([*chain(*units[max(0, i - count) : i][::-1])])


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    """Shard the parameters of ``module`` over ``mesh`` as ``plan`` says, and communicate around its modules.

    All ranks must have drawn the same values: each keeps its own shard, and nothing is sent.
    """
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for child in module.modules():
        for name, parameter in [*child.named_parameters(recurse=False)]:
            if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:  # not one that fully_shard has sharded
                _release_complete(child, name, parameter)


def _release_complete(module: nn.Module, name: str, parameter: DTensor) -> None:
    """Copy a shard that keeps the memory of the complete parameter, as shards of rows do with torch 2.8."""
    mine = parameter.to_local().detach()
    if mine.untyped_storage().nbytes() > mine.nbytes:
        copied = DTensor.from_local(
            mine.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        setattr(module, name, nn.Parameter(copied, requires_grad=parameter.requires_grad))


def check_shared(model: Model) -> None:
    """Raise a ConfigError if modules of ``model`` that are sharded separately share a parameter: it would be untied."""
    seen: dict[int, tuple[str, str]] = {}
    inner = model.inner_models()
    for at, module in model.named_modules():  # of a module with two names, the first one
        prefix = next((each for each in inner if f"{at}.".startswith(each)), "")
        unit = prefix + (inner[prefix] if prefix else model).block_of(at.removeprefix(prefix))
        for name, parameter in module.named_parameters(at, recurse=False, remove_duplicate=False):
            other, first = seen.setdefault(id(parameter), (unit, name))
            if unit != other:
                raise ConfigError(
                    f"{type(model).__name__}.{first} and {name} are the same parameter, but blocks are sharded one by "
                    "one: use train.backend=DDP, or give the blocks another name, so that the model is sharded as a "
                    "whole"
                )


def reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients to their parameters' placements, as ``fully_shard`` would.

    Autograd leaves gradients of norms as partial sums over each rank's tokens, and embedding gradients unsharded.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
