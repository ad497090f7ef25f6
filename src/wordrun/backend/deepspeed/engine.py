"""DeepSpeed's engine (Rasley et al. 2020) with ZeRO (Rajbhandari et al. 2020), in the run's process group."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from wordrun.backend.base import BackendSpec, Fetch, Save, StepResult, Writer, checked
from wordrun.backend.compile import compile_options, prepare
from wordrun.backend.deepspeed import compat, settings as ds_config
from wordrun.backend.deepspeed.options import DeepSpeedConfig
from wordrun.backend.mixed_precision import TORCH_DTYPES
from wordrun.backend.param_groups import NamedParameters, set_learning_rate
from wordrun.backend.step_timer import StepTimer
from wordrun.checkpoint.folder import DamagedError
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.dist import World
from wordrun.dist.collectives import average
from wordrun.model.base import LossesOf, Model
from wordrun.model.construction import materialize
from wordrun.train.options import accumulation

ENGINE = "engine"
"""The folder of DeepSpeed's files in a checkpoint."""


class DeepSpeedBackend:
    """``train.backend=deepspeed``: the engine handles accumulation, clipping, loss scaling and sharding."""

    def __init__(self, spec: BackendSpec) -> None:
        cfg, options = spec.cfg, spec.options_of(DeepSpeedConfig)
        self.spec, self.stage = spec, options.stage
        self.device, self.dtype = spec.device, spec.dtype
        dtype = next(name for name, each in TORCH_DTYPES.items() if each == self.dtype)
        settings = ds_config.merge(cfg, options, dtype, spec.world.size, accumulation(cfg, spec.layout.dp))
        with contextlib.ExitStack() as undo:
            undo.enter_context(compat.variables(_choosing_device(spec.world, self.device)))
            deepspeed = _import()
            compat.restore_after_deepspeed(undo, spec.world.rank)
            deepspeed.init_distributed(auto_mpi_discovery=False)  # finds the run's own group
            model = spec.make_model()
            self.initial = ChainMap[str, Tensor]({}, spec.weights or {}, model.loaded_weights())  # type: ignore[arg-type]
            """Initial weights by name; others are random."""
            shapes = {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()}
            try:
                if options.stage == 3:
                    self._shard(model, deepspeed.zero.Init, settings)
                else:
                    materialize(model, cfg.train.seed, self.device)
                    self._fill(model, "")
                prepare(model, cfg, compile_options(self.device, spec.layout))
                optimizer = self._make_optimizer(model, shapes)
                self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
            except Exception as error:
                if not compat.is_op_build_error(error):
                    raise
                raise UserError(
                    f"DeepSpeed failed to JIT-compile an op ({first_line(error)}): install a C++ compiler, or on GPUs "
                    f"the CUDA toolkit, or remove what needs it from backend.config={options.config}"
                ) from error
            undo.callback(self.engine.destroy)
            self.undo = undo.pop_all()
        self.parts: list[Model] = [model]
        self.scaler = None  # the engine's own scaler raises an error if its smallest scale overflows
        self.optimizer = self.engine.optimizer
        # Without ZeRO or a loss scaler around the optimizer, the engine does not report the gradient norm.
        self.norm_is_ours = self.optimizer is optimizer

    def _shard(self, model: Model, shard: Any, settings: dict[str, Any]) -> None:
        """Initialize the parameters and shard them across the ranks, one module at a time."""
        blocks = [(f"{name}.", block, True) for name, block in model.named_blocks().items()]
        blocks += [(prefix, inner, True) for prefix, inner in model.inner_models().items()]
        outside = [(prefix, module, False) for prefix, module in model.outside_blocks() if prefix]
        untied = {name for name, _ in model.named_parameters()}
        for prefix, module, complete in [*blocks, *outside]:
            names = {name for name, _ in module.named_parameters(prefix.rstrip("."), recurse=complete)}
            if names and not names & untied:
                continue
            module.to_empty(device=self.device, recurse=complete)
            model.initialize(self.spec.cfg.train.seed, module, prefix, recurse=complete)
            self._fill(module, prefix, recurse=complete)
            module.to(self.dtype)
            if names:
                shard(module=module, config_dict_or_path=settings)
        model.to_empty(device=self.device, recurse=False)
        model.initialize(self.spec.cfg.train.seed, recurse=False)
        model.tie_all()

    @torch.no_grad()
    def _fill(self, module: nn.Module, prefix: str, *, recurse: bool = True) -> None:
        """Copy the initial weights, if any, into ``module``."""
        at = prefix.rstrip(".")
        for name, tensor in [*module.named_parameters(at, recurse), *module.named_buffers(at, recurse)]:
            if name in self.initial:
                tensor.copy_(self.initial[name])

    def _make_optimizer(self, model: Model, shapes: Mapping[str, tuple[torch.Size, bool]]) -> torch.optim.Optimizer:
        """Return the run's optimizer, built from stand-ins with full shapes, which sharded parameters lack.

        ``shapes`` has each parameter's full shape, and whether it is trained.
        """
        stand_ins = {
            name: nn.Parameter(torch.empty((), device=self.device).expand(shape), requires_grad=trained)
            for name, (shape, trained) in shapes.items()
        }
        # Of a model on the meta device, because sharded parameters have no dimensions by which to know matrices.
        matrices = self.spec.make_model().matrices()
        optimizer = self.spec.optimizer(NamedParameters(stand_ins.items(), matrices))
        real = {stand_ins[name]: parameter for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [real[stand_in] for stand_in in group["params"]]
        return optimizer

    def _cast(self, batch: Any) -> Any:
        """Return ``batch`` in the precision of the weights, if it has ``cast``; the engine does not use autocast."""
        return batch.cast(self.dtype) if hasattr(batch, "cast") else batch

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: StepTimer) -> StepResult:
        """Take one optimizer step on ``batches``."""
        set_learning_rate(self.optimizer, learning_rate)
        losses = []
        norm: Any = None
        for batch in batches:
            loss = checked(self.engine(LossesOf(self._cast(batch))), batch, self.spec.cfg.model, self.device).mean()
            clock.lap("forward")
            self.engine.backward(loss)
            losses.append(loss.detach())
            clock.lap("backward")
            if len(losses) == len(batches) and self.norm_is_ours:
                norm = get_total_norm([p.grad for p in self.parts[0].parameters() if p.grad is not None])
            self.engine.step()
            clock.lap("optimizer")
        if buffers := [buffer for buffer in self.parts[0].buffers() if buffer.is_floating_point()]:
            average(buffers)
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)
        return StepResult(torch.stack(losses).mean(), norm)

    @torch.no_grad()
    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), and append the model's outputs to ``outputs``."""
        return checked(self.engine(LossesOf(self._cast(batch), outputs)), batch, self.spec.cfg.model, self.device)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits at the last of ``tokens``, (B, V)."""
        return self.parts[0].logits_at(tokens, -1, self.engine)

    def begin_save(
        self,
        rank_tensors: Mapping[str, Tensor],
        weight_like: Mapping[str, Tensor] | None = None,
        writer: Writer | None = None,
    ) -> Save:
        """Return a save that the engine writes in its own format, which only the same number of ranks can read."""
        if weight_like:
            raise UserError(f"DeepSpeed's engine cannot save {next(iter(weight_like))}: use another train.backend")
        facts = {"kind": "deepspeed", "ranks": self.spec.world.size, "stage": self.stage}
        return Save(facts, partial(self._write, rank_tensors), in_background=False)

    def _write(self, rank_tensors: Mapping[str, Tensor], folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=ENGINE, save_latest=False)
        torch.save(dict(rank_tensors), self._own_file(folder))

    def load(
        self,
        folder: Path,
        facts: dict[str, Any],
        rank_tensors: Sequence[str] = (),
        weight_like: Mapping[str, Tensor] | None = None,
        fetch: Fetch | None = None,
    ) -> dict[str, Tensor]:
        """Restore the training state from the engine's files."""
        if facts["kind"] != "deepspeed":
            raise ConfigError(
                f"{folder} was not written by DeepSpeed's engine, which cannot resume from it: use another "
                f"train.backend, or load only its weights with train.init_from={folder}"
            )
        if facts["ranks"] != self.spec.world.size or facts["stage"] != self.stage:
            raise ConfigError(
                f"{folder} was written with ZeRO stage {facts['stage']} on {facts['ranks']} ranks, and DeepSpeed can "
                f"resume it only with the same, not with stage {self.stage} on {self.spec.world.size}: change them, or "
                f"load only its weights with train.init_from={folder}",
                page="backends.md#deepspeed",
            )
        with compat.deepspeed_reads_data_only(folder / ENGINE):
            self.engine.load_checkpoint(str(folder), tag=ENGINE)
            found = torch.load(self._own_file(folder)) if rank_tensors else {}
        return {name: found[name] for name in rank_tensors}

    @staticmethod
    def read_weights(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the weights of a checkpoint that DeepSpeed wrote, unsharded and in fp32.

        Raises:
            UserError: DeepSpeed is not installed.
            DamagedError: its files cannot be read.
        """
        try:
            convert = importlib.import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
        except ImportError as error:
            raise UserError(
                f"{folder} was written by DeepSpeed, which is needed to read it ({error}): "
                "pip install 'wordrun[deepspeed]'"
            ) from None
        try:
            with compat.deepspeed_reads_data_only(folder / ENGINE):
                if any((folder / ENGINE).glob("*_optim_states.pt")):
                    state = convert(str(folder), tag=ENGINE)
                else:  # of stage 0 in fp32: the weights are complete
                    file = folder / ENGINE / "mp_rank_00_model_states.pt"
                    state = torch.load(file, map_location="cpu", mmap=True)["module"]
            return {name: state[name] for name in names}
        except UserError:
            raise
        except Exception as error:  # the files may contain anything
            raise DamagedError(f"{folder / ENGINE} is damaged: {first_line(error)}") from error

    def _own_file(self, folder: Path) -> Path:
        return folder / ENGINE / f"rank-{self.spec.world.rank:05d}.pt"

    def close(self) -> None:
        """Release the engine and its references to the process group."""
        self.undo.close()
        del self.engine, self.optimizer


def _choosing_device(world: World, device: torch.device) -> dict[str, str]:
    """Return the variables from which DeepSpeed chooses this rank's device; stage 3 reads them at every step."""
    number = str(world.local_rank if device.index is None else device.index)
    wanted = {"DS_ACCELERATOR": device.type, "LOCAL_RANK": number}
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # DeepSpeed requires the two to be equal
        wanted["OMPI_COMM_WORLD_LOCAL_RANK"] = number
    return wanted


def _import() -> Any:
    """Import and return DeepSpeed without needless compilation and warnings."""
    try:
        deepspeed = importlib.import_module("deepspeed")
    except Exception as error:
        raise UserError(
            f"train.backend=deepspeed: DeepSpeed is installed, but importing it fails ({first_line(error)}): "
            "pip install --force-reinstall --no-deps deepspeed, with this torch installed"
        ) from error
    compat.quiet_deepspeed()
    return deepspeed
