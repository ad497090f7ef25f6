"""Hooks: classes whose methods the trainer calls between steps, on every rank."""

from wordrun.train.training import Hook, Training

__all__ = ["Hook", "Training"]
