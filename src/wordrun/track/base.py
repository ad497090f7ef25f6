"""The base class of trackers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun.config import Config
from wordrun.registry import parts

LEGEND = {
    "step": "number of optimizer steps so far",
    "loss": "training loss at this step, averaged over all ranks; of text [nats/token]",
    "val_loss": "mean loss on the fixed validation set; of text [nats/token]",
    "val_NAME": "mean of a metric on the fixed validation set, such as val_accuracy (a share of 1) or val_perplexity",
    "lr": "learning rate at this step",
    "grad_norm": "global gradient norm, before clipping",
    "dt": "time per step, averaged since the previous line [s]",
    "dtf": "forward time per step; not measured where forward and backward passes interleave (pipelines) [s]",
    "dtb": "backward time per step, including communication [s]",
    "sps": "examples (of text: sequences) per second, all ranks",
    "sps_per_gpu": "examples per second per rank",
    "tps": "tokens per second, all ranks; only for text, like tps_per_gpu and tokens",
    "tps_per_gpu": "tokens per second per rank",
    "mfu": "model FLOPs utilization: achieved share of the devices' peak FLOP/s [%]",
    "tokens": "training tokens processed so far, all ranks",
    "time": "elapsed wall time [s]",
}
"""The metrics in metrics.jsonl and in trackers, with their meaning."""


@dataclass(frozen=True)
class RunInfo:
    """The run that trackers record."""

    cfg: Config
    path: Path
    """The run directory, which exists."""
    facts: dict[str, Any]
    """Description of the run besides its config, such as the origin of its data."""
    logged: int = -1
    """The last step logged before the run was resumed, which may be after its checkpoint; -1: none."""


class Tracker:
    """Records what rank 0 reports; other ranks have no trackers. A subclass only has to define ``log``.

    Args:
        options: the tracker's section of the config.
        run: the run.
        state: what ``state`` returned when the checkpoint being resumed was saved; empty for a new run.
    """

    def __init__(self, options: Any, run: RunInfo, state: dict[str, Any]) -> None:
        self.options, self.run = options, run

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one line of metrics with its ``step``; metrics that do not apply are None."""
        raise NotImplementedError

    def sample(self, step: int, text: str) -> None:
        """Record a generated text."""

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """Record the metrics of the run from which this one branches off."""
        for line in lines:
            self.log(line)

    def rewind(self, step: int, logged: int) -> None:
        """Continue from ``step``, to which the run has rolled back from step ``logged``."""

    def state(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues this record, JSON-serialisable."""
        return {}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Record the run's summary and close."""


def build(run: RunInfo, states: dict[str, Any]) -> dict[str, Tracker]:
    """Return the trackers selected by the config; only rank 0 calls this.

    Args:
        run: the run.
        states: states of the trackers of the run being continued, by name.
    """
    trackers: dict[str, Tracker] = {}
    try:
        for name, options in run.cfg.tracker.items():
            trackers[name] = parts("tracker")[name].build(options, run, states.get(name, {}))
    except Exception:
        for tracker in trackers.values():
            tracker.finish({}, exit_status=1)
        raise
    return trackers
