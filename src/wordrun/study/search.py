"""``hydra/sweeper=wordrun_optuna``: Optuna chooses the points of a sweep and stops unpromising ones."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from wordrun.common.errors import ConfigError, first_line
from wordrun.common.log import console
from wordrun.common.validation import higher_is_better
from wordrun.study import placements
from wordrun.study.launch_pool import Ended, LaunchPool
from wordrun.study.options import LauncherOptions, SweeperOptions
from wordrun.study.points import PRUNED, Point, best
from wordrun.study.progress import Progress
from wordrun.study.sweep import FILE, Sweep, result
from wordrun.track import metrics_jsonl

LOOK_S = 1.0
"""Seconds between checks of the metrics of running points."""
BEST = 10
"""Points in the final table."""
FIGURE = "parallel.png"
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


def parse(arguments: Sequence[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Return the search space by the options' names, and the overrides that are the same for all points.

    Raises:
        ConfigError: an override cannot be searched over, or none is.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(arguments))
    except HydraException as error:
        raise ConfigError(first_line(error)) from None
    space: dict[str, BaseDistribution] = {}
    fixed: dict[str, str] = {}
    for text, override in zip(arguments, parsed, strict=True):
        key = override.get_key_element()
        if override.is_sweep_override():
            try:
                space[key] = distribution(override)
            except ValueError as error:
                raise ConfigError(f"{text}: {first_line(error)}") from None
        else:
            fixed[key] = text
    if not space:
        raise ConfigError(
            "nothing to search: write options such as optimizer.learning_rate='interval(1e-4,1e-2)'",
            page="sweeps.md#searching-with-optuna",
        )
    return space, [text for key, text in fixed.items() if key not in space]


def distribution(override: Override) -> BaseDistribution:
    """Return Optuna's distribution for an override, whose value is in Hydra's syntax for sweeps.

    Raises:
        ValueError: the syntax has no meaning for a search, or the range is empty.
    """
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log="log" in value.tags)
        return FloatDistribution(value.start, value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep):
        assert value.start is not None
        assert value.stop is not None
        numbers = list(value.range())
        if not numbers:
            raise ValueError("the range is empty")
        if all(isinstance(number, int) for number in numbers):
            return IntDistribution(int(numbers[0]), int(numbers[-1]), step=int(value.step))
        return FloatDistribution(float(numbers[0]), float(numbers[-1]), step=float(value.step))
    if isinstance(value, Glob):
        raise ValueError("a search takes choice(...), range(...), interval(...) or values with commas")
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def run(
    folder: Path,
    command: Sequence[str],
    launcher: LauncherOptions,
    options: SweeperOptions,
    space: Mapping[str, BaseDistribution],
    fixed: Sequence[str],
    subdir: Callable[[Sequence[str], int], str],
) -> int:
    """Search until the study has ``options.n_trials`` points, and show the best; return the exit status.

    Raises:
        ConfigError: the study cannot be opened, another process searches in this folder, or no point fits.
    """
    if launcher.submit:
        raise ConfigError(
            "hydra.launcher.submit=true: a search waits for its points, so submit the whole search instead: "
            "launch --submit -N 4 --walltime 4:00:00 -- wordrun -m hydra/sweeper=wordrun_optuna ..."
        )
    higher = bool(higher_is_better(options.metric, options.direction))
    launcher = replace(launcher, resume=(folder / FILE).exists())
    with replace(Sweep.create(folder, command, launcher), metric=options.metric, higher=higher) as sweep:
        found = placements.find(sweep.options)[: options.n_jobs]
        sweep.save()
        try:
            study = open_study(folder, options, higher=higher, several=len(found) > 1)
            check_space(study, space, folder)
            search = Search(study, sweep, options, higher, dict(space), list(fixed), subdir)
            return search.run(found)
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            raise ConfigError(f"the study in {options.storage or folder / 'study.db'}: {first_line(error)}") from None


def open_study(folder: Path, options: SweeperOptions, *, higher: bool, several: bool) -> optuna.Study:
    """Return the study, a new one if there is none; points that were running are retried."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = {
        "median": optuna.pruners.MedianPruner,
        "asha": optuna.pruners.SuccessiveHalvingPruner,
        "none": optuna.pruners.NopPruner,
    }[options.pruner]()
    name, storage = options.study_name, options.storage or f"sqlite:///{(folder / 'study.db').absolute()}"
    before = optuna.create_study(
        storage=storage, study_name=name, direction="maximize" if higher else "minimize", load_if_exists=True
    )
    # The same seed again would draw the same points again.
    seed = None if options.seed is None else options.seed + len(before.get_trials(deepcopy=False))
    sampler = (
        optuna.samplers.RandomSampler(seed)
        if options.sampler == "random"
        else optuna.samplers.TPESampler(seed=seed, constant_liar=several)
    )
    study = optuna.load_study(storage=storage, study_name=name, sampler=sampler, pruner=pruner)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.set_user_attr("again", [*study.user_attrs.get("again", []), trial.number])
        study.enqueue_trial(trial.params)
    return study


def check_space(study: optuna.Study, space: Mapping[str, BaseDistribution], folder: Path) -> None:
    """Check that the search space fits a study: Optuna cannot add other choices of an option, or another kind of range.

    Raises:
        ConfigError: an option differs.
    """
    for trial in study.get_trials(deepcopy=False):
        for key, before in trial.distributions.items():
            now = space.get(key, before)
            choices = isinstance(before, CategoricalDistribution) and before != now
            if choices or type(before) is not type(now) or getattr(before, "log", 0) != getattr(now, "log", 0):
                raise ConfigError(
                    f"{key}: the study in {folder} has {before}, not {now}: keep to these, or choose another "
                    "hydra.sweep.dir"
                )


class Search:
    """A search in progress."""

    def __init__(
        self,
        study: optuna.Study,
        sweep: Sweep,
        options: SweeperOptions,
        higher: bool,
        space: dict[str, BaseDistribution],
        fixed: list[str],
        subdir: Callable[[Sequence[str], int], str],
    ) -> None:
        self.optuna_study, self.sweep, self.options, self.higher = study, sweep, options, higher
        self.space, self.fixed, self.subdir = space, fixed, subdir
        self.runner = sweep.runner()
        self.trials: dict[str, Trial] = {}
        """The trials of running points, by the points' names."""
        self.pruned: set[str] = set()
        self.reported: dict[str, int] = {}
        """The last step of a point whose evaluation Optuna knows."""

    def run(self, found: Sequence[placements.Placement]) -> int:
        """Run the points in the placements ``found`` and return the exit status."""
        before = self.count()
        print(
            f"sweep {self.sweep.dir}: {max(0, self.options.n_trials - before)} of {self.options.n_trials} points, "
            f"{len(found)} at a time",
            flush=True,
        )
        looked = 0.0
        sweep, keys = self.sweep, self.space
        with LaunchPool(sweep.dir, sweep.command, sweep.options.launch(), found) as pool:
            before_now = self.optuna_study.get_trials(deepcopy=False, states=tuple(STATES))
            known = {str(t.user_attrs["point"]): STATES[t.state] for t in before_now if "point" in t.user_attrs}
            progress = Progress(
                sweep.table,
                known,
                result,
                lambda point: [word for word in point.overrides if word.partition("=")[0] in keys],
            )
            while pool.running or (self.count() < self.options.n_trials and not pool.ending):
                while pool.free and not pool.ending and self.count() + len(self.trials) < self.options.n_trials:
                    self.begin(pool, progress)
                for ended in pool.wait():
                    self.end(ended, progress)
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self.look(pool)
        text = progress.summary(sweep.points)
        self.show()
        print(f"sweep {self.sweep.dir}: {text}; {self.count()} of {self.options.n_trials} points tried", flush=True)
        if pool.ending:
            print(f"the same command with hydra.sweep.dir={self.sweep.dir} continues the search", flush=True)
            return pool.exit_status
        return 0 if self.finished() else 1

    def count(self) -> int:
        """Return how many points have ended, without those that are retried."""
        again = set(self.optuna_study.user_attrs.get("again", []))
        ended = self.optuna_study.get_trials(deepcopy=False, states=tuple(STATES))
        return sum(trial.number not in again for trial in ended)

    def finished(self) -> list[FrozenTrial]:
        """Return the completed trials, the best ones first."""
        trials = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return sorted(trials, key=lambda trial: (trial.value or 0.0) * (-1 if self.higher else 1))

    def begin(self, pool: LaunchPool, progress: Progress) -> None:
        """Start the next point, unless the same one has been run before: then its value counts again."""
        trial = self.optuna_study.ask(self.space)
        overrides = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
        point = self.sweep.add(overrides, self.subdir)
        trial.set_user_attr("point", int(point.name))
        self.sweep.save()
        if any(each.point == point for each in pool.running) or point.state() == "finished":
            value = best(point.dir, self.options.metric, higher=self.higher)
            self.optuna_study.tell(trial, value, TrialState.FAIL if value is None else TrialState.COMPLETE)
            return
        self.trials[point.name], self.reported[point.name] = trial, -1
        pool.start(point)
        progress.started(point)

    def look(self, pool: LaunchPool) -> None:
        """Report new evaluations of running points to Optuna, and stop those that it prunes."""
        for point in [each.point for each in pool.running if each.point.name not in self.pruned]:
            if self.report(point):
                self.pruned.add(point.name)
                pool.stop(point)

    def report(self, point: Point) -> bool:
        """Report new evaluations of a point to Optuna; return whether it prunes the point."""
        hopeless = False
        for step, value in metrics_jsonl.evaluations(point.dir, self.options.metric):
            if step <= self.reported[point.name]:  # also if a continued run has evaluated it again
                continue
            self.trials[point.name].report(value, step)
            self.reported[point.name] = step
            # A pruner compares evaluations at the same step, and several may be new.
            hopeless = hopeless or self.trials[point.name].should_prune()
        return hopeless

    def end(self, ended: Ended, progress: Progress) -> None:
        """Tell Optuna how a point has ended; one that is to be continued stays open in the study."""
        point = ended.point
        self.report(point)
        trial = self.trials.pop(point.name)
        value, state = best(point.dir, self.options.metric, higher=self.higher), ended.state
        if state == "finished" and value is None:
            state = "failed"
        if state != "finished" and point.name in self.pruned:
            state = PRUNED
            self.sweep.table.put([point], state)
        else:
            state = self.runner.record(point, state)
        if state == "finished":
            self.optuna_study.tell(trial, value)
        elif state != "stopped":
            self.optuna_study.tell(trial, state=TrialState.PRUNED if state == PRUNED else TrialState.FAIL)
        progress.ended(ended, state)
        self.runner.check_disk(point)

    def show(self) -> None:
        """Print the best points, and draw all of them."""
        from rich.table import Table

        trials = self.finished()
        if not trials:
            return
        table = Table(box=None, pad_edge=False, header_style="bold", title=f"best {self.options.metric}")
        for name in ("point", self.options.metric, *self.space):
            table.add_column(name, justify="right", overflow="fold")
        points = {trial.user_attrs.get("point", trial.number): trial for trial in trials}  # one may count several times
        for trial in list(points.values())[:BEST]:
            values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.params.values()]
            table.add_row(str(trial.user_attrs.get("point", "")), f"{trial.value:.4f}", *values)
        console().print(table)
        print(f"all points: {self.draw()}")
        if found := self.point(trials[0]):
            print(f"best run: {found.dir}")

    def draw(self) -> Path:
        """Draw completed points in parallel coordinates, an axis for the metric and each option; return the file."""
        from matplotlib import pyplot
        from optuna.visualization.matplotlib import plot_parallel_coordinate

        path = self.sweep.dir / FIGURE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is experimental, and axes may have a single value
            axes = plot_parallel_coordinate(self.optuna_study, params=list(self.space), target_name=self.options.metric)
        shortened = [label.get_text().removesuffix("...") for label in axes.get_xticklabels()]
        names = [next((name for name in self.space if name.startswith(each)), each) for each in shortened]
        axes.set_xticks(axes.get_xticks(), names, rotation=20, ha="right", rotation_mode="anchor")
        axes.set_title("")
        figure = pyplot.gcf()
        figure.set_size_inches(1.9 * (len(self.space) + 1) + 1, 4.5)
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        return path

    def point(self, trial: FrozenTrial) -> Point | None:
        """Return the point of a trial."""
        name = str(trial.user_attrs.get("point"))
        return next((point for point in self.sweep.points if point.name == name), None)
