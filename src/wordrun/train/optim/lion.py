"""Lion (Chen et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch

from wordrun.backend.param_groups import Named
from wordrun.train.optim.options import LionConfig
from wordrun.train.optim.weight_decay import decay_groups


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
