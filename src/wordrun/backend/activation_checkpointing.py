"""Saves memory between the forward and backward passes: recomputes activations, or keeps them in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wordrun.backend.buffer_snapshot import BufferSnapshot
from wordrun.backend.sharded_tensors import local
from wordrun.dist import torch_private
from wordrun.train.options import TrainConfig, checkpointing_of


def apply_checkpointing(block: Any, number: int, train: TrainConfig) -> None:
    """Apply train.activation_checkpointing and train.activation_offload to the block with this ``number``."""
    kind = checkpointing_of(train.activation_checkpointing, number)
    if kind in ("selective", "full"):
        block.forward = partial(_recomputed, block, block.forward, selective=kind == "selective")
    if train.activation_offload:
        block.forward = offloaded(block.forward, block)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, selective: bool, **kwargs: Any) -> Any:
    """Return what ``forward`` of ``block`` returns; its activations are recomputed in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_products) if selective else None
    # Compiled code updates buffers only once, and supports only the contexts of selective checkpointing.
    if not torch.compiler.is_compiling() and next(block.buffers(), None) is not None:
        contexts = partial(_with_buffers, block, contexts)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _with_buffers(block: nn.Module, contexts: Callable[[], Any] | None) -> tuple[AbstractContextManager[Any], Any]:
    """Return the contexts of the forward pass and of its recomputation, which must not change the buffers."""
    first, second = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return first, _both(_unchanged_buffers(block), second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Let a ``with`` block leave the buffers of ``module`` as they are."""
    kept = BufferSnapshot([module])
    try:
        yield
    finally:
        kept.restore()


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
    """Event after which ``data`` is complete; None: it is complete."""


class Offload:
    """Hooks for autograd that move saved tensors of one block to host memory and back."""

    def __init__(self, block: nn.Module) -> None:
        # Weights stay on the device, also 16-bit or transposed copies: they are recognized by shapes that no activation
        # has.
        parameters: list[Any] = [*block.parameters()]
        shapes = [tuple(local(p).shape) for p in parameters]
        self.stay = {*shapes, *(shape[::-1] for shape in shapes)}
        self.seen: dict[Any, tuple[Offloaded, Tensor]] = {}
        """The copies of this forward pass, since several operations save the same tensor. The tensors are kept, too, so
        that no other one takes their addresses meanwhile."""

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
