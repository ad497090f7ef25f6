"""A line through points (docs/tasks.md): a model, its data and a metric."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from wordrun.config import DataConfig, ModelConfig
from wordrun.data.examples import Splits


@dataclass
class LineConfig(ModelConfig):
    """A line through points."""

    name: str = "line"
    bias: bool = True
    """Whether the line can miss the origin."""


class Line(nn.Module):
    def __init__(self, cfg, inputs):
        super().__init__()
        self.layer = nn.Linear(inputs, 1, bias=cfg.bias)

    def forward(self, x):
        return self.layer(x)[:, 0]

    def losses(self, batch):
        return (self(batch.inputs) - batch.targets).square()


@dataclass
class PointsConfig(DataConfig):
    """Points on a line."""

    slope: float = 3.0
    """Slope of the line."""


def points(options):
    x = torch.linspace(-1, 1, 1000)[:, None]
    y = options.slope * x[:, 0] + 1
    held_out = torch.arange(1000) % 10 == 0
    train, val = (TensorDataset(x[part], y[part]) for part in (~held_out, held_out))
    return Splits(train, val, {"inputs": 1})


def absolute_error(options, outputs, batch):
    return (outputs - batch.targets).abs()
