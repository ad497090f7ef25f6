"""Build a model that is sharded over ranks, without ever holding it unsharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from wordrun import compat
from wordrun.backend.base import BackendSpec
from wordrun.backend.native import prepare_block
from wordrun.backend.precision import TORCH_DTYPES
from wordrun.config import FSDPConfig
from wordrun.dist.mesh import AXES, Layout
from wordrun.model import Model


def device_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return torch's mesh of all ranks, with the names of ``AXES``; every rank must call this."""
    return init_device_mesh(device.type, layout.shape, mesh_dim_names=AXES)


@dataclass(frozen=True)
class Splitter:
    """Builds models, or stages of one, sharded over ``mesh``."""

    spec: BackendSpec
    mesh: DeviceMesh
    options: FSDPConfig

    @property
    def sharded(self) -> bool:
        """Whether ``fully_shard`` is used: not for one data-parallel rank, where it would cost a tenth of the speed.

        It misses gradients of weights that come later than those of activations (torch 2.13), as in zero bubbles.
        """
        return self.spec.layout.dp > 1 and not self.options.zero_bubble

    def build(self, layers: Sequence[int] | None = None) -> Model:
        """Return this rank's shards of the model, or of the stage with the blocks ``layers``.

        Blocks are initialised, split for tensor parallelism and sharded one by one, so that no rank ever holds more
        than its shards and one block (or the embedding).

        Args:
            layers: numbers of the blocks; None: all.
        """
        spec = self.spec
        model: Model = spec.make_model() if layers is None else spec.make_model(layers=layers)
        plan = model.tensor_parallel_plan() if spec.layout.tp > 1 else {}
        inside = {name.removeprefix("blocks.*."): style for name, style in plan.items() if name.startswith("blocks.")}
        outside = {name: style for name, style in plan.items() if not name.startswith("blocks.")}
        for number, block in model.blocks.items():
            self._fill(model, block, f"blocks.{number}.")
            self._split(block, inside)
            prepare_block(block, int(number), spec.cfg)
            if self.sharded:
                self._shard(block)
        for name, child in model.named_children():
            if child is not model.blocks:
                self._fill(model, child, f"{name}.")
        self._fill(model, model, "", recurse=False)
        model.tie()
        self._split(model, {name: style for name, style in outside.items() if hasattr(model, name)})
        model.tie()  # splitting has made two parameters of it again
        if self.sharded:
            self._shard(model)
            self._prefetch(list(model.blocks.values()))
        elif spec.dtype != torch.float32:
            model.forward = torch.autocast(spec.device.type, dtype=spec.dtype)(model.forward)  # type: ignore[method-assign]
        return model

    def _fill(self, model: Model, module: nn.Module, prefix: str, *, recurse: bool = True) -> None:
        module.to_empty(device=self.spec.device, recurse=recurse)
        model.initialise(self.spec.cfg.train.seed, module, prefix, recurse=recurse)

    def _split(self, module: nn.Module, plan: dict[str, Any]) -> None:
        if plan:
            # Every rank has drawn the same values and takes its own shard of them: nothing has to be sent.
            parallelize_module(module, self.mesh["tp"], plan, src_data_rank=None)

    def _shard(self, module: nn.Module) -> None:
        low = self.spec.dtype != torch.float32
        fully_shard(
            module,
            mesh=self.mesh["replicate", "shard"] if self.spec.layout.replicate > 1 else self.mesh["shard"],
            reshard_after_forward=self.options.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self.spec.dtype if low else None,
                reduce_dtype=TORCH_DTYPES[self.options.reduce_dtype] if low else None,
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=self.spec.device.type != "cpu")
            if self.options.cpu_offload
            else OffloadPolicy(),
        )

    def _prefetch(self, blocks: list[nn.Module]) -> None:
        """Let each block prefetch the parameters of the next ones, in both directions."""
        ahead = self.options.prefetch
        for i, block in enumerate(blocks):
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(_sharded(blocks[i + 1 : i + 1 + ahead]))
            block.set_modules_to_backward_prefetch(_sharded(blocks[max(0, i - ahead) : i][::-1]))


def _sharded(blocks: list[nn.Module]) -> list[FSDPModule]:
    return [block for block in blocks if isinstance(block, FSDPModule)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; all ranks that hold shards of it must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give gradients the placements of their parameters, which ``fully_shard`` does by itself.

    Autograd leaves those of norms as partial sums over each rank's tokens, and those of an embedding unsharded.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def total_norm(gradients: Sequence[torch.Tensor], mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the norm of the gradients of the full model, the same on every rank.

    Args:
        gradients: this rank's shards; each gradient of the model belongs to one stage of the pipeline.
        mesh: of all ranks.
        device: the one that communicates.
    """
    shards: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        axes: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(axis for axis, at in zip(names, gradient.placements, strict=True) if not at.is_replicate())
        shards.setdefault(axes, []).append(local(gradient))
    total = torch.zeros((), device=device)
    # The same order on every rank, whichever kinds it has.
    for axes in (("shard", "tp"), ("shard",), ("tp",), ()):
        squares = torch.zeros((), device=device)
        if axes in shards:
            squares += (nn.utils.get_total_norm(shards[axes]).to(device)) ** 2
        for axis in axes:
            if mesh[axis].size() > 1:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total += squares
    if mesh["pp"].size() > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, most: float) -> None:
    """Scale down the gradients, this rank's shards, so that their ``norm`` is at most ``most``."""
    shards = [local(gradient) for gradient in gradients]
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for device in {shard.device for shard in shards}:
        compat.scale([shard for shard in shards if shard.device == device], factor.to(device))
