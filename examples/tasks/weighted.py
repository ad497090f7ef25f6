"""Examples with a weight (docs/tasks.md): a class for batches, a dataset of dicts, and a model that uses weights."""

from dataclasses import dataclass

import torch
from line import Line, LineConfig, PointsConfig
from torch import Tensor

from wordrun.data.batch import TensorBatch
from wordrun.data.examples import Splits


@dataclass(frozen=True)
class Weighted(TensorBatch):
    x: Tensor
    y: Tensor
    weight: Tensor


class WeightedPoints:
    def __init__(self, x, slope):
        self.x, self.slope = x, slope

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.slope * self.x[i, 0] + 1, "weight": 1.0 if i % 2 else 0.5}


@dataclass
class WeightedConfig(PointsConfig):
    """Points on a line, every other one with half the weight."""


def points(options):
    x = torch.linspace(-1, 1, 1000)[:, None]
    train, val = (WeightedPoints(x[part::2], options.slope) for part in (0, 1))
    return Splits(train, val, {"inputs": 1}, batch=Weighted)


@dataclass
class WeightedLineConfig(LineConfig):
    """A line through weighted points."""

    name: str = "weighted_line"


class WeightedLine(Line):
    def losses(self, batch):
        return batch.weight * (self(batch.x) - batch.y).square()
