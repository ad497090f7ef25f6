from dataclasses import dataclass

import torch
import torch.distributed as dist

from wordrun.backend import TorchBackend, prepare
from wordrun.config import BackendConfig
from wordrun.model import materialize


@dataclass
class PlainConfig(BackendConfig):
    """Gradients averaged one by one after the backward pass."""

    compress: bool = False
    """Send gradients in bf16."""


class PlainBackend(TorchBackend):
    def __init__(self, spec):
        model = materialize(spec.make_model(), spec.cfg.train.seed, spec.device)
        prepare(model, spec.cfg)  # activation checkpointing, torch.compile
        super().__init__(spec, [model])
        self.options = spec.cfg.backend

    def micro_step(self, batch, *, last):
        return self.forward_losses(batch).mean()  # in the run's precision

    def complete_gradients(self):
        for parameter in self.parameters:
            sent = parameter.grad.to(torch.bfloat16) if self.options.compress else parameter.grad
            dist.all_reduce(sent)
            parameter.grad.copy_(sent).div_(dist.get_world_size())
