"""Metrics that evaluations report as val_NAME: functions of their options, a model's outputs, and a batch.

Each returns a value for every example, (B,); the mean over all validation examples of all ranks is reported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wordrun.train.options import MetricConfig, TopKConfig


def accuracy(options: MetricConfig, outputs: Tensor, batch: Any) -> Tensor:
    """Return the share of targets (B, ...) that are the likeliest in ``outputs`` (B, ..., classes)."""
    return _share(outputs.argmax(-1) == batch.targets, batch.targets)


def top_k(options: TopKConfig, outputs: Tensor, batch: Any) -> Tensor:
    """Return the share of targets (B, ...) that are among the ``k`` likeliest in ``outputs`` (B, ..., classes)."""
    likeliest = outputs.topk(min(options.k, outputs.shape[-1])).indices
    return _share((likeliest == batch.targets[..., None]).any(-1), batch.targets)


def _share(hits: Tensor, targets: Tensor) -> Tensor:
    """Return the share of ``hits`` among the ``targets`` of each example, (B,); a target of -100 does not count."""
    hits, counted = (each.reshape(len(targets), -1) for each in (hits, targets >= 0))
    return (hits & counted).sum(1) / counted.sum(1).clamp(min=1)
