"""wordrun's plugins for Hydra. Hydra imports this module whenever it composes a config, so it must import quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from wordrun.study.options import LauncherOptions, SweeperOptions

ConfigStore.instance().store(group="hydra/launcher", name="wordrun", node=LauncherOptions, provider="wordrun")
ConfigStore.instance().store(group="hydra/sweeper", name="wordrun_optuna", node=SweeperOptions, provider="wordrun")


class WordrunLauncher(Launcher):
    """``hydra/launcher=wordrun``: every point of a sweep is a launch of its own."""

    def __init__(self, **options: Any) -> None:
        self.options = LauncherOptions(**options)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra has composed; exit if the options are not valid, before anything is written."""
        from wordrun.study import hydra_launcher

        self.context, self.config = hydra_context, config
        hydra_launcher.prepare(config, self.options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points; exit with their status unless all have finished."""
        from wordrun.study import hydra_launcher

        if status := hydra_launcher.launch(self.context, self.config, self.options, job_overrides):
            raise SystemExit(status)
        return [JobReturn(list(overrides), status=JobStatus.COMPLETED) for overrides in job_overrides]


class OptunaSweeper(Sweeper):
    """``hydra/sweeper=wordrun_optuna``: Optuna chooses the points, and stops unpromising ones."""

    def __init__(self, **options: Any) -> None:
        self.options = SweeperOptions(**options)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra has composed; exit if the options are not valid, before anything is written."""
        from wordrun.study import hydra_launcher

        self.context, self.composed = hydra_context, config
        hydra_launcher.prepare(config, self.options, hydra_launcher.launcher_options(config))

    def sweep(self, arguments: list[str]) -> None:
        """Search; exit with another status than 0 if not all points could be tried."""
        from wordrun.study import hydra_launcher

        if status := hydra_launcher.search(self.context, self.composed, self.options, arguments):
            raise SystemExit(status)
