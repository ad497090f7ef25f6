"""Applies float8, activation checkpointing and torch.compile to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wordrun.backend import float8
from wordrun.backend.buffer_snapshot import unchanged_buffers
from wordrun.config.schema import Config
from wordrun.dist import torch_private
from wordrun.dist.mesh import Layout
from wordrun.model.base import Model
from wordrun.train.options import checkpointing_of

Options = dict[str, Any] | None
"""Options of inductor, torch's compiler."""


def compile_options(device: torch.device, layout: Layout) -> Options:
    """Return how models are compiled for ``device``, with ranks as in ``layout``.

    On CPUs, the code that calls the kernels is C++ as well: in Python, it takes 3 % of the passes of a small model
    (one thread). It cannot communicate, as ranks do within a block if they divide products, sequences or experts.
    """
    divided = layout.tp * layout.cp * layout.ep > 1
    return {"cpp_wrapper": True} if device.type == "cpu" and not divided else None


def prepare(model: Model, cfg: Config, options: Options = None) -> None:
    """Apply activation checkpointing and torch.compile to ``model``, as set in ``cfg``."""
    for number, block in enumerate(model.blocks.children()):
        prepare_block(block, number, cfg, options)
    prepare_rest(model, cfg, options)


def prepare_rest(model: Model, cfg: Config, options: Options = None) -> None:
    """Apply torch.compile outside the blocks or to the complete ``model``, and choose the loss, as set in ``cfg``."""
    model.choose_loss(chunked=cfg.train.chunked_loss)
    if cfg.train.compile is True:
        compile_rest(model, cfg.train.compile_scope, options)


def compile_rest(model: Model, scope: str, options: Options = None) -> None:
    """Compile what is outside the blocks or, if ``scope`` is "model", the complete ``model``."""
    model.compile_loss()
    if scope == "model":
        compile_module(model, options)


def compile_model(model: Model, scope: str, options: Options = None) -> None:
    """Compile ``model`` with train.compile_scope=``scope``."""
    compile_rest(model, scope, options)
    if scope == "blocks":
        for block in model.blocks.children():
            compile_module(block, options)


def compile_module(module: nn.Module, options: Options = None) -> None:
    """Compile ``module``, except for what the modules in it want to leave uncompiled."""
    for each in module.modules():
        if hasattr(each, "leave_uncompiled"):
            each.leave_uncompiled()  # type: ignore[operator]
    module.compile(options=options)


def prepare_block(block: Any, number: int, cfg: Config, options: Options = None) -> None:
    """Apply float8, activation checkpointing, offloading and torch.compile to one block, as set in ``cfg``."""
    if cfg.train.float8 != "none":
        float8.convert(block, cfg.train.float8)
    kind = checkpointing_of(cfg.train.activation_checkpointing, number)
    if kind in ("selective", "full"):
        block.forward = partial(_recomputed, block, block.forward, selective=kind == "selective")
    if cfg.train.activation_offload:
        block.forward = offloaded(block.forward, block)
    if cfg.train.compile is True and cfg.train.compile_scope == "blocks":
        compile_module(block, options)  # per block: they are identical, so torch compiles only one


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, selective: bool, **kwargs: Any) -> Any:
    """Return what ``forward`` of ``block`` returns, and compute its activations again in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_products) if selective else None
    # Compiled code updates buffers once, and takes no other contexts than those of selective checkpointing.
    if not torch.compiler.is_compiling() and next(block.buffers(), None) is not None:
        contexts = partial(_with_buffers, block, contexts)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _with_buffers(block: nn.Module, contexts: Callable[[], Any] | None) -> tuple[AbstractContextManager[Any], Any]:
    """Return the contexts of the forward pass and of its recomputation, which leaves the buffers as they are."""
    first, second = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return first, _both(unchanged_buffers(block), second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else ""
    return CheckpointPolicy.MUST_SAVE if name in torch_private.PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


SMALL = 2**16
"""Tensors of fewer elements stay on the device."""


@dataclass
class Offloaded:
    """A tensor in host memory."""

    data: Tensor
    device: torch.device
    copied: Any
    """Event after which ``data`` is complete; None: it is."""


class Offload:
    """Hooks for autograd that move saved tensors of one block to host memory and back."""

    def __init__(self, block: nn.Module) -> None:
        # Weights stay, also as copies in 16 bits or transposed: recognized by their shape, which activations lack.
        parameters: list[Any] = [*block.parameters()]
        shapes = [tuple((p.to_local() if torch_private.is_sharded(p) else p).shape) for p in parameters]
        self.stay = {*shapes, *(shape[::-1] for shape in shapes)}
        self.seen: dict[Any, tuple[Offloaded, Tensor]] = {}
        """What this forward pass has copied, since several operations save the same tensor; with the tensors, so that
        no other one takes their addresses meanwhile."""

    def pack(self, tensor: Tensor) -> Tensor | Offloaded:
        """Return what autograd keeps instead of ``tensor``."""
        if type(tensor) is not Tensor or tensor.numel() < SMALL or tuple(tensor.shape) in self.stay:
            return tensor
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), torch_private.version_of(tensor))
        if key not in self.seen:
            self.seen[key] = self._copy(tensor), tensor
        return self.seen[key][0]

    @staticmethod
    def _copy(tensor: Tensor) -> Offloaded:
        """Start copying ``tensor`` to the host."""
        on_cpu = tensor.device.type == "cpu"
        data = torch.empty_like(tensor, device="cpu", pin_memory=not on_cpu)
        if on_cpu:
            return Offloaded(data.copy_(tensor), tensor.device, None)
        module: Any = torch.get_device_module(tensor.device)
        stream = side_stream(tensor.device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            data.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not reused before it has been copied
        return Offloaded(data, tensor.device, stream.record_event())

    @staticmethod
    def unpack(kept: Tensor | Offloaded) -> Tensor:
        """Return the tensor that ``pack`` was given."""
        if isinstance(kept, Tensor):
            return kept
        if kept.copied is not None:
            module: Any = torch.get_device_module(kept.device)
            module.current_stream().wait_event(kept.copied)
        return kept.data.to(kept.device, non_blocking=True)


@lru_cache
def side_stream(device: torch.device) -> Any:
    """Return the stream of ``device`` on which tensors are copied to the host."""
    return torch.get_device_module(device).Stream(device)


def offloaded(forward: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` method of ``block``, with what it saves for the backward pass kept in host memory."""
    hooks = Offload(block)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            try:
                return forward(*args, **kwargs)
            finally:
                hooks.seen.clear()

    return run
