"""The wrapper of ``compat`` for torch's AdamW: a step of this rank's shards, where torch would step sharded tensors.

Tried with torch 2.8 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wordrun import compat
from wordrun.backend.tensors import local


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which gives its operations this rank's shards of parameters, gradients and means.

    The results are the same to the bit. For a sharded tensor, torch works out for each operation and combination of
    shapes how the result is sharded: with 24 blocks under FSDP on two CPU cores, the first step takes 0.28 s instead of
    0.02, and each later one 5 ms instead of 2.5.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        """Fill ``lists`` with the tensors of a step; a version of torch without this method steps sharded tensors."""
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        parameters, gradients, *_ = lists
        gradients[:] = map(_as_sharded, gradients, parameters)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found


def _as_sharded(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return ``gradient`` sharded as ``parameter``; one that is still to be summed over ranks is summed."""
    if (
        not (compat.is_sharded(parameter) and compat.is_sharded(gradient))
        or gradient.placements == parameter.placements
    ):
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)
