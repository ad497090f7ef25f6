"""Which parameters have weight decay: matrices do, and vectors (norms and biases) do not."""

from __future__ import annotations

from typing import Any

from wordrun.backend.param_groups import Named
from wordrun.dist import torch_private
from wordrun.train.optim.options import OptimizerConfig


def decay_groups(cfg: OptimizerConfig, parameters: Named) -> list[dict[str, Any]]:
    """Return groups of parameters: matrices, with weight decay, and vectors, without.

    Experts on other ranks are a third group: with torch 2.8, foreach operations need all tensors on the same mesh.
    """
    parameters = list(parameters)
    experts = [p for _, p in parameters if "ep" in torch_private.mesh_axes(p)]
    matrices = [p for _, p in parameters if p.dim() >= 2 and "ep" not in torch_private.mesh_axes(p)]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": [p for _, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [*groups, {"params": experts, "weight_decay": cfg.weight_decay}] if experts else groups
