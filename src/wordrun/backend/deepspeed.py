"""DeepSpeed's engine (Rasley et al. 2020) with ZeRO (Rajbhandari et al. 2020), in the process group of the run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from wordrun import ds_config
from wordrun.backend.base import Job, Save, StepResult
from wordrun.backend.native import prepare_blocks
from wordrun.backend.precision import TORCH_DTYPES, choose_dtype
from wordrun.backend.stopwatch import Stopwatch
from wordrun.checkpoint.deepspeed import TAG
from wordrun.checkpoint.pieces import Group
from wordrun.checks import accumulation
from wordrun.config import DeepSpeedConfig
from wordrun.data.batch import Batch
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError
from wordrun.model import Transformer, materialise, outline


class DeepSpeedBackend:
    """``train.backend=deepspeed``. Accumulation, clipping, loss scaling and sharing out are the engine's."""

    def __init__(self, job: Job) -> None:
        cfg, options = job.cfg, job.cfg.backend
        assert isinstance(options, DeepSpeedConfig)
        self.job, self.stage = job, options.stage
        self.device = torch.device(job.world.device)
        self.dtype = choose_dtype(cfg.train.dtype, self.device)
        dtype = next(name for name, each in TORCH_DTYPES.items() if each == self.dtype)
        settings = ds_config.merge(cfg, options, dtype, job.world.size, accumulation(cfg, job.layout.dp))
        with contextlib.ExitStack() as undo:
            undo.enter_context(_variables(job.world, self.device))
            deepspeed = _import()
            _leave_nothing_behind(undo, job.world.rank)
            deepspeed.init_distributed(auto_mpi_discovery=False)  # finds the run's own group
            model = outline(cfg.model, job.vocab_size)
            shapes = [p.shape for p in model.parameters()]
            try:
                if options.stage == 3:
                    self._share_out(model, deepspeed.zero.Init, settings)
                else:
                    materialise(model, cfg.train.seed, self.device)
                    self._fill(model, "")
                prepare_blocks(model, cfg)
                optimizer = self._make_optimizer(model, shapes)
                self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
            except Exception as error:
                if not any("op_builder" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                    raise
                raise UserError(
                    f"DeepSpeed wants to compile an operation of its own and cannot ({str(error).splitlines()[0]}): "
                    f"install a C++ compiler, or on GPUs the CUDA toolkit, or take what needs it out of backend.config="
                    f"{options.config}"
                ) from error
            undo.callback(self.engine.destroy)
            self.undo = undo.pop_all()
        self.parts: list[Transformer] = [model]
        self.optimizer = self.engine.optimizer

    def _share_out(self, model: Transformer, share: Any, settings: dict[str, Any]) -> None:
        """Give the parameters their values, a module at a time, and leave each rank with its share of them."""
        children = [(f"{name}.", child) for name, child in model.named_children() if child is not model.blocks]
        blocks = [(f"blocks.{number}.", block) for number, block in model.blocks.items()]
        for prefix, module in [*blocks, *children]:
            if prefix == "head." and model.tied:
                continue
            module.to_empty(device=self.device)
            model.initialise(self.job.cfg.train.seed, module, prefix)
            self._fill(module, prefix)
            share(module=module.to(self.dtype), config_dict_or_path=settings)
        model.tie()

    @torch.no_grad()
    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Give the parameters of ``module`` the values that the job brings, if it brings any."""
        for name, parameter in module.named_parameters(prefix=prefix.rstrip(".")):
            if self.job.weights is not None:
                parameter.copy_(self.job.weights[name])

    def _make_optimizer(self, model: Transformer, shapes: Sequence[torch.Size]) -> torch.optim.Optimizer:
        """Return the run's optimizer, which sorts parameters by their shapes; those in shares have lost theirs."""
        like = {nn.Parameter(torch.empty((), device=self.device).expand(shape)): p
                for shape, p in zip(shapes, model.parameters(), strict=True)}  # fmt: skip
        optimizer = self.job.make_optimizer(like)
        for group in optimizer.param_groups:
            group["params"] = [like[p] for p in group["params"]]
        return optimizer

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses = []
        norm: Any = None
        for batch in batches:
            loss = self.engine(batch.tokens, batch.targets, documents=batch.documents).mean()
            clock.lap("forward")
            self.engine.backward(loss)
            losses.append(loss.detach())
            clock.lap("backward")
            if len(losses) == len(batches) and isinstance(self.optimizer, torch.optim.AdamW):
                # Neither ZeRO nor a loss scaler: the engine keeps the norm by which it clips to itself.
                norm = get_total_norm([p.grad for p in self.parts[0].parameters() if p.grad is not None])
            self.engine.step()
            clock.lap("optimizer")
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)
        return StepResult(torch.stack(losses).mean(), norm)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,)."""
        return self.engine(batch.tokens, batch.targets, documents=batch.documents)  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens``, (B, V)."""
        return self.engine(tokens, at=-1)  # type: ignore[no-any-return]

    def begin_save(self, own: Mapping[str, Tensor]) -> Save:
        """Return what has the engine write its own files, for this number of ranks alone."""
        facts = {"kind": "deepspeed", "ranks": self.job.world.size, "stage": self.stage}
        return Save(facts, partial(self._write, own), in_background=False)

    def _write(self, own: Mapping[str, Tensor], folder: Path, group: Group) -> None:
        self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        torch.save(dict(own), self._own_file(folder))

    def load(self, folder: Path, facts: dict[str, Any], own: Sequence[str] = ()) -> dict[str, Tensor]:
        """Have the engine read its own files."""
        if facts["kind"] != "deepspeed":
            raise ConfigError(
                f"{folder} was not written by DeepSpeed's engine, which cannot go on from it: use another "
                f"train.backend, or its weights alone by train.init_from={folder}"
            )
        if facts["ranks"] != self.job.world.size or facts["stage"] != self.stage:
            raise ConfigError(
                f"{folder} was written by DeepSpeed's stage {facts['stage']} on {facts['ranks']} ranks, and can be "
                f"continued only so, not by stage {self.stage} on {self.job.world.size}: change them, or take its "
                f"weights alone by train.init_from={folder}"
            )
        self.engine.load_checkpoint(str(folder), tag=TAG)
        found = torch.load(self._own_file(folder), weights_only=True) if own else {}
        return {name: found[name] for name in own}

    def _own_file(self, folder: Path) -> Path:
        return folder / TAG / f"rank-{self.job.world.rank:05d}.pt"

    def close(self) -> None:
        """Give back the engine and what it has of the process group."""
        self.undo.close()
        del self.engine, self.optimizer


@contextlib.contextmanager
def _variables(world: World, device: torch.device) -> Iterator[None]:
    """Tell DeepSpeed which device is this rank's, by the variables that it reads, in stage 3 at every step."""
    place = str(world.local_rank if device.index is None else device.index)
    wanted = {"DS_ACCELERATOR": device.type, "LOCAL_RANK": place}
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # it insists that both are the same
        wanted["OMPI_COMM_WORLD_LOCAL_RANK"] = place
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import() -> Any:
    """Return DeepSpeed, without what it would compile by itself and what it would say at each step."""
    try:
        deepspeed = importlib.import_module("deepspeed")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"train.backend=deepspeed: DeepSpeed is installed, but importing it fails ({reason}): "
            "pip install --force-reinstall --no-deps deepspeed, under the torch that is here"
        ) from error
    # Where it finds a compiler it builds an all-reduce over shared memory: minutes at the first start, for gloo's work.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # torch 2.13 has new names for two collectives; the old ones work, and would be complained of at each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _leave_nothing_behind(undo: contextlib.ExitStack, rank: int) -> None:
    """Quieten DeepSpeed's log, and have ``undo`` take back what it changes outside its engine."""
    logger = logging.getLogger("DeepSpeed")
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    undo.callback(setattr, F, "linear", F.linear)
    # Its handles of the group, which ends with the run: the next run here has another.
    undo.callback(setattr, importlib.import_module("deepspeed.comm.comm"), "cdb", None)
    undo.callback(importlib.import_module("deepspeed.utils.groups")._release_process_group_references)
