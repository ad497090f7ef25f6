"""Clips the gradients of a step by their norm over the full model (optimizer.grad_clip)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from wordrun.backend.sharded_tensors import local
from wordrun.dist import torch_private


def clip(parameters: Sequence[Tensor], norm: Tensor, most: float) -> None:
    """Scale down this rank's gradient shards if the ``norm`` of all gradients exceeds ``most``.

    On an accelerator, gradients are multiplied in every step, by 1 if no clipping is needed: reading the norm on the
    host would mean waiting for the device.
    """
    if norm.device.type == "cpu" and not norm > most:
        return
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for device in {shard.device for shard in shards}:
        torch_private.scale([shard for shard in shards if shard.device == device], factor.to(device))


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
