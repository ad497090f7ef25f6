"""Optimizers: each is made from its options and the named parameters, and has a line in ``wordrun.parts``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

from wordrun import compat
from wordrun.compat_adamw import AdamW
from wordrun.config import AdamWConfig, LionConfig, OptimizerConfig, SGDConfig

Named = Iterable[tuple[str, Parameter]]


def adamw(cfg: AdamWConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over ``parameters``, fused if the device supports it."""
    groups = decay_groups(cfg, parameters)
    fused = all(compat.has_fused_adamw(p.device) for group in groups for p in group["params"])
    return AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)


def sgd(cfg: SGDConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return stochastic gradient descent over ``parameters``; the weight decay is added to the gradients."""
    groups = decay_groups(cfg, parameters)
    return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum, nesterov=cfg.nesterov)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): steps by the sign of a mean of the gradients."""

    def __init__(self, cfg: LionConfig, parameters: Named) -> None:
        self.beta1, self.beta2 = cfg.beta1, cfg.beta2
        super().__init__(decay_groups(cfg, parameters), {"lr": cfg.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; ``closure`` is not used."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                direction = mean.lerp(p.grad, 1 - self.beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                mean.lerp_(p.grad, 1 - self.beta2)


def decay_groups(cfg: OptimizerConfig, parameters: Named) -> list[dict[str, Any]]:
    """Return groups of parameters: matrices, with weight decay, and vectors, without.

    Experts on other ranks are a third group: with torch 2.8, foreach operations need all tensors on the same mesh.
    """
    parameters = list(parameters)
    experts = [p for _, p in parameters if "ep" in compat.mesh_axes(p)]
    matrices = [p for _, p in parameters if p.dim() >= 2 and "ep" not in compat.mesh_axes(p)]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": [p for _, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [*groups, {"params": experts, "weight_decay": cfg.weight_decay}] if experts else groups
