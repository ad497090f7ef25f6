"""MLflow: a run on the tracking server that mlflow itself would use."""

from __future__ import annotations

import time
from typing import Any

from wordrun.track.base import BackgroundTracker, RunInfo, missing
from wordrun.track.options import MlflowConfig

PARAMS = 100
"""MLflow takes at most this many parameters at once."""


class MlflowTracker(BackgroundTracker):
    """One MLflow run."""

    def __init__(self, options: MlflowConfig, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise missing("mlflow", error) from None
        self._entities, self._client = entities, MlflowClient(tracking_uri=options.uri)
        self._id = state.get("id") or self._create()
        self._client.update_run(self._id, status="RUNNING")

    def _create(self) -> str:
        found = self._client.get_experiment_by_name(self.options.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.options.experiment)
        created = str(self._client.create_run(experiment, run_name=self.run.path.name).info.run_id)
        params = [self._entities.Param(name, str(value)) for name, value in self.run.flat().items()]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(created, params=params[first : first + PARAMS])
        return created

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Send a line of metrics."""
        now = int(1000 * time.time())
        values = [self._entities.Metric(name, value, now, step) for name, value in metrics.items() if name != "step"]
        self.send(self._client.log_batch, self._id, values)

    def sample(self, step: int, text: str) -> None:
        """Send the text as an artifact."""
        self.send(self._client.log_text, self._id, text, f"samples/step-{step:08d}.txt")

    def state(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"id": self._id}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Send what is pending, and close the run."""
        self.send(self._client.set_terminated, self._id, "FAILED" if exit_status else "FINISHED")
        self.drain()
