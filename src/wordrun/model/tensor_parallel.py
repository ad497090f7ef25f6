"""Tensor parallelism (``backend.tp``) of a transformer: which matrices ranks divide by columns, and which by rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def plan(block: nn.Module, first_layers: Iterable[str]) -> dict[str, Any]:
    """Return torch's parallel style of each module, by its name.

    As in Megatron-LM (Shoeybi et al. 2019), attention is split by heads, the MLP by hidden units, embedding and
    output layer by vocabulary, and everything in between by tokens (sequence parallelism, Korthikanti et al. 2022).
    Norms of queries and keys work on the heads that a rank has.

    Args:
        block: one of the blocks, which are alike.
        first_layers: names of the layers of a block that read its normalized input; they are divided by columns.
    """
    from torch.distributed.tensor import Replicate, Shard, parallel as tp

    gathered = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    by_head = tp.SequenceParallel(sequence_dim=2, use_local_output=True)
    heads = ("attention.q_norm", "attention.k_norm")
    normed = [name for name, module in block.named_modules() if name in heads and [*module.parameters()]]
    return {
        "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm_1": tp.SequenceParallel(),
        "blocks.*.attention": gathered,
        "blocks.*.attention.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm_2": tp.SequenceParallel(),
        "blocks.*.mlp": gathered,
        "blocks.*.mlp.proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        **{f"blocks.*.{name}": tp.ColwiseParallel() for name in first_layers},
        **{f"blocks.*.{name}": by_head for name in normed},
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
