"""Metrics that evaluations report as val_NAME: functions of their options, a model's outputs, and a batch.

Each returns a value for every example, (B,); the mean over all validation examples of all ranks is reported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wordrun.config import MetricConfig, TopKConfig


def accuracy(options: MetricConfig, outputs: Tensor, batch: Any) -> Tensor:
    """Return the share of targets (B, ...) that are the likeliest in ``outputs`` (B, ..., classes)."""
    hits: Tensor = outputs.argmax(-1) == batch.targets
    return hits.float().view(len(hits), -1).mean(1)


def top_k(options: TopKConfig, outputs: Tensor, batch: Any) -> Tensor:
    """Return the share of targets (B, ...) that are among the ``k`` likeliest in ``outputs`` (B, ..., classes)."""
    likeliest = outputs.topk(min(options.k, outputs.shape[-1])).indices
    hits: Tensor = (likeliest == batch.targets[..., None]).any(-1)
    return hits.float().view(len(hits), -1).mean(1)
