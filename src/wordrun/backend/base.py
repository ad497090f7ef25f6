"""The interface of backends."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wordrun.backend import float8
from wordrun.backend.mixed_precision import choose_dtype
from wordrun.backend.options import BackendConfig
from wordrun.backend.param_groups import (
    NamedParameters,
    remember_ratios,
    require_optimizer,
    require_same_order,
    scale_rates,
    warn_of_left_out,
)
from wordrun.backend.step_timer import StepTimer
from wordrun.checkpoint.index import StoredTensor
from wordrun.checkpoint.shards import TensorShard
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model.base import Model
from wordrun.model.options import ModelConfig

MakeModel = Callable[..., Any]
"""Returns a ``Model`` on the meta device: the full model or, given ``layers``, the pipeline stage with those blocks."""
MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

Writer = Callable[[Sequence[TensorShard], int, Mapping[str, StoredTensor]], Callable[[], None]]
"""Copies what a rank writes, given its shards, its number and the places of all shards. Returns a function that
completes the copy."""
Fetch = Callable[[Iterable[str]], None]
Options = TypeVar("Options", bound=BackendConfig)


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. It is still on the device, so reading it waits for the step to end."""

    loss: Tensor
    """Mean loss over the examples of this rank's part of the batch."""
    grad_norm: Tensor
    """Norm of the gradients of the full model, before clipping."""


@dataclass(frozen=True)
class BackendSpec:
    """Everything needed to build a backend."""

    cfg: Config
    world: World
    layout: Layout
    """How the ranks divide the work."""
    make_model: MakeModel
    make_optimizer: MakeOptimizer
    """Returns the optimizer for named parameters."""
    weights: Mapping[str, Tensor] | None = None
    """Unsharded initial values of the parameters, by name; None: initialize randomly."""
    step: int = 0
    """The step at which the run starts."""
    mesh: DeviceMesh | None = None
    """The mesh of all ranks, if ``layout`` covers only a part of them; None: it covers all."""

    @cached_property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.world.device)

    def options_of(self, kind: type[Options]) -> Options:
        """Return the backend's options, which are of this kind."""
        options = self.cfg.backend
        assert isinstance(options, kind)
        return options

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Return the run's optimizer for the named ``parameters``, with learning rates that suit the model's width.

        Raises:
            ConfigError: it is not one optimizer, or needs a closure, or ranks have different parameters.
        """
        if self.world.size > 1:
            require_same_order(parameters, str(part_of("model", self.cfg.model)), self.layout, self.device)
        optimizer, options = self.make_optimizer(parameters), self.cfg.optimizer
        require_optimizer(optimizer, self.optimizer_part)
        everywhere = self.device if self.layout.pp > 1 else None
        warn_of_left_out(optimizer, parameters, self.optimizer_part, everywhere=everywhere)
        width, powers = self.cfg.model.width_ratio(), options.width_powers()
        if width != 1 and powers is not None:
            hidden = {p for name, p in parameters if name in parameters.matrices}
            scale_rates(optimizer, hidden, (width ** powers[0], width ** powers[1]))
        return remember_ratios(optimizer, options.learning_rate)

    @property
    def optimizer_part(self) -> str:
        """What messages call the optimizer."""
        return str(part_of("optimizer", self.cfg.optimizer))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return choose_dtype(self.cfg.train.dtype, self.device)


@dataclass(frozen=True)
class Save:
    """A copy of the training state, ready to be written."""

    facts: dict[str, Any]
    """What ``load`` needs besides the files, JSON-serializable; ``kind`` names the files' format."""
    write: Callable[[Path], None]
    """Writes this rank's files into a folder; every rank must call it."""
    in_background: bool
    """Whether another thread may call ``write`` and ``finish`` while training continues."""
    finish: Callable[[Path], list[str]] = lambda folder: []
    """Called on rank 0 after every rank's ``write``; returns the names of the files that it adds."""
    shards: int = 0
    """How many files of shards the ranks write, whose checksums are in their own headers."""


class Backend(Protocol):
    """Takes optimizer steps and runs the model for evaluation and generation. Every rank must call every method.

    A batch is whatever ``Model.losses`` accepts, on the backend's device.
    """

    device: torch.device
    dtype: torch.dtype
    """Compute dtype."""
    parts: Sequence[Model]
    """This rank's part of the model: the full model, or its pipeline stages."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scales the loss in fp16, otherwise it is disabled; None: an engine scales it, and raises if it cannot."""

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: StepTimer) -> StepResult:
        """Take one optimizer step on ``batches``, one batch per micro-step."""

    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), without gradients.

        What the model's forward pass returned is appended to ``outputs``, if given; a pipeline cannot do that.
        """

    def logits(self, tokens: Tensor) -> Tensor:
        """Return a language model's logits (B, V) at the last of ``tokens`` (B, T), without gradients."""

    def begin_save(
        self,
        rank_tensors: Mapping[str, Tensor],
        weight_like: Mapping[str, Tensor] | None = None,
        writer: Writer | None = None,
    ) -> Save:
        """Copy the current training state.

        Args:
            rank_tensors: additional tensors that only this rank saves, under names that no other rank uses.
            weight_like: additional tensors with the shape and the sharding of a weight, named ``hooks.HOOK.WEIGHT``.
            writer: copies what this rank writes; None: copy it to host memory, from where it is written to disk.
        """

    def load(
        self,
        folder: Path,
        facts: dict[str, Any],
        rank_tensors: Sequence[str] = (),
        weight_like: Mapping[str, Tensor] | None = None,
        fetch: Fetch | None = None,
    ) -> dict[str, Tensor]:
        """Restore the training state from a checkpoint written by any layout of ranks.

        Args:
            folder: the checkpoint.
            facts: the ``facts`` of the save.
            rank_tensors: names of the tensors that only this rank saved; they are returned.
            weight_like: tensors to read in place, as in ``begin_save``.
            fetch: called with the names of the files that this rank needs, before it reads any; None: all are there.

        Raises:
            ConfigError: this backend cannot read this kind of checkpoint.
        """

    def close(self) -> None:
        """Release everything that uses the process group, which is destroyed next; no step can follow."""


def require_shards(folder: Path, facts: Mapping[str, Any], backend: str) -> None:
    """Check that the ``backend`` of this name, which reads shards, can resume from the checkpoint ``folder``.

    Raises:
        ConfigError: an engine has written the checkpoint in a format of its own, or it has state (``only_for`` in its
            facts) that only another backend can continue from.
    """
    if facts["kind"] != "shards":
        raise ConfigError(
            f"{folder} was written by the engine of train.backend={facts['kind']}, so this backend cannot resume from "
            f"it: use train.backend={facts['kind']}, or load only its weights with train.init_from={folder}",
            page="backends.md#which-models-on-which-backends",
        )
    only = facts.get("only_for")
    if only and only["backend"] != backend:
        raise ConfigError(
            f"{folder} {only['why']}: resume with train.backend={only['backend']}, {only['instead']}, or start from "
            f"its weights with train.init_from={folder}"
        )


def checked(losses: Any, batch: Any, options: ModelConfig, device: torch.device) -> Tensor:
    """Return ``losses``, which the model with these ``options`` has computed for ``batch`` on ``device``.

    Raises:
        UserError: they are not one number for each example, on another device, or do not depend on the weights.
    """
    size, found = len(batch) if hasattr(batch, "__len__") else "B", type(losses).__name__
    if isinstance(losses, Tensor):
        right = losses.dim() == 1 and losses.device.type == device.type and losses.is_floating_point()
        right = right and size in ("B", len(losses))
        if right and (losses.requires_grad or not torch.is_grad_enabled()):
            return losses
        found = f"a {losses.dtype} tensor of shape {list(losses.shape)} on {losses.device.type}"
        if right:
            found = "a tensor that does not depend on the weights (was it detached?)"
    raise UserError(
        f"{part_of('model', options)}: losses(batch) should return the loss of each example, a floating-point "
        f"tensor of shape [{size}] on {device.type}: it returned {found}",
        page="extend/model.md#a-model",
    )


def build(spec: BackendSpec) -> Backend:
    """Return the backend selected by ``train.backend``; every rank must call this."""
    if spec.device.type == "cpu" and spec.cfg.backend.replicated:
        keep_freed()
    if spec.cfg.train.float8 != "none":
        float8.require(spec.cfg.train.float8, spec.device)
    backend: Backend = part_of("backend", spec.cfg.backend).load()(spec)
    return backend


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**25
"""Allocations up to this size in bytes come from the heap; larger ones are mapped one by one. glibc accepts no higher
limit."""
SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed() -> bool:
    """Let glibc keep freed memory, and return whether it does.

    By default, glibc returns the end of the heap to the system once a few MB there are free, as after each backward
    pass. The next step gets the memory back page by page, each filled with zeros. Other allocators, and a glibc that
    the user has configured by environment variables, stay as they are.

    Backends that gather parameters must not use this: they leave holes of many sizes, and FSDP took twice the memory.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in SET_BY_USERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, -1))
