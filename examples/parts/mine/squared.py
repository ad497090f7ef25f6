from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from wordrun.config import GPTConfig
from wordrun.model import GPT
from wordrun.model.block import Block
from wordrun.model.gpt import Attention


@dataclass
class SquaredConfig(GPTConfig):
    """A GPT whose MLPs use the square of ReLU."""

    expansion: int = 4
    """Hidden units of an MLP, as a multiple of n_embd."""

    def problems(self):
        yield from super().problems()
        if self.expansion < 1:
            yield f"model.expansion={self.expansion} should be at least 1"


class SquaredMLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, cfg.expansion * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(cfg.expansion * cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        return self.proj(F.relu(self.up(x)).square())


class Squared(GPT):
    def new_block(self):
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), SquaredMLP(self.cfg))
