"""The interfaces between the parts of a training run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from wordrun.backend.base import Backend, StepResult
from wordrun.backend.torch_backend import TorchBackend
from wordrun.common.errors import ConfigError, PartError, UserError
from wordrun.common.log import LOGGER, LogHandle
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.train.checkpoint import Checkpoints
from wordrun.train.hooks.plain_state import as_json
from wordrun.train.memory import MemoryPlan
from wordrun.train.metrics import Meter
from wordrun.train.options import accumulation
from wordrun.train.run import Run, Start
from wordrun.train.schedule import checked_rate
from wordrun.train.state import TrainState


class Training:
    """What hooks see of the trainer. Methods are collective: every rank must call them."""

    cfg: Config
    """The settled options, which config.yaml and checkpoints have."""
    world: World
    layout: Layout
    gas: int
    """Micro-steps of the last optimizer step. Before the first step: of a step with the full global batch."""
    memory: MemoryPlan
    task: TaskProtocol
    backend: Backend
    state: TrainState
    start: Start
    command: Sequence[str]
    """The command line that started each rank of this run; empty: it was started from Python."""
    run: Run
    log: LogHandle
    meter: Meter
    checkpoints: Checkpoints
    result: StepResult
    """The result of the last step."""
    hooks: HookSet
    """All hooks by name, in the order in which they are called."""

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.state.step

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest value of each metric."""
        return self.state.metrics

    @property
    def examples_per_step(self) -> int:
        """Examples in one optimizer step over all ranks: the global batch size, after train.batch_ramp."""
        return self.examples_of(accumulation(self.cfg, self.layout.dp))

    def examples_of(self, gas: int) -> int:
        """Return the number of examples over all ranks in a step of ``gas`` micro-steps."""
        return self.cfg.model.batch_size * self.layout.dp * gas

    @property
    def stop_reason(self) -> str:
        """Why a hook wants the run to end before train.max_iters; empty: none does."""
        return self.hooks.stop_reason()

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step."""
        return self.step >= self.cfg.train.max_iters or bool(self.stop_reason)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Record ``metrics`` of this step, numbers by name; only those of rank 0 are used."""
        self.run.log({"step": self.step, **metrics})

    def evaluate(self) -> float:
        """Return the mean loss over the fixed validation set."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        """Return the means over the fixed validation set, of the loss as val_loss and of each metric as val_NAME."""
        raise NotImplementedError

    def generate(self) -> str:
        """Return a sample."""
        raise NotImplementedError

    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint of the current state."""
        raise NotImplementedError


def native(trainer: Training, hook: str) -> TorchBackend:
    """Return the trainer's backend for a ``hook`` that uses the weights or the gradients.

    Raises:
        ConfigError: the backend does not give access to them.
    """
    backend = trainer.backend
    if not isinstance(backend, TorchBackend):
        name = trainer.cfg.train.backend
        raise ConfigError(
            f"hooks=[{hook}] cannot read the weights and gradients of train.backend={name}: use DDP or FSDP"
        )
    return backend


def due(step: int, interval: int) -> bool:
    """Return whether ``step`` is a multiple of ``interval``; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


class Hook:
    """Base class of hooks, called between steps on every rank; each hook decides whether it is due."""

    expects_divergence = False
    """Whether a step with non-finite gradients is passed to this hook, instead of ending the run."""

    def setup(self, trainer: Training) -> None:
        """Called once the model is built, and again after loading a checkpoint that was saved without this hook."""

    def at_start(self, trainer: Training) -> None:
        """Called before the first step."""

    def before_step(self, trainer: Training) -> None:
        """Called before each step, including one that is then skipped or undone."""

    def learning_rate(self, trainer: Training, scheduled: float) -> float:
        """Return the learning rate of the next step, the same on all ranks; the schedule's is ``scheduled``."""
        return scheduled

    def on_gradients(self, trainer: Training) -> None:
        """Called in each step when the gradients of all micro-steps are complete, before they are clipped.

        They are in ``grad`` of the parameters in ``trainer.backend.parts`` (None: the loss does not depend on the
        parameter), until the end of the step.
        Sharded parameters have sharded gradients. ``trainer.step`` does not include this step yet, because it may be
        skipped or undone. DeepSpeed does not support hooks with this method, because its engine has the gradients.
        """

    def accepts_step(self, trainer: Training) -> bool:
        """Return whether the step with ``trainer.result`` counts, the same on all ranks.

        Called before ``trainer.step`` includes the step. If it does not count, the next step has the same number,
        and other examples: those that come next.
        """
        return True

    def after_step(self, trainer: Training) -> None:
        """Called after each step that counts; ``trainer.state.step`` includes it."""

    def at_end(self, trainer: Training) -> None:
        """Called after the last step, unless the run was interrupted."""

    def at_stop(self, trainer: Training) -> None:
        """Called when a signal has ended the run early, once a checkpoint of the last step is saved."""

    def close(self) -> None:
        """Called however the run ended."""

    def stop_reason(self) -> str:
        """Return why the run should end after this step, the same on all ranks; empty: it should not."""
        return ""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON has it; every rank calls this, also before the first step."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return tensors with the shape and the sharding of a weight, by that weight's name.

        Checkpoints store them like the weights, so that a run with any other layout can resume; loading a checkpoint
        overwrites them in place.
        """
        return {}


class CheckpointHook(Hook):
    """Base class of hooks that keep checkpoints elsewhere than on disk, and find them again when a run is resumed."""

    def open(self, cfg: Config, world: World) -> None:
        """Called on all ranks before anything else, with the options as far as they are settled."""

    def find_start(self, cfg: Config, world: World, run_dir: Path, on_disk: int) -> Start:
        """Return the checkpoint that this hook has of the run in ``run_dir``, or a Start that says why there is none.

        Called on all ranks after ``open``, if the run continues from its newest checkpoint. ``on_disk`` is the step of
        the newest one on disk (-1: there is none); an older one is of no use.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Called when the trainer is closed, also if ``open`` has failed."""


class HookError(PartError):
    """A hook raised an exception; the message names the hook."""


class HookSet(Mapping[str, Hook]):
    """The hooks of a run by name, in the order in which they are called.

    Args:
        first: wordrun's own hooks, called before all others.
        configured: the hooks in the config, by their names there.
        added: the hooks passed to the trainer; each has the name of its class.
        last: wordrun's own hooks, called after all others.
    """

    def __init__(
        self, first: Sequence[Hook], configured: Mapping[str, Hook], added: Sequence[Hook], last: Sequence[Hook]
    ) -> None:
        self._hooks = {type(hook).__name__: hook for hook in first} | dict(configured)
        self._own = {type(hook).__name__ for hook in (*first, *last)}
        for hook in added:
            name = type(hook).__name__
            numbered = (f"{name}-{number}" for number in itertools.count(2))
            free = (each for each in itertools.chain([name], numbered) if each not in {*self._hooks, *self._own})
            self._hooks[next(free)] = hook
        self._hooks |= {type(hook).__name__: hook for hook in last}
        self.has_others = bool(configured or added)
        """Whether there are hooks besides wordrun's own."""
        self.failed: dict[str, Exception] = {}
        """The errors of hooks that have failed during training, by the hook's name; these hooks are no longer called.
        An error of the schedule has the name "the learning rate"."""
        self._overriding: dict[str, list[tuple[str, Hook]]] = {}
        """By name of a method, the hooks that override it: most hooks have few of the methods that a step calls."""

    def __getitem__(self, name: str) -> Hook:
        """Return the hook with this name."""
        return self._hooks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)

    def call(self, event: str, trainer: Training) -> None:
        """Call the method ``event`` of each hook.

        During training, a failure of a hook that is not wordrun's own is kept in ``failed``, so that this rank can save
        a checkpoint with the others.

        Raises:
            HookError: such a hook failed before training.
        """
        during = event in ("before_step", "on_gradients", "after_step", "at_end", "at_stop")
        for name, hook in self._defining(event):
            with self._named(name, event, trainer.step or None, keep=during):
                getattr(hook, event)(trainer)

    def check_gradients(self, trainer: Training) -> None:
        """Check that the backend gives access to gradients, if a hook reads them.

        Raises:
            ConfigError: it does not.
        """
        for name, _ in self._defining("on_gradients"):
            native(trainer, name)

    def reading_gradients(self, trainer: Training) -> AbstractContextManager[None]:
        """Return the context in which the backend calls ``on_gradients`` of the hooks.

        After it, the backend has no reference to the trainer: garbage collection of a trainer closes its backend.
        """
        readers = self._defining("on_gradients")
        if not readers:
            return contextlib.nullcontext()
        backend = native(trainer, readers[0][0])
        return backend.calling_with_gradients(partial(self.call, "on_gradients", trainer))

    @property
    def failure(self) -> Exception | None:
        """The first error of a hook during training; None: there is none."""
        return next(iter(self.failed.values()), None)

    def learning_rate(self, trainer: Training, scheduled: float) -> float:
        """Return the learning rate of the next step.

        Raises:
            UserError: a hook failed, or returned something that is not a finite number.
        """
        for name, hook in self._defining("learning_rate"):
            with self._named(name, "learning_rate", trainer.step):
                scheduled = checked_rate(hook.learning_rate(trainer, scheduled))
        return scheduled

    def accepts_step(self, trainer: Training) -> bool:
        """Return whether the step counts for all hooks.

        Raises:
            UserError: a hook failed, or the run cannot continue.
        """
        for name, hook in self._defining("accepts_step"):
            with self._named(name, "accepts_step", trainer.step):
                if not hook.accepts_step(trainer):
                    return False
        return True

    def stop_reason(self) -> str:
        """Return why a hook wants the run to end; empty: none does."""
        for name, hook in self._defining("stop_reason"):
            with self._named(name, "stop_reason", keep=True):
                if reason := hook.stop_reason():
                    return reason
        return ""

    def _defining(self, method: str) -> list[tuple[str, Hook]]:
        """Return the hooks that define ``method``, except those that have failed."""
        if method not in self._overriding:
            default = getattr(Hook, method)
            self._overriding[method] = [
                (name, hook)
                for name, hook in self.items()
                if getattr(getattr(hook, method), "__func__", None) != default
            ]
        found = self._overriding[method]
        return [(name, hook) for name, hook in found if name not in self.failed] if self.failed else found

    def close(self) -> None:
        """Close all hooks; a failure is logged, so that it neither hides why the run ended nor affects other hooks."""
        for name, hook in self.items():
            try:
                hook.close()
            except Exception as error:
                LOGGER.error("%s", self._problem(name, "close", error), exc_info=error)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each hook that is not wordrun's own, for the manifest of a checkpoint.

        The state of a hook that fails to return it is omitted.
        """
        states = {}
        for name, hook in self.items():
            if name not in self._own:
                with self._named(name, "state", keep=True):
                    states[name] = as_json(hook.state())  # now: the writer does not know hooks
        return states

    def tensors(self, states: Any = None) -> dict[str, Tensor]:
        """Return the tensors of the hooks by their names in a checkpoint.

        ``states`` are those of the checkpoint to read: hooks that it does not have are left out. None: all hooks.
        """
        return {
            f"hooks.{name}.{weight}": tensor
            for name, hook in self.items()
            if states is None or name in states
            for weight, tensor in hook.tensors().items()
        }

    def load(self, trainer: Training, states: Any) -> None:
        """Restore each hook from ``states``, which are from a checkpoint; set up those it does not have."""
        for name, hook in self.items():
            if name in self._own:
                continue
            stored = isinstance(states, dict) and name in states
            with self._named(name, "load" if stored else "setup"):
                if stored:
                    hook.load(states[name])
                else:
                    hook.setup(trainer)

    @contextlib.contextmanager
    def _named(self, name: str, event: str, step: int | None = None, *, keep: bool = False) -> Iterator[None]:
        """Name the hook in an exception that is raised within the ``with`` block; ``keep`` it instead of raising it."""
        try:
            yield
        except Exception as error:
            if name in self._own:
                raise
            named = error if isinstance(error, UserError) else self._problem(name, event, error, step)
            if not keep:
                raise named from error.__cause__ if named is error else error
            self.keep_failure(name, named)

    def keep_failure(self, name: str, error: Exception) -> None:
        """Keep the first ``error`` of hook ``name``, which is raised once all ranks know."""
        self.failed.setdefault(name, error)

    def _problem(self, name: str, event: str, error: Exception, step: int | None = None) -> HookError:
        at = "" if step is None else f" after {step} steps"
        return HookError(f"the hook {name} failed in {event}{at}", error, type(self[name]))


class StopTraining(Exception):  # noqa: N818  # as StopIteration
    """Ends the training loop before the next step; all ranks raise it at the same step."""


class NoLearningRateError(Exception):
    """The schedule or a hook could not compute the learning rate of the next step, because of ``error``."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error


class TaskProtocol(Protocol):
    """What checkpoints and the start of a run need from a task."""

    unit: str
    """What the examples are called."""

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint, besides options; keys are for people to read."""

    def manifest(self, position: int) -> dict[str, Any]:
        """Return the task's entries for a checkpoint's manifest after ``position`` examples."""

    def facts(self) -> dict[str, Any]:
        """Return what run.json says about the data and the model."""

    def announce(self, examples: int) -> None:
        """Log what the data are, given the number of examples to train on."""
