"""What happens between steps: a hook is a class with methods that the trainer calls, on every rank."""

from wordrun.train.training import Hook, Training

__all__ = ["Hook", "Training"]
