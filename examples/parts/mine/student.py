import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import wordrun
from wordrun.config import ModelConfig


@dataclass
class StudentConfig(ModelConfig):
    """A linear layer that learns to classify images, and from the logits of a trained model."""

    name: str = "student"
    teacher: str = "teacher"
    """Run directory of the trained model."""
    weight: float = 0.5
    """Weight of the teacher's part of the loss."""


class Student(nn.Module):
    def __init__(self, cfg, shape, classes):
        super().__init__()
        self.weight = cfg.weight
        self.head = nn.Linear(math.prod(shape), classes)
        self.teacher = wordrun.load(cfg.teacher).requires_grad_(False)

    def forward(self, images):
        return self.head(images.flatten(1))

    def losses(self, batch):
        wanted, logits = self.teacher(batch.inputs).softmax(1), self(batch.inputs)
        own = F.cross_entropy(logits, batch.targets, reduction="none")
        return (1 - self.weight) * own + self.weight * F.cross_entropy(logits, wanted, reduction="none")
