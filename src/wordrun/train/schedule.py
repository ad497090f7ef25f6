"""The learning rate of each step: a linear warm-up, then a schedule.

A schedule is a function, registered in ``config/parts.py``. Its arguments are its options, the steps since the warm-up,
the steps from the warm-up to the end of the decay, and the highest and the lowest learning rate.
"""

from __future__ import annotations

import math
from typing import Any

from wordrun.config.registry import part_of
from wordrun.train.optim.options import OptimizerConfig
from wordrun.train.options import LinearScheduleConfig, ScheduleConfig


def learning_rate(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, max_iters: int, dp: int = 1
) -> float:
    """Return the learning rate of ``step``, which counts from 0.

    ``dp`` is the number of data-parallel ranks. optimizer.scale_lr scales the peak with it: linearly (Goyal et al.
    2017), or by its square root (Krizhevsky 2014), which suits Adam's normalized steps.

    Raises:
        PartError: the schedule is not wordrun's own, and failed.
    """
    peak = optimizer.learning_rate * {"none": 1, "sqrt": math.sqrt(dp), "linear": dp}[optimizer.scale_lr]
    lowest = peak / 10 if optimizer.min_lr is None else optimizer.min_lr
    warmup, end = optimizer.warmup_iters, optimizer.lr_decay_iters or max_iters
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    part = part_of("schedule", schedule)
    with part.blamed(f" at step {step}"):
        return checked_rate(part.load()(schedule, step - warmup, max(1, end - warmup), peak, lowest))


def unfinished_warmup(optimizer: OptimizerConfig, max_iters: int) -> str:
    """Return what to know about a run of ``max_iters`` steps that ends during its warm-up; else an empty string."""
    warmup = optimizer.warmup_iters
    if warmup <= max_iters:
        return ""
    reached = max_iters / (warmup + 1)
    return (
        f"the warm-up takes {warmup} steps (optimizer.warmup_iters), but the run has {max_iters}: the learning rate "
        f"reaches only {reached:.{0 if reached >= 0.1 else 1}%} of its peak; optimizer.warmup_iters={max_iters // 10} "
        "suits a run of this length"
    )


def checked_rate(rate: Any) -> float:
    """Return ``rate`` as a float, or raise a ValueError if it is not a finite number."""
    if not hasattr(rate, "__float__") or not math.isfinite(rate):
        raise ValueError(f"the learning rate is {rate!r}, not a finite number")
    return float(rate)


def cosine(cfg: ScheduleConfig, step: int, steps: int, highest: float, lowest: float) -> float:
    """Return half a cosine from ``highest`` to ``lowest`` (Loshchilov and Hutter 2017)."""
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def linear(cfg: LinearScheduleConfig, step: int, steps: int, highest: float, lowest: float) -> float:
    """Return ``highest``, then a linear decay over the last steps (Hu et al. 2024)."""
    share = 1.0 if cfg.decay_fraction is None else cfg.decay_fraction
    decay = min(cfg.decay_iters or max(1, round(share * steps)), steps)
    done = min(1.0, max(0, step - (steps - decay)) / decay)
    return highest - (highest - lowest) * done


def constant(cfg: ScheduleConfig, step: int, steps: int, highest: float, lowest: float) -> float:
    """Return ``highest``."""
    return highest
