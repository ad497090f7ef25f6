"""Steps with a non-finite loss or gradients: end the run, skip them, or roll back to the last checkpoint."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from wordrun import dist
from wordrun.backend.base import StepResult
from wordrun.checkpoint import folder as folders
from wordrun.common.errors import UserError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.config.registry import part_of
from wordrun.dist.collectives import all_max, all_sum
from wordrun.train import resume
from wordrun.train.hooks.base import Hook, Training, due

# Maximum per checkpoint: if other data has not helped so far, another attempt will not help either.
MAX_ROLLBACKS = 3
MAX_SKIPPED = 100
LEAST_SCALE = 1.0
"""In fp16, if gradients are still non-finite at a smaller loss scale than this, the cause is not overflow. As each
non-finite step halves the scale, this is reached after 17 steps."""
FIRST_SCALE = 2.0**16
"""The initial scale of torch's GradScaler."""


class Nonfinite(Hook):
    """Handles steps with a non-finite loss or gradients as train.on_nonfinite says.

    On an accelerator, only steps that are logged, evaluated or saved are checked, because reading the result
    synchronizes with the device. The same holds for islands, which would wait for each other. With
    train.on_nonfinite=skip, every step is checked.
    """

    def accepts_step(self, trainer: Training) -> bool:
        """Return whether the step counts; if not, it was skipped or undone.

        Raises:
            UserError: the loss or the gradients are non-finite, and train.on_nonfinite=stop, or the other choices have
                not helped.
        """
        if not _is_checked(trainer) or is_finite(trainer, trainer.result):
            return True
        _skip_or_roll_back(trainer, _explained(trainer, trainer.result))
        return False


def _is_checked(trainer: Training) -> bool:
    """Return whether the step is checked, the same on all ranks."""
    train, step = trainer.cfg.train, trainer.step + 1
    intervals = (train.log_interval, train.eval_interval, *train.save_intervals)
    on_cpu, synchronous = trainer.backend.device.type == "cpu", trainer.cfg.backend.synchronous
    always = (on_cpu and synchronous) or train.on_nonfinite == "skip"
    checked = always or step in (1, train.max_iters) or any(due(step, interval) for interval in intervals)
    return checked and not any(hook.expects_divergence for hook in trainer.hooks.values())


def _skip_or_roll_back(trainer: Training, found: _Found) -> None:
    """Skip the step, or return to a checkpoint; every rank must call this.

    Raises:
        UserError: train.on_nonfinite does not allow it, or it has not helped.
    """
    train = trainer.cfg.train
    if train.on_nonfinite == "skip":
        trainer.state.skip_step()
        if trainer.state.skipped > MAX_SKIPPED:
            raise UserError(
                f"{found.problem}, {MAX_SKIPPED} times in a row: {found.remedy}",
                page="checkpoints.md#non-finite-gradients",
            )
        LOGGER.warning("%s: the step is skipped (train.on_nonfinite=skip)", found.problem, extra=FIRST_RANK)
    elif train.on_nonfinite == "rollback" and train.checkpoint_interval:
        _roll_back(trainer, found)
    else:
        others = "" if found.is_first else ", or use train.on_nonfinite=skip or rollback"
        raise UserError(f"{found.problem}: {found.remedy}{others}", page="checkpoints.md#non-finite-gradients")


def is_finite(trainer: Training, result: StepResult) -> bool:
    """Return whether a step was finite, the same on all ranks; every rank must call this."""
    if not trainer.cfg.backend.synchronous:
        return bool(torch.isfinite(all_sum(result.grad_norm)))
    if trainer.backend.dtype == torch.float16:
        # Gradients may overflow while the scaler searches for the largest possible scale, but not at every scale.
        scale, bad = _scale(trainer), ~result.loss.isfinite()
        if scale is not None and scale < LEAST_SCALE:
            bad |= ~result.grad_norm.isfinite()
        return not all_max(bad.float()).item()
    return math.isfinite(result.grad_norm.item())


def _scale(trainer: Training) -> float | None:
    """Return the loss scale after the step, waiting for the step; None: there is none, or an engine has it."""
    scaler = trainer.backend.scaler
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None


class _Found(NamedTuple):
    """What is non-finite in a step."""

    problem: str
    remedy: str
    is_first: bool
    """Whether the weights have not been updated before."""


def _explained(trainer: Training, result: StepResult) -> _Found:
    """Return what is non-finite in a step with this ``result``, the same on all ranks; every rank must call this."""
    loss, step, model = all_sum(result.loss).item(), trainer.step + 1, trainer.cfg.model
    finite = math.isfinite(loss)
    problem = f"the loss of step {step} is {'NaN' if math.isnan(loss) else 'infinite'}"
    if finite:
        problem = f"non-finite gradients at step {step}, whose loss is finite"
    if not _is_first(trainer):
        return _Found(problem, "lower optimizer.learning_rate", is_first=False)
    origin, source = part_of("model", model).origin, trainer.cfg.train.init_from
    remedy = f"check losses(batch) of model={model.name}" + (f" ({origin})" if origin else "")
    remedy += " for a derivative that is not finite, such as that of a square root at 0" if finite else " and the data"
    remedy += f", or the weights of train.init_from={source}" if source else ""
    return _Found(f"{problem}, before any update of the weights", remedy, is_first=True)


def _is_first(trainer: Training) -> bool:
    """Return whether the weights have not been updated before this step, the same on all ranks; all must call this."""
    step, scale = trainer.step + 1, _scale(trainer)
    if step == 1 or scale is None:
        return step == 1
    # Whether every step so far has halved the scale. A scale that has underflown does not show it.
    scale = all_max(torch.tensor(scale, device=trainer.backend.device)).item()
    return 0 < scale <= FIRST_SCALE * 0.5 ** (step + trainer.state.skipped)


def _roll_back(trainer: Training, nonfinite: _Found) -> None:
    """Return to the newest checkpoint, and continue from there with the data that would come next."""
    trainer.checkpoints.wait()
    found = dist.broadcast(folders.all_in(trainer.run.path) if trainer.world.rank == 0 else None, trainer.world)
    if not found:
        raise UserError(f"{nonfinite.problem}, and no checkpoint to roll back to yet: {nonfinite.remedy}")
    folder, manifest = resume.open_newest(found, trainer.world)
    step = manifest["step"]
    if trainer.state.rollbacks.get(step, 0) >= MAX_ROLLBACKS:
        raise UserError(
            f"{nonfinite.problem}, after {MAX_ROLLBACKS} rollbacks to the checkpoint of step {step}: {nonfinite.remedy}"
        )
    trainer.meter.score(trainer.state)
    resume.load(trainer, folder.path, manifest)
    trainer.state.roll_back(manifest)
    trainer.run.rewind(step)
    LOGGER.warning("%s: rolled back to step %d, continuing with other data", nonfinite.problem, step, extra=FIRST_RANK)
