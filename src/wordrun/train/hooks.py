"""What happens between steps. Each hook decides for itself whether it is its turn; all run on every rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wordrun.log import FOR_FILES, LOGGER
from wordrun.train.checkpoint import SaveError
from wordrun.train.metrics import LEGEND, one_line

if TYPE_CHECKING:
    from wordrun.train.trainer import Trainer


class Hook:
    """Called at the start, after every step, and when the last step is done."""

    def at_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def after_step(self, trainer: Trainer) -> None:
        """After each step; ``trainer.step`` counts it already."""

    def at_end(self, trainer: Trainer) -> None:
        """After the last step, unless the run was interrupted."""

    def close(self) -> None:
        """However the run ended."""


def due(step: int, interval: int) -> bool:
    """Say whether ``step`` is a multiple of ``interval``; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


class Log(Hook):
    """A line of metrics every train.log_interval steps, and for the first and the last step."""

    def at_start(self, trainer: Trainer) -> None:
        """Say what the names mean."""
        legend = "\n".join(f"  {name:<12} {meaning}" for name, meaning in LEGEND.items())
        LOGGER.info("metrics, in metrics.jsonl and W&B under the same names:\n%s", legend)

    def after_step(self, trainer: Trainer) -> None:
        """Reduce the figures over the ranks and hand them to the trackers."""
        trainer.meter.count_step()
        step, train = trainer.step, trainer.cfg.train
        if not (due(step, train.log_interval) or step in (1, train.max_iters)):
            return
        metrics = trainer.meter.line(step, trainer.position, trainer.result, trainer.lr)
        trainer.metrics |= metrics
        trainer.stop.pace(metrics["dt"])
        trainer.run.log(metrics)
        LOGGER.info(one_line(metrics, train.max_iters), extra=FOR_FILES)


class Evaluate(Hook):
    """The validation loss every train.eval_interval steps and after the last."""

    def after_step(self, trainer: Trainer) -> None:
        """Evaluate on all ranks, and note the best."""
        train = trainer.cfg.train
        if not train.eval_interval or not (due(trainer.step, train.eval_interval) or trainer.step == train.max_iters):
            return
        loss = trainer.evaluate()
        best = trainer.metrics.get("best_val_loss", math.inf)
        if loss < best:  # which NaN is not
            best, trainer.improved_at = loss, trainer.step
        trainer.metrics |= {"val_loss": loss, "best_val_loss": best}
        trainer.run.log({"step": trainer.step, "val_loss": loss})
        LOGGER.info("step %d/%d  val_loss %.4f  best %.4f", trainer.step, train.max_iters, loss, best)


class Sample(Hook):
    """A generated text every train.sample_interval steps and at the end."""

    def after_step(self, trainer: Trainer) -> None:
        """Generate, unless the end is near enough to do it there."""
        if due(trainer.step, trainer.cfg.train.sample_interval) and trainer.step < trainer.cfg.train.max_iters:
            self._sample(trainer)

    def at_end(self, trainer: Trainer) -> None:
        """Generate the last sample and show it."""
        text = self._sample(trainer)
        if text:
            LOGGER.info("sample after %d steps:\n%s", trainer.step, text)

    def _sample(self, trainer: Trainer) -> str:
        if not trainer.cfg.train.sample_tokens:
            return ""
        text = trainer.generate()
        trainer.run.sample(trainer.step, text)
        return text


class Checkpoint(Hook):
    """A checkpoint every train.checkpoint_interval steps, after the last, and of each best evaluation."""

    def after_step(self, trainer: Trainer) -> None:
        """Begin one, if it is due."""
        train, step = trainer.cfg.train, trainer.step
        if not train.checkpoint_interval:
            return
        trainer.checkpoints.look()
        best = train.save_best and trainer.improved_at == step
        if best or due(step, train.checkpoint_interval) or step == train.max_iters:
            trainer.save(best=best)

    def at_end(self, trainer: Trainer) -> None:
        """Wait for the last one, without which the run would have been in vain."""
        trainer.checkpoints.wait()
        if trainer.cfg.train.checkpoint_interval and trainer.checkpoints.written != trainer.step:
            raise SaveError(
                f"the run is finished, but its last checkpoint could not be written; it has one of step "
                f"{trainer.checkpoints.written}: make room, and take the last steps again by train.resume=auto"
                if trainer.checkpoints.written >= 0
                else "the run is finished, but none of its checkpoints could be written"
            )


class Bar(Hook):
    """A progress bar where a person watches; elsewhere nothing."""

    def __init__(self, trainer: Trainer) -> None:
        columns = (
            TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[tps]} tokens/s"), TimeRemainingColumn(),
        )  # fmt: skip
        screen = trainer.log.screen
        self.progress = Progress(
            *columns, console=screen, refresh_per_second=4, expand=True,
            disable=trainer.world.rank != 0 or not screen.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("training", total=trainer.cfg.train.max_iters, loss="-", tps="-")

    def at_start(self, trainer: Trainer) -> None:
        """Show it."""
        self.progress.start()

    def after_step(self, trainer: Trainer) -> None:
        """Move it on."""
        metrics = trainer.metrics
        # A continued run has no figures of its own yet.
        loss, tps = metrics.get("loss"), metrics.get("tps")
        self.progress.update(
            self.task, completed=trainer.step, loss="-" if loss is None else f"{loss:.3f}",
            tps="-" if tps is None else f"{tps:,.0f}",
        )  # fmt: skip

    def close(self) -> None:
        """Leave it as it is."""
        self.progress.stop()
