"""Copies of the buffers that forward passes change, such as BatchNorm's statistics, to undo a forward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class BufferSnapshot:
    """The values of all buffers of ``modules`` at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        named = [(module, name, buffer) for module in modules for name, buffer in module.named_buffers()]
        self._values = [(module, name, buffer.clone()) for module, name, buffer in named]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers these values again."""
        for module, name, value in self._values:
            module.get_buffer(name).copy_(value)
