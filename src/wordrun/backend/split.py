"""Builds a model sharded over the ranks, without ever holding it unsharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from wordrun.backend.base import BackendSpec
from wordrun.backend.options import FSDPConfig
from wordrun.backend.precision import TORCH_DTYPES
from wordrun.backend.tensors import local
from wordrun.backend.transforms import compile_options, prepare_block, prepare_rest
from wordrun.common.errors import ConfigError
from wordrun.dist import torch_private
from wordrun.model.base import Model
from wordrun.model.exchange import Exchange
from wordrun.model.moe import Experts


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
        """Whether ``fully_shard`` is used: not with one rank along its axes, where it would be 10% slower.

        Nor with zero-bubble schedules: it misses weight gradients computed after activation gradients (torch 2.13).
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
        if self.sharded:
            check_shared(model)
        plan = model.tensor_parallel_plan() if spec.layout.tp > 1 else {}
        inside = {name.removeprefix("blocks.*."): style for name, style in plan.items() if name.startswith("blocks.")}
        outside = {name: style for name, style in plan.items() if not name.startswith("blocks.")}
        options = compile_options(spec.device, spec.layout)
        for at, (key, block) in enumerate(model.blocks.named_children()):
            self._fill(model, block, f"blocks.{key}.")
            self._split(block, inside)
            if self.experts_mesh is not None:
                for experts in [module for module in block.modules() if isinstance(module, Experts)]:
                    self._divide(experts, self.experts_mesh)
            prepare_block(block, int(key) if key.isdecimal() else at, spec.cfg, options)
            if self.sharded:
                self._shard(block, self.mesh)
        for name, child in model.named_children():
            if child is not model.blocks:
                self._fill(model, child, f"{name}.")
        self._fill(model, model, "", recurse=False)
        model.tie()
        self._split(model, {name: style for name, style in outside.items() if hasattr(model, name.partition(".")[0])})
        model.tie()  # splitting untied the parameters
        prepare_rest(model, spec.cfg, options)
        if self.sharded:
            # Autocast casts what needs it, and leaves the targets of a loss as they are.
            self._shard(model, self.mesh, casts=model.computes_losses_in_fp32)
            self._prefetch([block for block in model.blocks.children() if isinstance(block, FSDPModule)])
        elif spec.dtype != torch.float32:
            model.forward = torch.autocast(spec.device.type, dtype=spec.dtype)(model.forward)  # type: ignore[method-assign]
        return model

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
            if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:  # not what fully_shard has sharded
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
    """Raise a ConfigError if parts of ``model`` that are sharded one by one share a parameter, which would untie it."""
    seen: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        other, first = seen.setdefault(id(parameter), (unit, name))
        if unit != other:
            raise ConfigError(
                f"{type(model).__name__}.{first} and {name} are the same parameter, but blocks are sharded one by one: "
                "use train.backend=DDP, or give the blocks another name"
            )


def reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients to their parameters' placements, as ``fully_shard`` would.

    Autograd leaves gradients of norms as partial sums over each rank's tokens, and embedding gradients unsharded.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def total_norm(
    gradients: Sequence[torch.Tensor], mesh: DeviceMesh, device: torch.device, experts_mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Return the gradient norm of the full model, the same on every rank.

    Args:
        gradients: this rank's shards; each gradient is included by one pipeline stage only.
        mesh: mesh of all ranks.
        device: device used for communication.
        experts_mesh: mesh of the experts, if ranks divide them.
    """
    shards: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        axes: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(axis for axis, at in zip(names, gradient.placements, strict=True) if not at.is_replicate())
        shards.setdefault(axes, []).append(local(gradient))
    total = torch.zeros((), device=device)
    # In the same order on every rank, even where some of these kinds are missing.
    of_experts = [("expert_shard", "ep")] if experts_mesh else []
    for axes in (*of_experts, ("shard", "tp"), ("shard",), ("tp",), ()):
        over = experts_mesh if axes in of_experts and experts_mesh else mesh
        # Without tensors, torch returns the norm on the CPU, and copying it would wait for the device.
        squares = nn.utils.get_total_norm(shards[axes]).to(device) ** 2 if axes in shards else torch.zeros_like(total)
        for axis in axes:
            if over[axis].size() > 1:
                dist.all_reduce(squares, group=over.get_group(axis))
        total += squares
    if mesh["pp"].size() > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()
