"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import textwrap
from typing import Any

from wordrun.track.base import RunInfo, Tracker, missing
from wordrun.track.options import TensorBoardConfig


class TensorBoardTracker(Tracker):
    """Scalars, samples, and the config as hparams, below tensorboard/."""

    def __init__(self, options: TensorBoardConfig, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        try:
            # Imported here, because the package is an extra. A line of metrics is written as one Summary: add_scalar
            # would write an event for each metric, which takes 15 times as long.
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard.summary import hparams
        except ImportError as error:
            raise missing("tensorboard", error) from None
        self._summary = Summary
        self._open(run.step if run.logged >= 0 else -1)
        if run.logged < 0:
            for summary in hparams(run.flat(), dict.fromkeys(("loss", "val_loss"), 0.0)):  # type: ignore[no-untyped-call]
                self._writer.file_writer.add_summary(summary)

    def _open(self, step: int) -> None:
        """Open a new file, which continues from ``step``: TensorBoard hides later steps in earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        # The first file needs a purge step, too: TensorBoard takes the first that it finds for the run's beginning.
        purge, folder = step + 1, str(self.run.path / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=purge, flush_secs=self.options.flush_s)

    def log(self, metrics: dict[str, Any]) -> None:
        """Pass a line of metrics to the writer's thread."""
        known = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), metrics["step"])

    def sample(self, step: int, text: str) -> None:
        """Record the text, indented so that TensorBoard does not take it for Markdown."""
        self._writer.add_text("sample", textwrap.indent(text, "    "), step)

    def rewind(self, step: int, logged: int) -> None:
        """Continue from ``step`` in a new file."""
        self._writer.close()
        self._open(step)

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Write what is pending, and close."""
        self._writer.close()
