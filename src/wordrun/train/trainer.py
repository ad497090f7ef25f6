"""The trainer: one readable loop, whatever the backend."""

from __future__ import annotations

import contextlib
import math
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wordrun import backend as backends
from wordrun import dist, log
from wordrun.backend.base import StepResult
from wordrun.checks import accumulation, check
from wordrun.config import Config, part_of
from wordrun.data.batch import Batch
from wordrun.data.fixed_set import FixedSet
from wordrun.data.loader import Loader
from wordrun.data.order import eot_for, order_of_run
from wordrun.dist.collectives import all_sum
from wordrun.dist.setup import seed_everything
from wordrun.errors import ConfigError, UserError, first_line
from wordrun.log import LOGGER
from wordrun.model import meta_model
from wordrun.model.generate import generate
from wordrun.prepare.obtain import obtain
from wordrun.train import finite, resume, streams
from wordrun.train.checkpoint import Checkpoints
from wordrun.train.hooks import Bar, Checkpoint, Evaluate, Hook, Log, Sample
from wordrun.train.metrics import Meter, device_name
from wordrun.train.profile import profiled
from wordrun.train.run import Run, Start
from wordrun.train.schedule import learning_rate
from wordrun.train.stop import Interrupted, StopSignal

# After a failure the checkpoint that is being written gets so long; other ranks may be past helping with it.
LAST_SAVE_S = 5.0


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    steps: int
    tokens: int
    seconds: float
    loss: float | None
    """Training loss of the last logged step, nats per token."""
    val_loss: float | None
    best_val_loss: float | None


class Trainer:
    """Trains, evaluates and generates, as a config says.

    Every rank of the job makes one; in a notebook the one process is the job. ``hooks`` run after the trainer's own.
    ``close`` (or a ``with`` block, or the garbage collector) takes back the process group and the log handlers.
    """

    def __init__(
        self,
        cfg: Config,
        world: dist.World | None = None,
        log_handle: log.LogHandle | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.cfg = cfg
        self.extra_hooks = hooks
        outer_streams = streams.capture()
        self.world = dist.setup(world, device=cfg.train.device, timeout_s=cfg.train.timeout_s, seed=cfg.train.seed)
        self.log = log_handle or log.start(self.world.rank)
        # A list, because the backend is not there yet and the finalizer must not know the trainer.
        closers: list[Callable[[], None]] = [dist.cleanup, *([self.log.close] if log_handle is None else [])]
        self.close = weakref.finalize(self, _close, closers)
        self.step = 0
        self.position = 0
        """Sequences that the run has taken so far; the next step begins with this one."""
        self.improved_at = -1
        """The step of the best evaluation."""
        self.start = Start()
        self.seconds_before = 0.0
        self.metrics: dict[str, Any] = {}
        self.lr = 0.0
        self.result: StepResult
        self.run: Run
        try:
            resumed = resume.look(cfg, self.world)
            self._build(fresh=resumed is None or resumed.folder is None)
            closers[:0] = [self.loader.close, self.backend.close]
            if resumed is not None:
                resume.take_up(self, resumed)
        except BaseException:
            self.close()
            raise
        finally:
            # This trainer's own streams: what others draw in the meantime changes nothing in its run, nor the reverse.
            self.streams = streams.capture()
            streams.restore(outer_streams)

    def _build(self, *, fresh: bool) -> None:
        cfg, world = self.cfg, self.world
        layout = check(cfg, world.size, world.local_size)
        self.corpus = obtain(cfg, world)
        vocab_size = self.corpus.tokenizer.vocab_size
        if cfg.model.vocab_size is not None and cfg.model.vocab_size < vocab_size:
            raise ConfigError(
                f"model.vocab_size={cfg.model.vocab_size} is too small for data={cfg.data.name}, "
                f"which has {vocab_size} tokens: leave it out, or use at least {vocab_size}"
            )
        self.outline = meta_model(cfg.model, vocab_size)
        if self.outline.vocab_size % layout.tp:
            raise ConfigError(
                f"data={cfg.data.name} has a vocabulary of {vocab_size} tokens, which backend.tp={layout.tp} does not "
                f"divide: use model.vocab_size={math.ceil(vocab_size / layout.tp) * layout.tp}"
            )
        try:
            self.corpus.tokenizer.encode(cfg.train.sample_prompt)
        except ConfigError as error:
            raise ConfigError(f"train.sample_prompt: {error}") from None
        make_model = partial(meta_model, cfg.model, vocab_size)
        make_optimizer = partial(part_of("optimizer", cfg.optimizer).load(), cfg.optimizer)
        weights = resume.first_weights(cfg, vocab_size, world) if fresh else None
        self.backend = backends.build(backends.BackendSpec(cfg, world, layout, make_model, make_optimizer, weights))
        self.layout, self.dp_rank = layout, layout.dp_index(world.rank)
        self.gas = accumulation(cfg, layout.dp)
        self.sequences = order_of_run(cfg, self.corpus)
        eot = eot_for("mask_documents", cfg, self.corpus)
        self.loader = Loader(
            self.sequences, cfg.model.batch_size, self.gas, self.dp_rank, layout.dp, self.backend.device,
            cfg.data.prefetch, eot,
        )  # fmt: skip
        wanted = cfg.train.eval_iters and cfg.train.eval_iters * self.sequences_per_step
        self.validation = FixedSet(
            self.corpus.val,
            cfg.model.block_size,
            cfg.model.batch_size,
            wanted,
            self.dp_rank,
            layout.dp,
            eot,
            [(len(part.val), part.share) for part in self.corpus.mix],
        )
        # Of dropout, which strikes other elements on every rank: no two hold the same ones.
        self.rank_seed = cfg.train.seed + 1 + world.rank
        seed_everything(self.rank_seed)
        self.stop = StopSignal(self.backend.device)

    def save(self, *, best: bool = False) -> None:
        """Make a checkpoint of the run as it is now; every rank must call this, inside of ``train``."""
        streams_now = streams.to_tensor(streams.capture())
        self.checkpoints.save(
            self.step,
            lambda: self.backend.begin_save({resume.own_streams(self): streams_now}),
            partial(resume.manifest, self),
            best=best,
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step over all ranks: the global batch size."""
        return self.cfg.model.batch_size * self.layout.dp * self.gas

    def train(self) -> Summary:
        """Train to the end and return how it went; every rank must call this.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGUSR1 came; the run directory is complete up to the last whole step, and
                has a checkpoint of it.
        """
        cfg = self.cfg
        if self.step >= cfg.train.max_iters:
            LOGGER.info(
                "this run has done its %d steps: nothing is left to do (train.max_iters=N takes it further)", self.step
            )
            return self.summary()
        with self._session() as hooks, streams.swapped(self.streams):
            while self.step < cfg.train.max_iters and not self.stop.agreed(self.step):
                dp = self.layout.dp
                self.lr = learning_rate(cfg.optimizer, cfg.schedule, self.step, cfg.train.max_iters, dp)
                self.result = self._train_step()
                self.position += self.sequences_per_step
                if not finite.counts(self):
                    continue
                self.step += 1
                for hook in hooks:
                    hook.after_step(self)
            if self.step < cfg.train.max_iters:
                self._save_and_stop()
            for hook in hooks:
                hook.at_end(self)
        return self.summary()

    def _save_and_stop(self) -> None:
        """Make a checkpoint of the last whole step, if the run makes any, and end the run."""
        if self.cfg.train.checkpoint_interval:
            self.checkpoints.wait()
            # A step that was left out has changed nothing.
            whole = self.step == self.start.step or self.left_out > 0 or finite.is_finite(self)
            if whole and self.checkpoints.written != self.step:
                LOGGER.info("stopping after %d steps; writing a checkpoint", self.step)
                self.save()
                self.checkpoints.wait()
        raise Interrupted(self.stop.signal, saved=self.checkpoints.written == self.step)

    def _train_step(self) -> StepResult:
        self.meter.clock.start()
        batches = self._micro_batches()
        self.meter.clock.lap("data")
        try:
            return self.backend.train_step(batches, self.lr, self.meter.clock)
        except Exception as error:
            if self.cfg.train.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                reason = first_line(error)
                raise UserError(
                    f"train.compile=true: torch.compile cannot compile the model here ({reason}): "
                    "install a C++ compiler (g++), or use train.compile=false"
                ) from error
            raise

    def _micro_batches(self) -> list[Batch]:
        """Return this rank's share of the step's sequences, a batch for each micro-step.

        They are a function of ``position`` alone, which is therefore all that resuming needs.
        """
        return self.loader.step(self.position // self.sequences_per_step)

    def evaluate(self) -> float:
        """Return the mean loss over the fixed validation set, in nats per token; every rank must call this."""
        total = torch.zeros(2, dtype=torch.float64)
        with self._evaluating():
            for i in range(len(self.validation)):
                batch, weights = self.validation[i]
                losses = self.backend.losses(batch.to(self.backend.device))
                total += torch.stack(((losses.cpu().double() * weights).sum(), weights.sum()))
        loss_sum, count = all_sum(total.float().to(self.backend.device)).tolist()
        return float(loss_sum / count)

    def generate(
        self, prompt: str | None = None, length: int | None = None, *, temperature: float | None = None,
        top_k: int | None = None, seed: int | None = None,
    ) -> str:  # fmt: skip
        """Return ``prompt`` and what the model makes follow it; every rank must call this.

        What is left out is as the config says: train.sample_prompt, sample_tokens, temperature, top_k, seed.
        """
        train = self.cfg.train
        prompt = train.sample_prompt if prompt is None else prompt
        length = train.sample_tokens if length is None else length
        temperature = train.temperature if temperature is None else temperature
        top_k = train.top_k if top_k is None else top_k
        if not prompt or length < 0 or not temperature > 0 or (top_k is not None and top_k < 1):
            raise ConfigError(
                f"cannot generate with prompt={prompt!r}, length={length}, temperature={temperature}, top_k={top_k}: "
                "begin with something, such as a line break; length at least 0, temperature above 0, top_k at least 1"
            )
        tokens = torch.from_numpy(self.corpus.tokenizer.encode(prompt))[None].to(self.backend.device)
        seed = train.seed if seed is None else seed
        # Uncompiled: each length of the growing text would be compiled anew.
        with self._evaluating(), torch.compiler.set_stance("force_eager"):
            text = generate(
                self.backend.logits, tokens, length, block_size=self.cfg.model.block_size, temperature=temperature,
                top_k=top_k, seed=seed,
            )  # fmt: skip
        return self.corpus.tokenizer.decode(text[0].cpu().numpy())

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode, and back into the one that it was in."""
        training = self.backend.parts[0].training
        for part in self.backend.parts:
            part.eval()
        yield
        for part in self.backend.parts:
            part.train(training)

    def summary(self) -> Summary:
        """Return how far the run has come."""
        get = self.metrics.get
        return Summary(
            steps=self.step, tokens=self.position * self.cfg.model.block_size,
            seconds=self.meter.seconds() if hasattr(self, "meter") else self.seconds_before,
            loss=get("loss"), val_loss=get("val_loss"), best_val_loss=get("best_val_loss"),
        )  # fmt: skip

    @contextlib.contextmanager
    def _session(self) -> Iterator[list[Hook]]:
        """Open what a training run needs, and close it however the run ends."""
        facts = self._facts()
        self.run = Run(self.cfg, self.world, facts, self.start)
        file = None
        self.meter = Meter(
            self.backend.device, self.backend.dtype, self.sequences_per_step, self.cfg.model.block_size,
            self.outline.flops_per_token(), self.world.size, self.seconds_before,
        )  # fmt: skip
        self.checkpoints = Checkpoints(self.cfg, self.world, self.corpus.tokenizer.to_json())
        if self.start.source == self.run.path:
            self.checkpoints.written = self.step
        self.rollbacks: Counter[int] = Counter()
        self.left_out = 0
        hooks: list[Hook] = [Log(), Bar(self), Evaluate(), Sample(), Checkpoint(), *self.extra_hooks]
        reason = "finished"
        for part in self.backend.parts:
            part.train()
        try:
            if self.world.rank == 0:
                file = self.log.add_file(self.run.path / "log.txt")
                self._announce(facts)
            with self.stop.listen(), profiled(self.cfg.profiler, self.run.path, self.world.rank):
                for hook in hooks:
                    hook.at_start(self)
                yield hooks
        except BaseException as error:
            reason = str(error) if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                self.checkpoints.give_time(LAST_SAVE_S if self.world.size > 1 else None)
                self.run.note_failure(self.world.rank, self.step, traceback.format_exc())
            raise
        finally:
            for hook in hooks:
                hook.close()
            self._finish(reason)
            if file is not None:
                self.log.remove(file)

    def _finish(self, reason: str) -> None:
        """Write how the run ended. A failure here must not hide the one that ended the run."""
        try:
            plots = self.run.finish(asdict(self.summary()), reason)
        except OSError:
            if reason == "finished":
                raise
            return
        loss = self.metrics.get("val_loss")
        if reason != "finished":
            LOGGER.info("%s (after %d steps)", reason, self.step)
        if loss is not None:
            LOGGER.info("validation loss %.4f (perplexity %.2f)", loss, math.exp(min(loss, 700)))
        for plot in plots:
            LOGGER.info("plot: %s", _relative(plot))
        LOGGER.info("run directory: %s", _relative(self.run.path))

    def _facts(self) -> dict[str, Any]:
        corpus = self.corpus
        return {
            "data": {
                "origin": corpus.origin, "banner": corpus.banner, "vocab_size": corpus.tokenizer.vocab_size,
                "train_tokens": len(corpus.train), "val_tokens": len(corpus.val),
            },
            "parameters": self.outline.num_parameters(),
            "device_name": device_name(self.backend.device),
            "dtype": str(self.backend.dtype).removeprefix("torch."),
            "global_batch_size": self.sequences_per_step,
            "gradient_accumulation_steps": self.gas,
            "seeds": {"weights": self.cfg.train.seed, "data": self.cfg.train.seed, "rank_0": self.cfg.train.seed + 1},
        }  # fmt: skip

    def _announce(self, facts: dict[str, Any]) -> None:
        cfg, world, data = self.cfg, self.world, facts["data"]
        LOGGER.info("%s %s, launcher %s (%s)", world, world.host, world.launcher, world.source)
        LOGGER.info(
            "%s: %s parameters, %s, %s on %s", cfg.model.name, f"{facts['parameters']:,}", cfg.train.backend,
            facts["dtype"], facts["device_name"],
        )  # fmt: skip
        LOGGER.info(
            "data %s: %s; %s training and %s validation tokens, vocabulary %d", cfg.data.name, data["origin"],
            f"{data['train_tokens']:,}", f"{data['val_tokens']:,}", data["vocab_size"],
        )  # fmt: skip
        LOGGER.info(
            "a step takes %d sequences (%d data-parallel ranks x %d x %d micro-steps) of %d tokens; "
            "%d steps are %.2f epochs",
            self.sequences_per_step, self.layout.dp, cfg.model.batch_size, self.gas, cfg.model.block_size,
            cfg.train.max_iters, self.sequences.epoch_of(cfg.train.max_iters * self.sequences_per_step),
        )  # fmt: skip
        if data["banner"]:
            LOGGER.warning("%s\n%s\n%s", "*" * 80, data["banner"], "*" * 80)
        LOGGER.info("run directory: %s", _relative(self.run.path))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error in a parallel run, leaving the group could wait for ranks that no longer answer.
        if error is None or self.world.size == 1:
            self.close()


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path


def _close(closers: list[Callable[[], None]]) -> None:
    for closer in closers:
        closer()
