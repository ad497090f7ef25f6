"""The hooks of every run: metrics, evaluation, samples, checkpoints and a progress bar."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from wordrun.common.log import FOR_FILES, LOGGER
from wordrun.common.validation import higher_is_better
from wordrun.dist.collectives import all_max
from wordrun.dist.hang import watch
from wordrun.track.metrics_jsonl import read
from wordrun.train.checkpoint import OF_DISKS, SaveError
from wordrun.train.failing import FailedHooks, dispensable
from wordrun.train.hooks.base import Hook, StopTraining, Training, due
from wordrun.train.metrics import QUIET, one_line, rate
from wordrun.train.profile import Profiler
from wordrun.train.stop import StopSignal

# A log gets a line of metrics at most this often; metrics.jsonl gets all of them.
LINE_S = 5.0


class StopTogether(Hook):
    """Ends the run before the next step if any rank has got a signal to stop, or one of its hooks has failed."""

    def __init__(self, stop: StopSignal, failed: FailedHooks) -> None:
        self._stop, self._failed = stop, failed

    def before_step(self, trainer: Training) -> None:
        """Agree with the other ranks."""
        watch.mark(trainer.step)
        failed = self._failed.seen()
        if self._stop.agreed(trainer.step, trainer.metrics.get("dt"), hook_failed=failed):
            raise StopTraining


class Log(Hook):
    """Records metrics every train.log_interval steps, and for the first and the last step.

    The log shows the first line, the last one, and one every few seconds.
    """

    def __init__(self) -> None:
        self._shown_at = float("-inf")
        self._pending: tuple[dict[str, Any], int, float] | None = None
        """The arguments of ``one_line`` for a line that has not been shown yet."""
        self._start = (0, 0.0)

    def at_start(self, trainer: Training) -> None:
        """Note where and when training starts."""
        self._start = trainer.step, time.monotonic()

    def after_step(self, trainer: Training) -> None:
        """Reduce the metrics over the ranks and pass them to the trackers."""
        state, train = trainer.state, trainer.cfg.train
        trainer.run.step_done()
        if not (due(state.step, train.log_interval) or state.step in (1, train.max_iters)):
            return
        metrics = trainer.meter.line(state)
        loads = [found for part in trainer.backend.parts if (found := part.loads()) is not None]
        each: list[list[float]] = []
        if loads:  # in a pipeline, each rank has those of other blocks
            each = all_max(torch.stack(loads).sum(0)).tolist()
            metrics["expert_load_max"] = max(map(max, each))
        state.record_metrics(metrics)
        trainer.run.log(metrics)
        if each:
            rounded = [[round(load, 3) for load in block] for block in each]
            trainer.run.log_lists({"step": state.step, "expert_load": rounded})
        begun, since = self._start
        now = time.monotonic()
        left = (now - since) / (state.step - begun) * (train.max_iters - state.step) if state.step > begun + 1 else 0
        self._pending = metrics, train.max_iters, left
        if now - self._shown_at >= LINE_S or trainer.step == train.max_iters:
            self._shown_at = now
            self._show()

    def close(self) -> None:
        """Show the last line if it has not been."""
        with contextlib.suppress(OSError):  # the disk is full, which may be why the run has ended
            self._show()

    def _show(self) -> None:
        if self._pending:
            LOGGER.info(one_line(*self._pending), extra=FOR_FILES)
        self._pending = None


class Evaluate(Hook):
    """Measures the validation loss and metrics every train.eval_interval steps and after the last."""

    def after_step(self, trainer: Training) -> None:
        """Evaluate on all ranks."""
        state, train = trainer.state, trainer.cfg.train
        if not train.eval_interval or not (due(state.step, train.eval_interval) or state.step == train.max_iters):
            return
        values, metric = trainer.measure(), train.best_metric
        state.record_evaluation(values, metric, higher=higher_is_better(metric, train.best_mode))
        trainer.run.log({"step": state.step, **values})
        best = "" if state.best_value is None else f"{state.best_value:.4f}"
        which = "" if metric == "val_loss" else f" {metric}"
        others = "".join(f"  {name} {value:.4g}" for name, value in values.items() if name not in QUIET)
        LOGGER.info(
            "step %d/%d  val_loss %.4f  best%s %s%s",
            state.step,
            train.max_iters,
            values["val_loss"],
            which,
            best or "none",
            others,
        )


class Sample(Hook):
    """Generates a sample every train.sample_interval steps and at the end."""

    def after_step(self, trainer: Training) -> None:
        """Generate a sample, except after the last step: ``at_end`` makes that one."""
        if due(trainer.step, trainer.cfg.train.sample_interval) and not trainer.done:
            self._sample(trainer)

    def at_end(self, trainer: Training) -> None:
        """Generate the last sample and log it."""
        if (text := self._sample(trainer)) is not None:
            LOGGER.info("sample at step %d:\n%s", trainer.step, text)

    def _sample(self, trainer: Training) -> str | None:
        """Return a sample, and pass it to the trackers; None: it could not be generated."""
        text = None
        with dispensable("the sample", trainer):
            text = trainer.generate()
        if text is not None:
            trainer.run.sample(trainer.step, text)
        return text


class Checkpoint(Hook):
    """Saves every train.checkpoint_interval steps, after the last step, and at each best evaluation.

    It is the last hook, so that a checkpoint includes what the others did after the same step.
    """

    def after_step(self, trainer: Training) -> None:
        """Start saving if due."""
        train, state = trainer.cfg.train, trainer.state
        if not train.checkpoint_interval:
            return
        trainer.checkpoints.raise_failure()
        best = train.save_best and state.best_step == state.step
        if best or due(state.step, train.checkpoint_interval) or trainer.done:
            trainer.save(best=best)

    def at_end(self, trainer: Training) -> None:
        """Wait for the last checkpoint, which holds the result of the run."""
        written = trainer.checkpoints.wait()
        if trainer.cfg.train.checkpoint_interval and written != trainer.step:
            problem = trainer.checkpoints.problem
            reason = "" if not problem or OF_DISKS.match(problem) else f" ({problem})"
            remedy = "continue from there" if reason else "free some space, and continue from there"
            raise SaveError(
                f"the run is finished, but its last checkpoint could not be written{reason}; the newest is from step "
                f"{written}: {remedy}"
                if written >= 0
                else f"the run is finished, but none of its checkpoints could be written{reason}"
            )


class Profile(Hook):
    """Tells the profiler where a step ends; the last hook of all."""

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler

    def after_step(self, trainer: Training) -> None:
        """End the step."""
        self._profiler.step()


class Bar(Hook):
    """Shows a progress bar on a terminal, and above it the loss curve if there is room."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._curve: TerminalCurve | None = None

    def at_start(self, trainer: Training) -> None:
        """Show the bar."""
        screen = trainer.log.screen
        if trainer.world.rank != 0 or not screen.is_terminal:
            return
        self._curve = TerminalCurve() if TerminalCurve.fits(screen) else None
        if self._curve is not None and trainer.step:
            earlier = read(trainer.run.path).training
            for step, loss in zip(earlier["step"], earlier["loss"], strict=True) if earlier.rows else ():
                self._curve.add(int(step), loss)
        self._progress = WithCurve(
            self._curve,
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=screen,
            refresh_per_second=4,
            expand=True,
        )
        self._progress.add_task("training", total=trainer.cfg.train.max_iters, loss="-", rate="")
        self._progress.start()

    def after_step(self, trainer: Training) -> None:
        """Update the bar."""
        if self._progress is None:
            return
        # A resumed run has no metrics until its first line.
        metrics = trainer.state.metrics
        loss = metrics.get("loss")
        if metrics.get("step") == trainer.step:
            self._draw(metrics)
        self._progress.update(
            self._progress.task_ids[0],
            completed=trainer.step,
            loss="-" if loss is None else f"{loss:.3f}",
            rate=rate(metrics) if "sps" in metrics else "",
        )

    def _draw(self, metrics: Mapping[str, Any]) -> None:
        if self._curve is not None and metrics.get("loss") is not None:
            self._curve.add(metrics["step"], metrics["loss"])

    def close(self) -> None:
        """Leave the bar on the screen as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class WithCurve(Progress):
    """A progress bar below a curve, if there is one."""

    def __init__(self, curve: TerminalCurve | None, *columns: ProgressColumn, **options: Any) -> None:
        self._above = curve
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the curve, the bar and an empty line: ``launch`` forwards complete lines at once, and others later."""
        if self._above is not None:
            yield self._above
        yield from super().get_renderables()
        if self._above is not None:
            yield ""


ROWS = 5
POINTS = 2000
"""Maximum number of points of the curve; above, neighboring points are averaged."""
MARGIN = 8
"""Columns for the numbers beside the curve."""
LEAST = (60, 20)
"""Columns and lines that a terminal must have: on a smaller one, the curve would leave no room for the log."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille character: two columns from the left, each from the top."""


class TerminalCurve:
    """Draws the losses so far over the width of the terminal."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._drawn = Text()
        self._width = 0

    @staticmethod
    def fits(screen: Console) -> bool:
        """Return whether ``screen`` is large enough for a curve and can show it."""
        return screen.width >= LEAST[0] and screen.height >= LEAST[1] and screen.encoding.lower().startswith("utf")

    def add(self, step: int, loss: float) -> None:
        """Add a point; points of this and later steps are removed, because the run has rolled back."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if math.isfinite(loss):
            self._points.append((step, loss))
        if len(self._points) > POINTS:
            self._points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs(self._points)]
        self._width = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the curve, once it has two points."""
        if self._width != options.max_width:  # else it has not changed since the last refresh
            self._width = options.max_width
            self._drawn = self._draw(self._width - MARGIN)
        if self._drawn:
            yield self._drawn

    def _draw(self, columns: int) -> Text:
        if len(self._points) < 2 or columns < LEAST[0] // 2:  # the terminal has become narrow
            return Text()
        heights, lowest, highest = self._heights(2 * columns, 4 * ROWS)
        cells = [[0] * columns for _ in range(ROWS)]
        for x, (before, now) in enumerate(pairwise([heights[0], *heights])):
            low, high = sorted((before + (now > before) - (now < before) if now != before else now, now))
            for y in range(low, high + 1):
                cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        labels = {0: f"{highest:.3g}", ROWS - 1: f"{lowest:.3g}"}
        text = Text(no_wrap=True)
        for number, row in enumerate(cells):
            text.append(f"{labels.get(number, ''):>{MARGIN - 1}} ", "dim")
            text.append("".join(chr(0x2800 + bits) for bits in row) + "\n" * (number < ROWS - 1), "cyan")
        return text

    def _heights(self, columns: int, rows: int) -> tuple[list[int], float, float]:
        """Return the row of the curve in each column of dots, from the top, and the lowest and the highest loss."""
        first, last = self._points[0][0], self._points[-1][0]
        means: list[list[float]] = [[] for _ in range(columns)]
        for step, loss in self._points:
            means[int((columns - 1) * (step - first) / (last - first))].append(loss)
        known = [(x, sum(losses) / len(losses)) for x, losses in enumerate(means) if losses]
        lowest, highest = min(loss for _, loss in known), max(loss for _, loss in known)
        scale = (rows - 1) / (highest - lowest or 1.0)
        heights = [rows - 1] * columns
        for (x, a), (end, b) in pairwise(known):
            for column in range(x, end + 1):
                loss = a + (b - a) * (column - x) / (end - x)
                heights[column] = round((highest - loss) * scale)
        return heights, lowest, highest


def pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the points two by two; the last one is paired with itself if their number is odd."""
    return [(points[i], points[min(i + 1, len(points) - 1)]) for i in range(0, len(points), 2)]
