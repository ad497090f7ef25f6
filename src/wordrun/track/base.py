"""The base class of trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun.common.errors import UserError
from wordrun.common.section import value_text
from wordrun.config.registry import parts
from wordrun.config.schema import Config, as_dict

LEGEND = {
    "step": "number of optimizer steps so far",
    "loss": "training loss at this step, averaged over all ranks; for text [nats/token]",
    "val_loss": "mean loss on the fixed validation set; for text [nats/token]",
    "val_bpb": (
        "bits per byte of the original validation text, comparable between tokenizers; for pairs, of the answers"
    ),
    "val_NAME": "mean of a metric on the fixed validation set, such as val_accuracy (a fraction) or val_perplexity",
    "lr": "learning rate at this step",
    "grad_norm": "global gradient norm, before clipping",
    "dt": "time per step without dt_hooks, averaged since the previous line; like its parts, mean over all ranks [s]",
    "dtf": "forward time per step; not measured where forward and backward passes interleave (pipelines) [s]",
    "dtb": "backward time per step, without dt_comm [s]",
    "dt_data": "time per step in which a rank waits for data [s]",
    "dt_comm": (
        "time per step in which a rank waits for communication that does not overlap with computation; with sharded "
        "weights on accelerators it is not known, and is part of dtf and dtb [s]"
    ),
    "dt_optimizer": "time per step of the optimizer, including clipping [s]",
    "dt_hooks": (
        "time between steps, per step: logging, evaluations, checkpoints and other hooks; of the rank that takes "
        "longest [s]"
    ),
    "slowest_rank": (
        "the rank that took longest since the previous line to load data and compute, not counting waits for others"
    ),
    "slowest_by": "how far it was behind the median of the ranks, per step [s]",
    "sps": "examples (for text: sequences) per second, all ranks",
    "sps_per_gpu": "examples per second per rank",
    "tps": "tokens per second, all ranks; only for text, like tps_per_gpu and tokens",
    "tps_per_gpu": "tokens per second per rank",
    "mfu": "model FLOPs utilization: achieved share of the devices' peak FLOP/s [%]",
    "expert_load_max": (
        "with a mixture of experts: the most tokens that an expert got in this step, relative to the mean of its block"
    ),
    "expert_load": "the same for each expert of each block, as lists on a line of its own in metrics.jsonl",
    "spike_score": (
        "the highest score of a loss since the previous line: by how many standard deviations it was above the mean of "
        "the 128 steps before"
    ),
    "spikes": "number of losses so far with a score of at least 6",
    "memory": "memory in use, of the rank that uses most: of its device or, on a CPU, of its process [GiB]",
    "memory_peak": "the most memory that was in use so far, of the rank with the highest peak [GiB]",
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
    step: int = 0
    """The step from which the run continues; 0: it starts."""

    def flat(self) -> dict[str, bool | int | float | str]:
        """Return the config and the facts by names such as model.n_layer, for trackers that take no nested values."""
        return {**dict(_flat(as_dict(self.cfg))), **dict(_flat(self.facts))}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else value_text(value)


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

    def log_lists(self, metrics: dict[str, Any]) -> None:
        """Record a line of metrics that are lists, with its ``step``; only metrics.jsonl has them."""

    def sample(self, step: int, text: str) -> None:
        """Record a generated text."""

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """Record the metrics of the run from which this one branches off."""
        for line in lines:
            self.log(line)

    def rewind(self, step: int, logged: int) -> None:
        """Continue from ``step``, to which the run has rolled back from step ``logged``."""

    def state(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues this record, JSON-serializable."""
        return {}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Record the run's summary and close."""

    def abandon(self) -> None:
        """Release resources that would fail again at exit; called instead of ``finish`` after a failure."""


class AppendOnlyTracker(Tracker):
    """The base class of trackers that cannot delete steps: what a resumed run repeats is not recorded again."""

    def __init__(self, options: Any, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        self._logged = run.logged if state else -1

    def log(self, metrics: dict[str, Any]) -> None:
        """Record a line of metrics, unless a line of its step has been recorded before the run was resumed."""
        if metrics["step"] > self._logged:
            self.append(metrics["step"], {name: value for name, value in metrics.items() if value is not None})

    def state(self) -> dict[str, Any]:
        """Return a mark that this tracker has recorded the run so far; one that is added on resuming lacks it."""
        return {"records": True}

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the ``metrics`` of ``step``, numbers by name."""
        raise NotImplementedError

    def rewind(self, step: int, logged: int) -> None:
        """Skip the repeated steps up to ``logged``, which are recorded already."""
        self._logged = max(self._logged, logged)


class BackgroundTracker(AppendOnlyTracker):
    """The base class of trackers whose library another thread calls, so that no step waits for it."""

    def __init__(self, options: Any, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        self._thread, self._sent = ThreadPoolExecutor(1), deque[Future[Any]]()

    def send(self, call: Callable[..., Any], *values: Any) -> Future[Any]:
        """Let the thread call ``call(*values)`` after everything sent before; raise the error of an earlier call."""
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        self._sent.append(self._thread.submit(call, *values))
        return self._sent[-1]

    def drain(self) -> None:
        """Wait for the thread to end; raise its first error."""
        self._thread.shutdown()
        for sent in self._sent:
            sent.result()

    def abandon(self) -> None:
        """Drop what is pending."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def missing(tracker: str, error: ImportError) -> UserError:
    """Return the error that the library of ``tracker``, an extra of wordrun's package, cannot be imported."""
    return UserError(f"tracker={tracker}: {error}; pip install 'wordrun[{tracker}]', or use tracker=jsonl")


def build(run: RunInfo, states: dict[str, Any]) -> Iterator[tuple[str, Tracker]]:
    """Yield the trackers selected by the config, with their names; only rank 0 calls this.

    Args:
        run: the run.
        states: states of the trackers of the run being continued, by name.
    """
    for name, options in run.cfg.tracker.items():
        yield name, parts("tracker")[name].build(options, run, states.get(name, {}))
