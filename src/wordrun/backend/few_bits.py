"""Averages tensors over ranks in 8 or 4 bits per element.

Each rank sends every other one a part of its tensor, averages the parts that it receives, and sends the mean to all.
Both times, a block of elements is sent as integers and one fp32 scale, its largest element divided by the largest
integer. So an element is off by at most half the block's scale in each of the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wordrun.config import EXCHANGE_BLOCK as BLOCK

MOST = {8: 127, 4: 7}
"""The largest integer, by the number of bits."""


def mean_in_bits(flat: Tensor, bits: int, group: Any) -> Tensor:
    """Return the mean of ``flat`` (N,) over the ranks of ``group``, the same on all of them."""
    ranks = dist.get_world_size(group)
    part = -(-len(flat) // (ranks * BLOCK)) * BLOCK
    mine = pack(F.pad(flat, (0, ranks * part - len(flat))).view(ranks, part), bits)
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine, group=group)
    mean = pack(unpack(received, bits).mean(0, keepdim=True), bits)
    found = [torch.empty_like(mean) for _ in range(ranks)]
    dist.all_gather(found, mean, group=group)
    return unpack(torch.cat(found), bits).flatten()[: len(flat)]


def pack(rows: Tensor, bits: int) -> Tensor:
    """Return each of ``rows`` (R, N), N a multiple of ``BLOCK``, as bytes: the integers, then the scales."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / MOST[bits]
    rounded = (blocks / torch.where(scales == 0, 1, scales)).round().clamp(-MOST[bits], MOST[bits])
    integers = (rounded + 128 if bits == 8 else rounded + 8).to(torch.uint8).flatten(1)
    if bits == 4:
        integers = integers[:, ::2] | integers[:, 1::2] << 4
    return torch.cat([integers, scales.flatten(1).contiguous().view(torch.uint8)], 1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the rows that ``pack`` packed, in fp32."""
    count = packed.shape[1] * 8 // (BLOCK * bits + 32)
    integers, scales = packed[:, : count * BLOCK * bits // 8], packed[:, count * BLOCK * bits // 8 :]
    if bits == 4:
        integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1)
    rounded = integers.view(len(packed), count, BLOCK).float() - (128 if bits == 8 else 8)
    return (rounded * scales.contiguous().view(torch.float32).view(len(packed), count, 1)).flatten(1)
