"""Private names of torch and torchvision that wordrun uses, each behind one function.

Tested with torch 2.8 to 2.13. Each function documents how it depends on the version, and its fallback for versions
without the name; tests/unit/test_compat.py then fails and names the function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _python_dispatch

from wordrun.common.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operations whose results selective activation checkpointing saves; one that is renamed is recomputed instead."""
CPU_SHARES_HEADS = torch.__version__ >= "2.9"
"""Whether torch's fused attention on CPUs does grouped-query attention; 2.8 materializes the weights instead."""
COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
"""Modules of torch's collectives; if one is renamed, its errors count as those of the code that calls it."""


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` has been changed in place. No fallback: autograd checks it by this name."""
    return tensor._version


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor; a plain tensor does not import that class, which takes half a second."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a plain copy if the collective that computes it may not have ended.

    If such a tensor is the input of a compiled function, its gradient reaches the DTensor that it came from as a plain
    tensor, and the backward pass fails (seen with torch 2.13).
    """
    if type(tensor) is torch.Tensor:
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.clone() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mesh_axes(tensor: Any) -> tuple[str, ...]:
    """Return the names of the axes of the mesh over which ``tensor`` is divided; none for a plain tensor."""
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_sharded(tensor) else ()


def shard_offset(tensor: Any) -> tuple[int, ...]:
    """Return where this rank's shard of a DTensor begins in the full tensor.

    torch's own checkpoints do the same. There is no fallback: placements of FSDP over tensor
    parallelism are strided, and the arithmetic is torch's.
    """
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def is_strided(placement: Any) -> bool:
    """Return whether a DTensor's placement is strided: it divides what later axes of the mesh have already divided.

    torch's class for this is private. Without the attribute, the shard would be compared with the wrong one, and an
    assertion would fail at the first save.
    """
    return hasattr(placement, "split_factor")


def cpu_is_fast_at_bf16() -> bool:
    """Return whether the processor has instructions for bf16 and oneDNN uses them; False if torch cannot tell.

    Without such instructions, as with ``ONEDNN_MAX_CPU_ISA=AVX2``, products in bf16 take hundreds of times as long.
    """
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    found = any(getattr(torch.cpu, name, bool)() for name in names)
    return found and getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()


def pipeline_step(schedule: Any, *args: Any, **kwargs: Any) -> None:
    """Run a step of a pipeline schedule and discard its outputs, except with torch 2.8, which always keeps them."""
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        kwargs["return_outputs"] = False
    schedule.step(*args, **kwargs)


def pipeline_takes_tensor_parallel() -> bool:
    """Return whether a pipeline's gradients are right if its stages are tensor-parallel.

    They are with torch 2.11 to 2.13. With 2.8 their norm was up to 3 % too high; with 2.9 and 2.10 the step failed.
    """
    return torch.__version__ >= "2.11"  # a TorchVersion, which compares numbers


def tells_tables_apart() -> bool:
    """Return whether sharded embedding tables of the same width may have different numbers of rows.

    Up to torch 2.10, DTensor remembers how the gradient of a table is sharded without its number of rows, and the
    second table's gradient gets the rows of the first.
    """
    return torch.__version__ >= "2.11"


def zbv_runs_on_cpus() -> bool:
    """Return whether ZBVZeroBubble runs over gloo: up to torch 2.11 a rank sends to itself there, which gloo cannot."""
    return torch.__version__ >= "2.12"


def zero_bubble_takes_functions() -> bool:
    """Return whether a weight may go into an ``autograd.Function`` in a pipeline that delays gradients of weights.

    Up to torch 2.12, the function's part of the graph is gone by the time that they are computed.
    """
    return torch.__version__ >= "2.13"


def has_fused_adamw(device: torch.device) -> bool:
    """Return whether torch's AdamW has a fused kernel for ``device``."""
    return device.type in ("cpu", "cuda", "xpu", "mps")


def scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply ``tensors`` in place by ``factor``, all on one device. No fallback: torch's optimizers use the name."""
    torch._foreach_mul_(tensors, factor)


def move_towards(tensors: list[torch.Tensor], targets: list[torch.Tensor], weight: float) -> None:
    """Add ``weight`` times the difference to ``targets`` to ``tensors``, in place. No fallback, as for ``scale``."""
    torch._foreach_lerp_(tensors, targets, weight)


def is_compile_error(error: Exception) -> bool:
    """Return whether torch.compile raised ``error``; False if its modules have moved: users see the traceback."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` has been called; without the name, False."""
    return getattr(module, "_compiled_call_impl", None) is not None


def uncompile(module: torch.nn.Module) -> None:
    """Undo ``module.compile()``; without the name, it stays compiled."""
    module._compiled_call_impl = None


def without_buffer_broadcast() -> dict[str, Any]:
    """Return the argument that keeps DistributedDataParallel from broadcasting buffers: torch 2.13 renamed it."""
    names = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def after_gradients(loss: torch.Tensor, call: Callable[[], None]) -> None:
    """Call ``call`` when this rank's gradients are complete in the backward pass of ``loss``.

    DDP and ``fully_shard`` wait for other ranks in callbacks at the end of the backward pass. Callbacks run in the
    order in which they are queued, and the gradient of ``loss`` comes first. Without the name, nothing is called.
    """
    queue = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)
    if queue is not None:
        loss.register_hook(lambda gradient: queue(call))  # type: ignore[no-untyped-call]


def time_collectives(module: Any, timer: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run the collectives of a module of ``fully_shard`` within ``timer()``; without the names, they are not timed."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    except ImportError:
        return

    def timed(kind: type[Any]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with timer():
                return kind.__call__(self, *args, **kwargs)

        return type(kind.__name__, (kind,), {"__call__": call})()

    if hasattr(module, "set_custom_all_gather"):
        module.set_custom_all_gather(timed(DefaultAllGather))
        module.set_custom_reduce_scatter(timed(DefaultReduceScatter))


def make_root(module: Any) -> None:
    """Let a module of ``fully_shard`` be the root of those inside of it; else the first to be called would be one.

    Without the name, the module itself must be called before those inside of it.
    """
    if hasattr(module, "_get_fsdp_state"):
        module._get_fsdp_state()._lazy_init()


def hide_hooks(module: torch.nn.Module) -> None:
    """Hide what the hooks around the forward pass of ``module`` compute from selective activation checkpointing.

    It expects the second forward pass to call the same operations as the first, but ``fully_shard`` gathers parameters
    in the hooks of a pass only if it has not prefetched them. Without the name, torch rejects the second pass.
    """
    without_modes = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with without_modes():
                return hook(*args, **kwargs)

        return call

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.update({key: hidden(hook) for key, hook in hooks.items()})


def settle_buckets(replica: Any) -> None:
    """Let DistributedDataParallel choose its final buckets of gradients before the first step, by a pass with zeros.

    It regroups the gradients once, after its first backward pass, in the order in which they arrived there. Where in a
    bucket a gradient lies decides in which order an all-reduce adds more than two ranks, so the first step after a
    restart would round differently from the same step of a run that was not interrupted. That remains so with a version
    of torch without the method.
    """
    prepare = getattr(replica.reducer, "prepare_for_backward", None)
    if prepare is None:
        return
    prepare([])
    # The last layers' gradients come first in a backward pass, too, so that they travel while others are computed.
    parameters = [each for each in replica.module.parameters() if each.requires_grad]
    for each in reversed(parameters):
        each.flatten()[:0].sum().backward()  # type: ignore[no-untyped-call]
    for each in parameters:
        each.grad = None


def release_reducer(replica: Any) -> None:
    """Release DistributedDataParallel's process group; harmless if torch has renamed the attributes."""
    replica.reducer = replica.logger = None


def sync_batch_norm(module: torch.nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    """Return what a SyncBatchNorm with the state of ``module`` makes of ``x``; DDP rejects one itself on a CPU."""
    return torch.nn.SyncBatchNorm.forward(module, x)  # type: ignore[arg-type]


check_channels = getattr(torch.nn.SyncBatchNorm, "_check_non_zero_input_channels", lambda module, x: None)
"""A method that ``module`` in ``sync_batch_norm`` must have, under torch's name. Without it, nothing is checked."""


def record_memory(entries: int) -> None:
    """Begin to record CUDA's last ``entries`` allocations; 0 ends this. Without the name, nothing is recorded."""
    if record := getattr(torch.cuda.memory, "_record_memory_history", None):
        record(max_entries=entries) if entries else record(enabled=None)


def dump_memory(file: Path) -> None:
    """Write what ``record_memory`` has recorded, as a pickle for pytorch.org/memory_viz, torch's only format."""
    if dump := getattr(torch.cuda.memory, "_dump_snapshot", None):
        dump(str(file))


def all_gather_single(gathered: torch.Tensor, x: torch.Tensor, *, group: Any = None) -> Any:
    """Gather the tensors ``x`` of all ranks, one after the other along the first dimension; torch 2.13 renamed it."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x, group=group)


def reduce_scatter_single(total: torch.Tensor, x: torch.Tensor, *, group: Any = None) -> Any:
    """Sum the tensors ``x`` of all ranks, and leave each an equal share of the rows; torch 2.13 renamed it."""
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(total, x, group=group)


Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows (N, C) by matrices (E, H, C), given how many rows belong to each (E,); the result is (N, H)."""


def grouped_product(x: Tensor, width: int, dtype: torch.dtype) -> Product:
    """Return the function that multiplies groups of rows like ``x`` (N, C), C and ``width`` wide, in ``dtype``.

    torch's ``grouped_mm`` has kernels for bf16 on CUDA from compute capability 8.0 on, and in torch 2.13 a path for
    CPUs. It needs rows of a multiple of 16 bytes.
    """
    aligned = all(size * dtype.itemsize % 16 == 0 for size in (width, x.shape[-1]))
    if not (aligned and hasattr(F, "grouped_mm") and len(x) and not x.is_meta):
        return one_by_one
    if x.device.type == "cpu":
        return grouped if torch.__version__ >= "2.13" else one_by_one
    fits = x.device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return grouped if fits else one_by_one


def grouped(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the products by torch's ``grouped_mm``, without waiting for an accelerator."""
    ends = counts.cumsum(0).to(torch.int32)
    return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)


def one_by_one(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the products, one matrix after the other."""
    groups = zip(torch.split(x, counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def torchvision(module: str, user: str) -> Any:
    """Import a module of torchvision, which ``user`` needs.

    Its wheels for CUDA do not find their operators beside a torch for CPUs, and the import of torchvision fails as it
    describes two of them to the compiler. Data and models use neither, so both are declared, and will never be called.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise ConfigError(
            f"{user} needs torchvision ({error}): pip install 'wordrun[vision]'", page="install.md#extras"
        ) from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _declared:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _declared[0].define(f"{name}() -> ()")  # type: ignore[no-untyped-call]
    return importlib.import_module(f"torchvision.{module}")


_declared: list[torch.library.Library] = []
"""The operators of torchvision that ``torchvision`` has declared; they exist as long as this object."""
