"""The hook that sets the options for spikes of the training loss, which every run marks."""

from __future__ import annotations

from wordrun.train.hooks.base import Hook, Training
from wordrun.train.hooks.options import SpikesConfig


class Spikes(Hook):
    """Changes the window and the threshold."""

    def __init__(self, options: SpikesConfig) -> None:
        self.options = options

    def setup(self, trainer: Training) -> None:
        """Replace the default options."""
        trainer.state.mark_spikes(self.options)
