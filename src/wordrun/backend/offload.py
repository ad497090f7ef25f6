"""Keeps what blocks save for the backward pass in host memory.

Copies to the host run on a stream of their own beside the next operations. The backward pass copies back in its own
stream, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from wordrun.dist import torch_private

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
