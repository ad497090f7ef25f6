"""What a batch of any kind of examples can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorBatch:
    """A batch of B examples, whose fields are tensors or facts about them; a task's own batches derive from it."""

    def __len__(self) -> int:
        """Return B."""
        return len(next(iter(self.tensors().values())))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Self:
        """Return the batch on ``device``; copies from pinned memory do not block the host."""
        moved = {name: each.to(device, non_blocking=each.is_pinned()) for name, each in self.tensors().items()}
        return replace(self, **moved)

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the batch with what the model multiplies by its weights in ``dtype``, that of the weights.

        Only engines that do not use autocast need this. By default all floating-point tensors are cast.
        """
        cast = {name: each.to(dtype) for name, each in self.tensors().items() if each.is_floating_point()}
        return replace(self, **cast)
