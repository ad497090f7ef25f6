"""Build a model whose parameters are shared among ranks, without ever holding it whole."""

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

from wordrun.backend.base import Job
from wordrun.backend.native import prepare_block
from wordrun.backend.precision import TORCH_DTYPES
from wordrun.config import ZERO_BUBBLE, FSDPConfig, PPConfig
from wordrun.dist.mesh import AXES, Layout
from wordrun.model import Transformer, outline


def device_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return torch's mesh of all ranks, with the names of ``AXES``; every rank must call this."""
    return init_device_mesh(device.type, layout.shape, mesh_dim_names=AXES)


@dataclass(frozen=True)
class Splitter:
    """Splits models, or the parts of one, over ``mesh``."""

    job: Job
    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype
    options: FSDPConfig

    @property
    def sharded(self) -> bool:
        """Whether ``fully_shard`` is at work: not where there is nobody to share with, which would cost a tenth.

        It misses gradients of weights that come later than those of activations (torch 2.13), as in zero bubbles.
        """
        zero_bubble = isinstance(self.options, PPConfig) and self.options.schedule in ZERO_BUBBLE
        return self.job.layout.dp > 1 and not zero_bubble

    def build(self, layers: Sequence[int] | None = None) -> Transformer:
        """Return the model, or the part of it with the blocks ``layers``: this rank's share of it.

        One block after the other gets its values, is cut for tensor parallelism and then sharded, so that no rank
        ever holds more than its share and one block (or the embedding).

        Args:
            layers: numbers of the blocks; None: all.
        """
        cfg = self.job.cfg
        model = outline(cfg.model, self.job.vocab_size, layers)
        plan = model.tensor_parallel_plan() if self.job.layout.tp > 1 else {}
        inside = {name.removeprefix("blocks.*."): style for name, style in plan.items() if name.startswith("blocks.")}
        outside = {name: style for name, style in plan.items() if not name.startswith("blocks.")}
        for number, block in model.blocks.items():
            self._fill(model, block, f"blocks.{number}.")
            self._cut(block, inside)
            prepare_block(block, int(number), cfg)
            if self.sharded:
                self._shard(block)
        for name, child in model.named_children():
            if child is not model.blocks:
                self._fill(model, child, f"{name}.")
        model.tie()
        self._cut(model, {name: style for name, style in outside.items() if hasattr(model, name)})
        model.tie()  # cutting has made two of it again
        if self.sharded:
            self._shard(model)
            self._prefetch(list(model.blocks.values()))
        elif self.dtype != torch.float32:
            model.forward = torch.autocast(self.device.type, dtype=self.dtype)(model.forward)  # type: ignore[method-assign]
        return model

    def _fill(self, model: Transformer, module: nn.Module, prefix: str) -> None:
        module.to_empty(device=self.device)
        model.initialise(self.job.cfg.train.seed, module, prefix)

    def _cut(self, module: nn.Module, plan: dict[str, Any]) -> None:
        if plan:
            # Every rank has drawn the same values and can cut its own piece out of them: nothing has to be sent.
            parallelize_module(module, self.mesh["tp"], plan, src_data_rank=None)

    def _shard(self, module: nn.Module) -> None:
        low = self.dtype != torch.float32
        fully_shard(
            module,
            mesh=self.mesh["replicate", "shard"] if self.job.layout.replicate > 1 else self.mesh["shard"],
            reshard_after_forward=self.options.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self.dtype if low else None,
                reduce_dtype=TORCH_DTYPES[self.options.reduce_dtype] if low else None,
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
            if self.options.cpu_offload
            else OffloadPolicy(),
        )

    def _prefetch(self, blocks: list[nn.Module]) -> None:
        """Let each block gather the parameters of those that come next, in both directions."""
        ahead = self.options.prefetch
        for i, block in enumerate(blocks):
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(_sharded(blocks[i + 1 : i + 1 + ahead]))
            block.set_modules_to_backward_prefetch(_sharded(blocks[max(0, i - ahead) : i][::-1]))


def _sharded(blocks: list[nn.Module]) -> list[FSDPModule]:
    return [block for block in blocks if isinstance(block, FSDPModule)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor put together from all ranks' pieces; those that share it must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def settle(parameters: Sequence[nn.Parameter]) -> None:
    """Cut gradients as their parameters are cut, which ``fully_shard`` does by itself.

    Autograd leaves those of norms as sums that each rank has its tokens' part of, and those of an embedding whole.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def total_norm(gradients: Sequence[torch.Tensor], mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients of the whole model together, on every rank the same.

    Args:
        gradients: this rank's pieces; each gradient of the model is counted by one stage of the pipeline.
        mesh: of all ranks.
        device: the one that communicates.
    """
    pieces: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        axes: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(axis for axis, at in zip(names, gradient.placements, strict=True) if not at.is_replicate())
        pieces.setdefault(axes, []).append(local(gradient))
    total = torch.zeros((), device=device)
    # The same order on every rank, whichever kinds it has.
    for axes in (("shard", "tp"), ("shard",), ("tp",), ()):
        squares = torch.zeros((), device=device)
        if axes in pieces:
            squares += (nn.utils.get_total_norm(pieces[axes]).to(device)) ** 2
        for axis in axes:
            if mesh[axis].size() > 1:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total += squares
    if mesh["pp"].size() > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, most: float) -> None:
    """Scale the gradients, this rank's pieces, down so that their ``norm`` is at most ``most``."""
    pieces = [local(gradient) for gradient in gradients]
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for device in {piece.device for piece in pieces}:
        torch._foreach_mul_([piece for piece in pieces if piece.device == device], factor.to(device))
