"""The sections of gpu.py that run wordrun's trainer in their own process: the loop and the profile."""

from __future__ import annotations

import gzip
import statistics
import time
from typing import Any

import torch

import wordrun
from gpu_common import Bench, overrides, spread
from gpu_device import synchronize
from gpu_trace import summarize
from wordrun.train.hooks.base import Hook
from wordrun.train.trainer import Trainer


class BareBlocks(Hook):
    """After every few steps of the trainer, takes as many bare steps on a second model, and times both."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self._left = 0.0

    def at_start(self, trainer: Any) -> None:
        """Build the second model and put a block's batches on the device."""
        from wordrun.backend.compile import prepare
        from wordrun.model.construction import materialize
        from wordrun.train.optim.adamw import adamw
        from wordrun.train.optim.options import AdamWConfig

        backend, cfg = trainer.backend, trainer.cfg
        self.device, self.dtype = backend.device, backend.dtype
        self.model = materialize(trainer.task.make_model(), cfg.train.seed, self.device)
        prepare(self.model, cfg)
        assert isinstance(cfg.optimizer, AdamWConfig)
        self.optimizer = adamw(cfg.optimizer, self.model.named_parameters())
        size = cfg.model.batch_size
        self.batches = [trainer.task.sequences.batch(i * size, size).to(self.device) for i in range(self.block)]

    def after_step(self, trainer: Any) -> None:
        """At the end of a block, time it, and take a block of bare steps."""
        if trainer.step % self.block:
            return
        synchronize()
        now = time.perf_counter()
        if self._left:
            self.trainer_s.append((now - self._left) / self.block)
        began = time.perf_counter()
        for batch in self.batches:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = self.model.losses(batch).mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        synchronize()
        self._left = time.perf_counter()
        self.bare_s.append((self._left - began) / self.block)


class Waits:
    """Records the seconds that the trainer's thread spends in the loader, and the clock's ``data`` lap."""

    def __init__(self, trainer: Trainer) -> None:
        self.host_s: list[float] = []
        self.lap_s: list[float] = []
        take, read = trainer.loader.take, trainer.meter.clock.read

        def timed(first: int, gas: int) -> Any:
            began = time.perf_counter()
            batches = take(first, gas)
            self.host_s.append(time.perf_counter() - began)
            return batches

        def seen() -> dict[str, float]:
            seconds = read()
            self.lap_s.append(seconds.get("data", 0.0) / trainer.cfg.train.log_interval)
            return seconds

        for owner, name, function in ((trainer.loader, "take", timed), (trainer.meter.clock, "read", seen)):
            setattr(owner, name, function)


def loop(bench: Bench) -> None:
    """The trainer's loop beside a bare loop of the same compiled model, in turns of ten steps."""
    steps, block = (40, 4) if bench.tiny else (160, 10)
    options = overrides(bench, 2 if bench.tiny else 12, 1, compiled=not bench.tiny)
    cfg = wordrun.compose(
        [*options, f"train.max_iters={steps}", f"train.log_interval={block}", f"hydra.run.dir={bench.run_dir('loop')}"]
    )
    bare = BareBlocks(block)
    with Trainer(cfg, hooks=[bare]) as trainer:
        waits = Waits(trainer)
        trainer.train()
    ours, theirs = ([1000 * each for each in times[3:]] for times in (bare.trainer_s, bare.bare_s[:-1]))
    bench.add("ms per step, micro-batch 12, no accumulation", loop="bare", **spread(theirs))
    bench.add("ms per step, micro-batch 12, no accumulation", loop="wordrun's trainer", **spread(ours))
    each = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    cost = 100 * (statistics.median(ours) / statistics.median(theirs) - 1)
    bench.add("cost of the loop in percent, at most 1", of_medians=cost, **spread(each))
    host, lap = [1000 * each for each in waits.host_s[10:]], [1000 * each for each in waits.lap_s[3:]]
    bench.add("loader, ms per step", what="the thread's time in Loader.step, copies issued included", **spread(host))
    bench.add("loader, ms per step", what="the clock's data lap, on the device", **spread(lap))


class Profile(Hook):
    """Times a few steps without the profiler, and then records some with it."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps = first, steps
        self.step_s = 0.0
        self._profile: Any = None

    def after_step(self, trainer: Any) -> None:
        """Start and stop the clock, then the profiler."""
        if trainer.step in (self.first, self.first + 10):
            synchronize()
            self.step_s = time.perf_counter() - self.step_s
        if trainer.step == self.first + 10:  # then one step of warm-up
            from torch.profiler import profile, schedule

            steps = schedule(wait=0, warmup=1, active=self.steps, repeat=1)
            self._profile = profile(schedule=steps, record_shapes=True, acc_events=True)
            self._profile.start()
        elif self._profile is not None and trainer.step <= self.first + 11 + self.steps:
            synchronize()
            self._profile.step()
            if trainer.step == self.first + 11 + self.steps:
                self._profile.stop()

    def export(self, path: str) -> None:
        """Write the Chrome trace."""
        self._profile.export_chrome_trace(path)


def profile(bench: Bench) -> None:
    """Where the time of a compiled step goes, by kind of kernel, by kernel, and by matrix product."""
    shape = (2, 2) if bench.tiny else (12, 5)
    options = overrides(bench, *shape, compiled=not bench.tiny)
    cfg = wordrun.compose(
        [*options, "train.max_iters=34", "train.log_interval=1000", f"hydra.run.dir={bench.run_dir('profile')}"]
    )
    hook = Profile(15, 3)
    with Trainer(cfg, hooks=[hook]) as trainer:
        trainer.train()
    path = bench.scratch / "trace.json"
    hook.export(str(path))
    (bench.out / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    summary = summarize(path, hook.steps, on_cpu=bench.tiny)
    step_ms = 1000 * hook.step_s / 10
    idle = step_ms - summary.busy_ms
    bench.add(
        "step",
        batch=f"{shape[0]} x {shape[1]}",
        ms=step_ms,
        busy_ms=summary.busy_ms,
        profiled_ms=summary.window_ms,
        idle_percent=100 * idle / step_ms,
        launches=summary.launches,
    )
    for kind, milliseconds in [*summary.kinds, ("idle", idle)]:
        bench.add("kinds of kernels", kind=kind, ms=milliseconds, percent=100 * milliseconds / step_ms)
    for row in summary.kernels[:12]:
        bench.add(
            "most expensive kernels",
            ms=row.ms,
            percent=100 * row.ms / step_ms,
            calls=row.calls,
            kind=row.kind,
            name=row.name,
        )
    for row in summary.products[:12]:
        tflops = row.flops / (row.ms * 1e9) if row.flops else None
        of_peak = bench.mfu(tflops * 1e12) if tflops else None
        bench.add("matrix products", ms=row.ms, calls=row.calls, tflops=tflops, of_peak=of_peak, what=row.name)
