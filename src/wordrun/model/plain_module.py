"""Turns a plain ``nn.Module`` with a method ``losses(batch)`` into a ``Model`` that backends can train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.model.base import Model

SHARED = {
    *("losses", "metrics", "uses", "tensor_parallel_plan", "blocks", "blocks_at"),
    *("named_blocks", "settle_options"),
    *("own_weights", "read_huggingface", "write_huggingface", "continued", "stops"),
    "has_huggingface_format",
}
"""Attributes of ``Model`` that a plain module may define, with the same meaning."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""A plain module's ``blocks`` are sharded, recomputed and compiled one by one if they are one of these."""


class PlainModel(Model):
    """Adds to the class of a plain module what backends need.

    Its weights start with the values that its constructor gives them: every rank constructs another one on the CPU.
    """

    _values: dict[str, Tensor] | None = None
    """The constructor's values, while they are copied."""

    def remember(self, construct: Callable[[], nn.Module]) -> None:
        """Note how to construct another such module, and which parameters have several names."""
        self._construct, self._names = construct, dict[int, list[str]]()
        for name, parameter in self.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    @torch.no_grad()
    def initialize(self, seed: int, module: nn.Module | None = None, prefix: str = "", *, recurse: bool = True) -> None:
        """Copy the values that the constructor sets; see ``Model.initialize``."""
        if self._values is None:
            made = self._constructed(seed)
            self._values = dict([*_named(made.named_parameters), *_named(made.named_buffers)])
        module = self if module is None else module  # not ``or``: an empty ModuleList is falsy
        for tensors in (module.named_parameters, module.named_buffers):
            for name, tensor in _named(tensors, prefix.rstrip("."), recurse):
                tensor.copy_(self._values[name])
        if module is self:  # backends initialize the submodules first
            self._values = None

    def _constructed(self, seed: int) -> nn.Module:
        """Return another such module on the CPU, whose constructor drew its weights with ``seed``."""
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.manual_seed(seed)
            return self._construct()

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:
        """Copy the buffers that checkpoints do not store from another such module."""
        if missing := [name for name, buffer in self.named_buffers() if buffer.is_meta]:
            values = dict(self._constructed(0).named_buffers())
            for name in missing:
                owner, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(owner), attribute, values[name].to(device))

    def tie(self) -> None:
        for first, *others in self._names.values():
            for name in others:
                owner, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(owner), attribute, self.get_parameter(first))


def _named(tensors: Callable[..., Iterable[tuple[str, Tensor]]], prefix: str = "", recurse: bool = True) -> Any:
    """Call ``tensors``, such as ``named_parameters``, and return shared tensors under each of their names."""
    return tensors(prefix, recurse, remove_duplicate=False)


def path_of_blocks(module: nn.Module) -> str:
    """Return the name in ``module`` of the module whose children are its blocks; empty: it has none.

    It is what the attribute ``blocks_at`` says or, of an attribute or a property ``blocks``, the first name of its
    value.

    Raises:
        ConfigError: there is no such module, or it is no container.
    """
    kind, names = type(module).__name__, dict(module.named_modules(remove_duplicate=False))
    at = getattr(module, "blocks_at", Model.blocks_at)
    if at == Model.blocks_at and not hasattr(module, "blocks"):
        return ""
    blocks = names.get(at) if at != Model.blocks_at else module.blocks
    path = next((name for name, each in module.named_modules() if each is blocks), "")
    if not path or not isinstance(blocks, CONTAINERS):
        known = [name for name, each in names.items() if isinstance(each, CONTAINERS)]
        shown = f"{nearest(str(at), known)} ({', '.join(known) or 'there is none'})"
        what = f"{kind}.blocks_at={at!r}" if at != Model.blocks_at else f"the attribute {kind}.blocks"
        raise ConfigError(
            f"{what} should name an nn.ModuleList, nn.ModuleDict or nn.Sequential in {kind}, whose children are "
            f"sharded one by one{shown}",
            page="extend/model.md#a-model",
        )
    return path


def check_losses(model: Any) -> None:
    """Raise a ConfigError unless ``model`` is a module whose method ``losses`` can be called with a batch alone."""
    name, losses = type(model).__name__, getattr(type(model), "losses", None)
    wanted = "losses(self, batch), which returns the loss of each example of the batch, (B,)"
    if not isinstance(model, nn.Module) or not callable(losses):
        raise ConfigError(f"{name} should be an nn.Module with a method {wanted}", page="tasks.md#your-own-examples")
    try:
        inspect.signature(losses).bind(model, None)
    except TypeError:
        raise ConfigError(f"{name}.losses{inspect.signature(losses)} should be {wanted}") from None


def adapt(module: nn.Module, construct: Callable[[], nn.Module]) -> Model:
    """Make ``module`` a ``Model``, by adding ``PlainModel`` to its class, and return it.

    Args:
        module: has a method ``losses(batch)``, and may have ``metrics(batch, outputs)``.
        construct: returns another such module.

    Raises:
        ConfigError: it has other attributes whose names a ``Model`` uses.
    """
    name = type(module).__name__
    ours = {each for each in dir(PlainModel) if not each.startswith("_")} - {*dir(nn.Module)} - SHARED
    taken = sorted(each for each in ours if hasattr(module, each))
    if taken:
        raise ConfigError(
            f"{name} has attributes of names that wordrun uses ({', '.join(taken)}): rename them, or derive {name} "
            "from wordrun.model.Model, which documents their meaning"
        )
    module.__class__ = _mixed(type(module))  # type: ignore[arg-type]
    assert isinstance(module, PlainModel)
    module.remember(construct)
    return module


@cache
def _mixed(cls: type[nn.Module]) -> type[PlainModel]:
    """Return a class derived from ``cls`` and ``PlainModel``; without ``forward``, the forward pass computes losses."""
    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if cls.forward is nn.Module.forward:
        losses = cls.losses  # type: ignore[attr-defined]
        own |= {"forward": losses, "losses": lambda self, batch: self(batch)}
    return type(cls.__name__, (cls, PlainModel), own)
