"""Stochastic gradient descent."""

from __future__ import annotations

import torch

from wordrun.backend.param_groups import Named
from wordrun.train.optim.options import SGDConfig
from wordrun.train.optim.weight_decay import decay_groups


def sgd(cfg: SGDConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return stochastic gradient descent over ``parameters``; the weight decay is added to the gradients."""
    groups = decay_groups(cfg, parameters)
    return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum, nesterov=cfg.nesterov)
