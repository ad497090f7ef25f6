"""What a backend asks of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

DRAWN_ON_CPU = 2**25
"""Matrices of up to this many elements are drawn on the CPU, so that they are the same on every kind of device.

Larger ones are drawn on their own device: the CPU would take seconds for each.
"""


class LazyWeights(Mapping[str, Tensor]):
    """Weights by name, each read when it is accessed by the function that ``readers`` has for it."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        """Read one weight."""
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class Model(nn.Module):
    """What a backend trains: an ``nn.Module`` that computes its losses and initialises itself, module by module.

    A backend builds it on the meta device, where tensors have shapes and no memory. A module that registers buffers
    fills them in ``reset_parameters``, as torch's own do.
    """

    blocks: nn.ModuleDict
    """The modules that are sharded, recomputed and compiled one by one."""

    def losses(self, batch: Any, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,).

        Args:
            batch: what the data consist of, on the model's device.
            forward: calls the model through a wrapper, such as DistributedDataParallel; None: calls it directly. Either
                way the model is *called*: hooks of its modules gather parameters and compile.
        """
        raise NotImplementedError

    def tie(self) -> None:
        """Share the parameters again that modules have in common; giving them memory has made copies."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how the ranks of a tensor-parallel group split the matrices: module names to torch's styles."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the normal distribution from which the matrix ``name`` is drawn."""
        return 0.02

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds of the model: parameters, shared ones once, and persistent buffers."""
        yield from self.named_parameters()
        persistent = self.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in persistent)

    def num_parameters(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def initialise(self, seed: int, module: nn.Module | None = None, prefix: str = "", *, recurse: bool = True) -> None:
        """Set the initial values: matrices normal, other parameters 1, biases 0, buffers as their modules say.

        Each matrix has a random generator of its own, seeded with ``seed`` and its name, so that a rank can draw the
        part that it holds without the others.

        Args:
            seed: of the weights.
            module: initialise this module of the model only.
            prefix: the beginning of its parameters' names in the full model.
            recurse: include the modules in it.
        """
        module = module or self
        for each in module.modules() if recurse else [module]:
            _reset(each)
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), recurse=recurse):
            if parameter.dim() >= 2:
                parameter.copy_(self._draw(seed, name, parameter))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def _draw(self, seed: int, name: str, parameter: Tensor) -> Tensor:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        device = torch.device("cpu") if parameter.numel() <= DRAWN_ON_CPU else parameter.device
        stream = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
        values = parameter if parameter.device == device else torch.empty_like(parameter, device=device)
        return values.normal_(std=self.initial_std(name), generator=stream)

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:
        """Set the buffers that no checkpoint holds: those of modules that still are on the meta device."""
        for module in self.modules():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
                module.to_empty(device=device, recurse=False)
                _reset(module)
                module.load_state_dict(kept)


def _reset(module: nn.Module) -> None:
    """Fill the module's own buffers, if it has any."""
    names = ", ".join(name for name, _ in module.named_buffers(recurse=False))
    if names and not hasattr(module, "reset_parameters"):
        raise NotImplementedError(
            f"{type(module).__name__} has buffers ({names}) and no method reset_parameters to fill them: models are "
            "built on the meta device, where values set in a constructor are lost"
        )
    if names:
        module.reset_parameters()  # type: ignore[operator]
