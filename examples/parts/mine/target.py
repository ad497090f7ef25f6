from dataclasses import dataclass

from wordrun.config import HookConfig
from wordrun.train.hooks import Hook


@dataclass
class TargetConfig(HookConfig):
    """End the run when the validation loss is low enough."""

    val_loss: float = 1.0
    """The loss to reach, in nats per token."""


class Target(Hook):
    def __init__(self, options):
        self.options, self.reached = options, False

    def after_step(self, trainer):
        self.reached = trainer.metrics.get("val_loss", float("inf")) <= self.options.val_loss

    def stop_reason(self):
        return "the target is reached" if self.reached else ""
