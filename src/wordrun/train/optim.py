"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from wordrun.config import OptimizerConfig


def adamw(cfg: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over ``parameters``, fused, with decay on matrices alone."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda", "xpu", "mps") for p in parameters)
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)


def learning_rate(cfg: OptimizerConfig, step: int, max_iters: int, dp: int = 1) -> float:
    """Return the learning rate of ``step``, which counts from 0: linear warm-up, then half a cosine down to min_lr.

    ``dp`` is the number of data-parallel ranks, with which optimizer.scale_lr lets the highest rate grow: linearly
    (Goyal et al. 2017), or by the square root (Krizhevsky 2014), which suits Adam's normalised steps.
    """
    peak = cfg.learning_rate * {"none": 1, "sqrt": math.sqrt(dp), "linear": dp}[cfg.scale_lr]
    lowest = peak / 10 if cfg.min_lr is None else cfg.min_lr
    end = cfg.lr_decay_iters or max_iters
    if step < cfg.warmup_iters:
        return peak * (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return peak
    done = min(1.0, (step - cfg.warmup_iters) / max(1, end - cfg.warmup_iters))
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * done))
