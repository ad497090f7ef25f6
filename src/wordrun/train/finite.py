"""Steps whose gradients are not finite: stop, leave them out, or go back to the last checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wordrun import dist
from wordrun.checkpoint import folder as folders
from wordrun.dist.collectives import all_sum
from wordrun.errors import UserError
from wordrun.log import FIRST_RANK, LOGGER
from wordrun.train import resume
from wordrun.train.hooks import due

if TYPE_CHECKING:
    from wordrun.train.trainer import Trainer

# Of one checkpoint: if other data do not help either, nothing will.
MOST_ROLLBACKS = 3
MOST_LEFT_OUT = 100


def counts(trainer: Trainer) -> bool:
    """Say whether the step that was taken last counts; its norm is the same on all ranks, which all call this.

    An accelerator is asked at logged steps and before a checkpoint alone: it would have to be waited for.

    Raises:
        UserError: its gradients are not finite, and train.on_nonfinite=stop, or going back does not help.
    """
    train, step = trainer.cfg.train, trainer.step + 1
    intervals = (train.log_interval, train.checkpoint_interval, train.eval_interval)
    at_once = trainer.backend.device.type == "cpu" or train.on_nonfinite == "skip"
    asked = at_once or step == train.max_iters or any(due(step, interval) for interval in intervals)
    if not asked or is_finite(trainer):
        trainer.left_out = 0
        return True
    what = f"the gradients are not finite any more at step {step}"
    if train.on_nonfinite == "skip":
        trainer.left_out += 1
        if trainer.left_out > MOST_LEFT_OUT:
            raise UserError(f"{what}, {MOST_LEFT_OUT} times in a row: lower optimizer.learning_rate")
        LOGGER.warning("%s: the step is left out (train.on_nonfinite=skip)", what, extra=FIRST_RANK)
        return False
    if train.on_nonfinite == "rollback" and train.checkpoint_interval:
        _roll_back(trainer, what)
        return False
    raise UserError(f"{what}: lower optimizer.learning_rate, or use train.on_nonfinite=skip or rollback")


def is_finite(trainer: Trainer) -> bool:
    """Say whether the last step was finite, the same on all ranks, which all must call this."""
    if trainer.backend.dtype == torch.float16:
        # Gradients may well not be, where the scaler looks for the largest scale.
        return bool(torch.isfinite(all_sum(trainer.result.loss)))
    return bool(torch.isfinite(trainer.result.grad_norm))


def _roll_back(trainer: Trainer, what: str) -> None:
    """Return to the newest checkpoint, and go on with the data that come next now."""
    trainer.checkpoints.wait()
    found = dist.share(folders.all_in(trainer.run.path) if trainer.world.rank == 0 else None, trainer.world)
    if not found:
        raise UserError(f"{what}, and there is no checkpoint yet to go back to: lower optimizer.learning_rate")
    resumed = resume.open_newest(found, trainer.world)
    step = resumed.manifest["step"]
    trainer.rollbacks[step] += 1
    if trainer.rollbacks[step] > MOST_ROLLBACKS:
        raise UserError(
            f"{what}, as {MOST_ROLLBACKS} times before after the checkpoint of step {step}: "
            "lower optimizer.learning_rate"
        )
    position = trainer.position
    resume.load(trainer, resumed)
    trainer.position = position
    trainer.run.rewind(step)
    LOGGER.warning("%s: back to step %d, and on with other data", what, step, extra=FIRST_RANK)
