"""Optimizers: each is a function of its options and the named parameters, with a line in ``wordrun.parts``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

from wordrun.config import AdamWConfig, OptimizerConfig, SGDConfig

Named = Iterable[tuple[str, Parameter]]


def adamw(cfg: AdamWConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over ``parameters``, fused if the device supports it."""
    groups = decay_groups(cfg, parameters)
    fused = all(p.device.type in ("cpu", "cuda", "xpu", "mps") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)


def sgd(cfg: SGDConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return stochastic gradient descent over ``parameters``; the weight decay is added to the gradients."""
    groups = decay_groups(cfg, parameters)
    return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum, nesterov=cfg.nesterov)


def decay_groups(cfg: OptimizerConfig, parameters: Named) -> list[dict[str, Any]]:
    """Return two groups of parameters: matrices, with weight decay, and vectors, without."""
    parameters = list(parameters)
    return [
        {"params": [p for _, p in parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for _, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
