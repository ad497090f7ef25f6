"""The wrapper of ``compat`` for tensor parallelism: where versions of torch's ``parallelize_module`` differ.

Tried with torch 2.8, 2.9, 2.10 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    """Shard the parameters of ``module`` over ``mesh`` as ``plan`` says, and communicate around its modules.

    All ranks must have drawn the same values: each keeps its own shard, and nothing is sent.
    """
    tell_tables_apart()
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for child in module.modules():
        for name, parameter in [*child.named_parameters(recurse=False)]:
            if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:  # not what fully_shard has sharded
                _release_complete(child, name, parameter)


def tell_tables_apart() -> None:
    """Let the gradients of embedding tables of several sizes be sharded.

    torch remembers by the shapes of an operation's tensors how it is sharded. The gradient of an embedding table also
    depends on a number, the table's rows, which torch 2.8 to 2.10 ignore: the second table's gradient gets the rows of
    the first. Version 2.13 does not need it; without the private names, nothing happens.
    """
    operation = torch.ops.aten.embedding_dense_backward.default
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        propagator = DTensor._op_dispatcher.sharding_propagator
        known = propagator.op_to_schema_info
    except (ImportError, AttributeError):
        return
    if operation not in {*known, *getattr(propagator, "op_to_schema_info_for_single_dim_strategy", ())}:
        known[operation] = RuntimeSchemaInfo(static_argnum=2)


def _release_complete(module: nn.Module, name: str, parameter: DTensor) -> None:
    """Copy a shard that keeps the memory of the complete parameter, as shards of rows do with torch 2.8."""
    mine = parameter.to_local().detach()
    if mine.untyped_storage().nbytes() > mine.nbytes:
        copied = DTensor.from_local(
            mine.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        setattr(module, name, nn.Parameter(copied, requires_grad=parameter.requires_grad))
