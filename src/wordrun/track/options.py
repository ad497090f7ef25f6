"""Options of trackers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wordrun.common.section import Section
from wordrun.common.validation import not_negative, one_of


@dataclass
class TrackerConfig(Section):
    """metrics.jsonl and samples.txt in the run directory; every run writes these."""


@dataclass
class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    mode: str = "auto"
    """auto (online if there is an API key and network access, else offline), online or offline."""
    project: str = "wordrun"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the API key's default."""
    group: str | None = None
    """W&B group of runs."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    probe_s: float = 3.0
    """Seconds to wait for the server before recording offline (mode=auto)."""

    def problems(self) -> Iterable[str]:
        yield from one_of("tracker.wandb.mode", self.mode, ["auto", "online", "offline"])
        yield from not_negative("tracker.wandb", self, "probe_s")


@dataclass
class TensorBoardConfig(TrackerConfig):
    """TensorBoard's event files, in tensorboard/ in the run directory."""

    flush_s: float = 10.0
    """Maximum number of seconds until logged values are written to the file."""

    def problems(self) -> Iterable[str]:
        yield from not_negative("tracker.tensorboard", self, "flush_s")


@dataclass
class MlflowConfig(TrackerConfig):
    """MLflow."""

    uri: str | None = None
    """Tracking server or database; null: $MLFLOW_TRACKING_URI, or MLflow's own default in the working directory."""
    experiment: str = "wordrun"
    """MLflow experiment."""


@dataclass
class TrackioConfig(TrackerConfig):
    """Hugging Face's Trackio."""

    project: str = "wordrun"
    """Trackio project."""
    space_id: str | None = None
    """Hugging Face Space that shows the run, such as user/space; null: a database on this machine."""
