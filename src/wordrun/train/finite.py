"""Steps with non-finite gradients: end the run, skip them, or roll back to the last checkpoint."""

from __future__ import annotations

import math

import torch

from wordrun import dist
from wordrun.backend import StepResult
from wordrun.checkpoint import folder as folders
from wordrun.dist.collectives import all_sum
from wordrun.errors import UserError
from wordrun.log import FIRST_RANK, LOGGER
from wordrun.train import resume
from wordrun.train.training import Training, due

# Per checkpoint: if other data has not helped so far, another attempt will not either.
MAX_ROLLBACKS = 3
MAX_SKIPPED = 100


def counts(trainer: Training, result: StepResult) -> bool:
    """Return whether the step with this ``result`` counts; if not, it was skipped or undone. Every rank must call this.

    On an accelerator, only steps that are logged, evaluated or saved are checked, because reading the result
    synchronizes with the device. The same holds for islands, which would wait for each other. With
    train.on_nonfinite=skip, every step is checked.

    Raises:
        UserError: the gradients are non-finite, and train.on_nonfinite=stop, or the other choices have not helped.
    """
    train, step = trainer.cfg.train, trainer.step + 1
    intervals = (
        train.log_interval, train.checkpoint_interval, train.memory_checkpoint_interval, train.eval_interval,
    )  # fmt: skip
    on_cpu, independent = trainer.backend.device.type == "cpu", trainer.cfg.backend.independent
    always = (on_cpu and not independent) or train.on_nonfinite == "skip"
    checked = always or step == train.max_iters or any(due(step, interval) for interval in intervals)
    expected = any(hook.expects_divergence for hook in trainer.hooks.values())
    if not checked or expected or is_finite(trainer, result):
        return True
    problem = f"non-finite gradients at step {step}"
    if train.on_nonfinite == "skip":
        trainer.state.skip_step()
        if trainer.state.skipped > MAX_SKIPPED:
            raise UserError(f"{problem}, {MAX_SKIPPED} times in a row: lower optimizer.learning_rate")
        LOGGER.warning("%s: the step is skipped (train.on_nonfinite=skip)", problem, extra=FIRST_RANK)
    elif train.on_nonfinite == "rollback" and train.checkpoint_interval:
        _roll_back(trainer, problem)
    else:
        raise UserError(f"{problem}: lower optimizer.learning_rate, or use train.on_nonfinite=skip or rollback")
    return False


def is_finite(trainer: Training, result: StepResult) -> bool:
    """Return whether a step was finite, the same on all ranks; every rank must call this."""
    if trainer.cfg.backend.independent:
        return bool(torch.isfinite(all_sum(result.grad_norm)))
    if trainer.backend.dtype == torch.float16:
        # Gradients may overflow while the scaler looks for the largest scale.
        return bool(torch.isfinite(all_sum(result.loss)))
    return math.isfinite(result.grad_norm.item())


def _roll_back(trainer: Training, problem: str) -> None:
    """Return to the newest checkpoint, and continue from there with the data that would come next."""
    trainer.checkpoints.wait()
    found = dist.share(folders.all_in(trainer.run.path) if trainer.world.rank == 0 else None, trainer.world)
    if not found:
        raise UserError(f"{problem}, and no checkpoint to roll back to yet: lower optimizer.learning_rate")
    folder, manifest = resume.open_newest(found, trainer.world)
    step = manifest["step"]
    if trainer.state.rollbacks.get(step, 0) >= MAX_ROLLBACKS:
        raise UserError(
            f"{problem}, after {MAX_ROLLBACKS} rollbacks to the checkpoint of step {step}: "
            "lower optimizer.learning_rate"
        )
    trainer.meter.score(trainer.state)
    resume.load(trainer, folder.path, manifest)
    trainer.state.roll_back(manifest)
    trainer.run.rewind(step)
    LOGGER.warning("%s: rolled back to step %d, continuing with other data", problem, step, extra=FIRST_RANK)
