"""The options of ``hydra/launcher=wordrun`` and ``hydra/sweeper=wordrun_optuna``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from wordrun.common.errors import ConfigError
from wordrun.common.validation import metric_of, one_of, positive


@dataclass
class LauncherOptions:
    """How the points of a sweep are started."""

    _target_: str = "hydra_plugins.wordrun_sweep.WordrunLauncher"
    """The class that Hydra calls."""
    np: int | None = None
    """Ranks per point. Without np, nodes and ppn: 1."""
    nodes: int | None = None
    """Nodes per point."""
    ppn: int | None = None
    """Ranks per node."""
    parallel: int | None = None
    """Maximum number of points at the same time. null: as many as the nodes and devices of the job, or the devices of
    this machine, allow; without devices, one per node."""
    resume: bool = False
    """Continue the sweep in hydra.sweep.dir: start its points that have not finished, from their last checkpoints."""
    args: str = ""
    """More options of launch, as one string: "--env A=1 --idle-timeout 600"."""
    submit: bool = False
    """Submit the points as jobs, rather than run them here."""
    points_per_job: int = 1
    """Points that share one submitted job."""
    job_nodes: int | None = None
    """Nodes per job. null: enough for all points of the job to run at the same time."""
    walltime: str | None = None
    """Time limit of each submitted job, H:MM:SS."""
    queue: str | None = None
    """Queue, partition or QOS of submitted jobs."""
    account: str | None = None
    """Account that submitted jobs are charged to."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid option."""
        for name in ("np", "nodes", "ppn", "parallel", "job_nodes", "points_per_job"):
            if getattr(self, name) is not None:
                yield from positive("hydra.launcher", self, name)
        if self.submit and not self.walltime:
            yield "hydra.launcher.submit=true needs hydra.launcher.walltime=H:MM:SS"
        given = [name for name in ("walltime", "queue", "account", "job_nodes") if getattr(self, name) is not None]
        if given and not self.submit:
            yield f"hydra.launcher.{given[0]} is only for submitted jobs: add hydra.launcher.submit=true"

    def launch(self, *, submit: bool = False) -> list[str]:
        """Return launch's options for one point, which runs in this job, or (``submit``) in a job of its own.

        Raises:
            ConfigError: ``args`` is not a command line.
        """
        ranks: list[tuple[str, int | str | None]] = [("-n", self.np), ("-N", self.nodes), ("--ppn", self.ppn)]
        given = [each for each in ranks if each[1]] or [("-n", 1)]
        if submit:
            given += [("--walltime", self.walltime), ("--queue", self.queue), ("--account", self.account)]
        try:
            more = shlex.split(self.args)
        except ValueError as error:
            raise ConfigError(f'hydra.launcher.args="{self.args}": {error}') from None
        return [*(word for flag, value in given if value for word in (flag, str(value))), *more]


@dataclass
class SweeperOptions:
    """How a search chooses its points."""

    _target_: str = "hydra_plugins.wordrun_sweep.OptunaSweeper"
    """The class that Hydra calls."""
    n_trials: int = 20
    """Points of the whole study, including those of earlier sessions."""
    n_jobs: int | None = None
    """Maximum number of points at the same time. null: as many as hydra/launcher=wordrun finds room for."""
    metric: str = "val_loss"
    """Metric to optimize: the best value among a point's evaluations counts."""
    direction: str = "auto"
    """min, max, or auto (known from the metric's name)."""
    sampler: str = "tpe"
    """tpe or random."""
    seed: int | None = None
    """Seed of the sampler. null: a different search each time."""
    pruner: str = "median"
    """Which points are stopped early: median (worse than the median of the others), asha (successive halving), or
    none."""
    storage: str | None = None
    """URL of the study's database. null: study.db in hydra.sweep.dir (SQLite)."""
    study_name: str = "sweep"
    """Name of the study in its database."""
    params: dict[str, str] = field(default_factory=dict)
    """Search space, as on the command line: {train.seed: "range(1,4)"}."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid option."""
        yield from positive("hydra.sweeper", self, "n_trials", "n_jobs")
        yield from one_of("hydra.sweeper.sampler", self.sampler, ("tpe", "random"))
        yield from one_of("hydra.sweeper.pruner", self.pruner, ("median", "asha", "none"))
        yield from metric_of("hydra.sweeper.metric", self.metric, self.direction, "hydra.sweeper.direction")
