"""Checkpoints on disk: folders that are whole or not there, written and read by all ranks."""

from wordrun.checkpoint.saved import Saved, find

__all__ = ["Saved", "find"]
