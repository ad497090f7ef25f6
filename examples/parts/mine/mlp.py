import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from wordrun.config import ModelConfig


@dataclass
class MLPConfig(ModelConfig):
    """Two linear layers that classify images."""

    divides: ClassVar[tuple[str, ...]] = ("tp",)  # 1. that it can be divided
    name: str = "mlp"
    hidden: int = 256
    """Hidden units."""

    def tensor_parallel_options(self):
        return ["hidden"]  # 2. the options that backend.tp must divide


class MLP(nn.Module):
    def __init__(self, cfg, shape, classes):  # data=digits has shape [1, 8, 8] and 10 classes
        super().__init__()
        self.up = nn.Linear(math.prod(shape), cfg.hidden)
        self.down = nn.Linear(cfg.hidden, classes)

    def forward(self, images):
        return self.down(F.relu(self.up(images.flatten(1))))

    def losses(self, batch):
        return F.cross_entropy(self(batch.inputs), batch.targets, reduction="none")

    def tensor_parallel_plan(self):  # 3. how: a style of torch's for each module
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
