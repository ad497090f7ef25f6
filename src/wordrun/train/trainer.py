"""The training loop, independent of task and backend."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from wordrun import backend, dist
from wordrun.common import exit_reports, lazy, log
from wordrun.common.errors import UserError, first_line
from wordrun.common.log import LOGGER
from wordrun.common.run_dir import gone
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.data.batch import Batch
from wordrun.dist.hang import watch
from wordrun.train import profile, resume, rng
from wordrun.train.announce import announce, announce_end, start_facts
from wordrun.train.checkpoint import Checkpoints
from wordrun.train.evaluation import Evaluation
from wordrun.train.failing import FailedHooks, explained, load_parts, reason
from wordrun.train.hints import by_launch, has_huggingface_format, has_huggingface_tokenizer, next_steps
from wordrun.train.hooks import checks as hook_checks
from wordrun.train.hooks.base import Hook, HookSet, NoLearningRateError, StopTraining, Training
from wordrun.train.hooks.compiling import Compile
from wordrun.train.hooks.nonfinite import Nonfinite, is_finite
from wordrun.train.hooks.standard import Bar, Checkpoint, Evaluate, Log, Profile, StopTogether
from wordrun.train.metrics import Meter
from wordrun.train.options import accumulation
from wordrun.train.run import Run
from wordrun.train.schedule import learning_rate
from wordrun.train.settle import settle
from wordrun.train.state import TrainState
from wordrun.train.stop import Interrupted, StopSignal
from wordrun.train.task import Task, task_of


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    steps: int
    tokens: int | None
    """None if the task has no tokens."""
    seconds: float
    loss: float | None
    """Training loss of the last logged step; for text, in nats per token."""
    val_loss: float | None
    val_bpb: float | None
    """Bits per byte of the validation text; None also if the data are not text."""
    best_val_loss: float | None
    best_metric: str
    """train.best_metric."""
    best_value: float | None
    """Best value of ``best_metric``; the checkpoint "best" is from that step."""
    best_step: int | None
    """The step at which that was measured."""


# After a failure, wait this long for the checkpoint being written; other ranks may no longer respond.
LAST_SAVE_S = 5.0


class Trainer(Training):
    """Trains, evaluates and generates according to a config.

    Every rank of the job creates one; in a notebook, the job is a single process. ``hooks`` run after the built-in ones
    and before a checkpoint is saved. Messages about resuming name ``command``, the command line. ``close`` (or a
    ``with`` block, or garbage collection) leaves the process group and removes the log handlers.
    """

    task: Task

    def __init__(
        self,
        cfg: Config,
        world: dist.World | None = None,
        log_handle: log.LogHandle | None = None,
        hooks: Sequence[Hook] = (),
        command: Sequence[str] = (),
    ) -> None:
        self.cfg = cfg
        self.command = command
        self.state = TrainState()
        # A separate object, because the finalizer must not refer to the trainer.
        closers = contextlib.ExitStack()
        self.close = weakref.finalize(self, closers.close)
        # The run has its own RNG states, which the caller and other trainers do not change.
        with rng.swapped(self.state.rng):
            try:
                if cfg.train.deterministic:  # before CUDA starts
                    closers.enter_context(rng.deterministic())
                timeout = cfg.train.timeout_s
                with watch.starting(world):
                    self.world = dist.setup(world, device=cfg.train.device, timeout_s=timeout, seed=cfg.train.seed)
                self.log = log_handle or log.start(self.world.rank)
                if log_handle is None:
                    closers.callback(self.log.close)
                closers.callback(dist.cleanup)
                closers.callback(watch.start(self.world, cfg.run_dir, cfg.train.hang_s, timeout).close)
                with explained(self):
                    self._build(hooks, closers)
            except BaseException:
                # If this rank left the group, the others would fail before it has said why.
                if not hasattr(self, "world") or self.world.size == 1:
                    self.close()
                raise

    @watch.phase("start-up", watch.SLOW)
    def _build(self, hooks: Sequence[Hook], closers: contextlib.ExitStack) -> None:
        """Settle the config, and create the trainer's parts in order of their dependencies."""
        world = self.world
        configured = load_parts(self.cfg, world.rank, hooks)
        keepers = [lazy.load(name)() for name in self.cfg.train.save_hooks]
        for hook in keepers:
            closers.callback(hook.release)
        settled = settle(self.cfg, world, keepers)
        self.cfg, self.layout, self.start, self.memory = settled.cfg, settled.layout, settled.start, settled.memory
        cfg = self.cfg
        self.gas = accumulation(cfg, self.layout.dp)
        self.task = task_of(cfg)(cfg, world, self.layout, settled.data, settled.banner)
        # A checkpoint of LoRA has no frozen weights.
        initial = cfg.lora_rank or not self.start.folder
        weights = self.task.initial_weights(world, self.start.manifest) if initial else None
        make_optimizer = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
        spec = backend.BackendSpec(
            cfg, world, self.layout, self.task.make_model, make_optimizer, weights, self.start.step
        )
        self.backend = backend.build(spec)
        closers.callback(self.backend.close)
        self.loader = self.task.loader(self.gas, self.backend.device)
        closers.callback(self.loader.close)
        count = cfg.train.eval_iters and cfg.train.eval_iters * self.examples_per_step
        self.evaluation = Evaluation(cfg, self.task, self.backend, self.task.validation_set(count))
        self.meter = Meter(
            self.backend.device,
            self.backend.dtype,
            world.size,
            self.task.tokens_per_example,
            self.task.flops_per_example,
        )
        self.stop, self.failed_hooks = StopSignal(self.backend.device), FailedHooks(self)
        self.profiler = profile.build(cfg, world)
        first: list[Hook] = [StopTogether(self.stop, self.failed_hooks), Nonfinite()]
        first += [Compile()] if cfg.train.compile == "auto" else []
        first += [Log(), Bar(), Evaluate(), *self.task.hooks()]
        self.hooks = HookSet(first, configured, hooks, [Checkpoint(), *keepers, Profile(self.profiler)])
        self.run = Run(cfg, world)
        self.hooks.call("setup", self)
        self.hooks.check_gradients(self)
        self.start = resume.resume(self, self.start)
        on_disk = self.start.newest if self.start.elsewhere else self.step
        written = on_disk if self.start.source == self.run.path else -1
        self.checkpoints = Checkpoints(cfg, world, self.task.tokenizer_json, written)

    @exit_reports.unfinished()
    def train(self) -> Summary:
        """Train to the end and return the result; every rank must call this.

        Raises:
            Interrupted: by SIGINT, SIGTERM or SIGUSR1; the run directory is complete up to the last step, and has a
                checkpoint of it.
        """
        if self.done:
            why = self.stop_reason or "the run is finished; increase train.max_iters to train further"
            LOGGER.info("nothing to do at step %d: %s", self.step, why)
            return self.summary()
        with self._session():
            while not self.done:
                self.hooks.call("before_step", self)
                lr = self._learning_rate()
                self.gas = accumulation(self.cfg, self.layout.dp, self.step)
                self.result = self._train_step(lr)
                self.state.take(self.examples_of(self.gas))
                if self.hooks.accepts_step(self):
                    self.state.count_step()
                    self.meter.add(self.result, lr, self.examples_of(self.gas))
                    self.hooks.call("after_step", self)
        return self.summary()

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step: the schedule's, as hooks change it."""
        cfg = self.cfg
        try:
            rate = learning_rate(cfg.optimizer, cfg.schedule, self.step, cfg.train.max_iters, self.layout.dp)
            return self.hooks.learning_rate(self, rate)
        except UserError as error:
            raise NoLearningRateError(error) from error

    def _train_step(self, lr: float) -> backend.StepResult:
        self.meter.clock.lap("hooks")  # and whatever else happens between steps
        batches = self._micro_batches()
        self.meter.clock.lap("data")
        return self.backend.train_step(batches, lr, self.meter.clock)

    def _micro_batches(self) -> list[Batch]:
        """Return this rank's share of the step's examples, a batch for each micro-step.

        They depend only on ``state.position``, which is all that resuming needs.
        """
        return self.loader.take(self.state.position, self.gas)

    @watch.phase("saving a checkpoint", watch.SLOW)
    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint of the current state; every rank must call this, during ``train``."""
        self.run.require_folder()
        self.checkpoints.wait()  # one copy of the training state at a time
        self.meter.score(self.state)
        copy = self.backend.begin_save(resume.own_tensors(self), hook_checks.tensors(self))
        last = self.done or self.stop.signal != 0
        self.checkpoints.save(self.step, copy, resume.manifest(self), best=best, last=last)

    def evaluate(self) -> float:
        """Return the mean loss over the fixed validation set; every rank must call this."""
        return self.measure()["val_loss"]

    @watch.phase("evaluation")
    def measure(self) -> dict[str, float]:
        """Return the means over the fixed validation set, of the loss as val_loss and of each metric as val_NAME.

        Every rank must call this.
        """
        return self.evaluation.measure(self.step)

    @watch.phase("generating a sample", watch.SLOW)
    def generate(self, prompt: str | None = None, length: int | None = None, **options: Any) -> str:
        """Return ``prompt`` and its generated continuation; every rank must call this.

        Further options are temperature, top_k and seed, see ``LanguageTask.generate``; the config has the defaults.

        Raises:
            ConfigError: the options are invalid, or the run's task is not text.
        """
        return self.task.generate(self.backend, prompt, length, **options)

    def summary(self) -> Summary:
        """Return the result so far."""
        state, size = self.state, self.task.tokens_per_example
        return Summary(
            steps=state.step,
            tokens=None if size is None else state.position * size,
            seconds=state.elapsed(),
            loss=state.metrics.get("loss"),
            val_loss=state.metrics.get("val_loss"),
            val_bpb=state.metrics.get("val_bpb"),
            best_val_loss=state.best_loss,
            best_metric=self.cfg.train.best_metric,
            best_value=state.best_value,
            best_step=None if state.best_value is None else state.best_step,
        )

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Run the training loop in the ``with`` block, with the run's record, log, signals, profiler and random state.

        Raises:
            Interrupted: a signal has ended the loop, and a checkpoint of the last step is saved.
            UserError: an error that the loop has raised, explained.
        """
        facts = start_facts(self)
        with explained(self):
            self.run.open(facts, self.start)
        log_file = None
        error_text, failed, stopped = "", False, False
        for part in self.backend.parts:
            part.train()
        try:
            if self.world.rank == 0:
                log_file = self.log.add_file(self.run.path / "log.txt")
                announce(self, facts)
            self.state.start_clock()
            self.profiler.watch(self.meter.clock)
            with (
                explained(self, every=True),
                self.stop.listen(),
                self.hooks.reading_gradients(self),
                self.profiler,
                rng.swapped(self.state.rng),
                watch.phase("training"),
            ):
                self.evaluation.try_one_batch()
                self.hooks.call("at_start", self)
                hook_checks.check(self)
                self.meter.clock.start()
                try:
                    yield
                except StopTraining:
                    stopped = True
                except NoLearningRateError as error:
                    self.failed_hooks.without_rate(error.error)
                    stopped = True
                self.failed_hooks.close()
                if stopped:
                    self._save_and_stop()
                with watch.phase("the end of the run", watch.SLOW):
                    self.hooks.call("at_end", self)
                self.failed_hooks.raise_first()
        except BaseException as error:
            if failed := isinstance(error, Exception):
                self.checkpoints.join(LAST_SAVE_S if self.world.size > 1 else None)
            error_text = str(error) if isinstance(error, Interrupted) else reason(error)
            raise
        finally:
            self.state.stop_clock()
            self.hooks.close()
            self._finish(error_text, failed=failed)
            if log_file is not None:
                self.log.remove(log_file)
            self.failed_hooks.wait()

    def _save_and_stop(self) -> None:
        """Make a checkpoint of the last step, unless checkpoints are off, and end the run."""
        if self.cfg.train.checkpoint_interval:
            written = self.checkpoints.wait()
            # A skipped step has changed nothing.
            intact = self.step == self.start.step or self.state.skipped > 0
            if (intact or is_finite(self, self.result)) and written != self.step:
                LOGGER.info("stopping at step %d; writing a checkpoint", self.step)
                self.save()
                self.checkpoints.wait()
            self.hooks.call("at_stop", self)
        self.failed_hooks.raise_first()
        raise Interrupted(self.stop.signal, saved=self.checkpoints.written == self.step)

    def _finish(self, error: str, *, failed: bool) -> None:
        """Record how the run ended. A failure here must not hide the ``error`` that ended the run."""
        try:
            if error and self.done and self.checkpoints.written == self.step:
                self.run.note(complete=True)  # read by launch: there is nothing to continue
            drawn = self.run.finish(asdict(self.summary()), error)
        except (OSError, UserError) as problem:
            if error:
                return
            if gone(self.run.path) or self.checkpoints.written != self.step:
                raise
            drawn = []
            LOGGER.warning("the last checkpoint is complete, but not the records: %s", first_line(problem))
        announce_end(self, error, drawn, failed=failed)
        # launch itself says how to continue a failed run
        if self.world.rank == 0 and not (failed and by_launch()) and (error or self.cfg.train.suggest):
            command = () if self.stop_reason else self.command
            most = self.step if self.done else self.cfg.train.max_iters
            exports = has_huggingface_format(self.cfg.model) and has_huggingface_tokenizer(self.task.tokenizer_json)
            kind = {"huggingface": exports, "generates": not self.task.no_samples}
            if text := next_steps(self.run.path, command, self.world.size, most, finished=not error, **kind):
                LOGGER.info(text)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error in a parallel run, leaving the group could wait for ranks that no longer respond.
        if error is None or self.world.size == 1:
            self.close()
