"""The sections of gpu.py that measure inside one process: device peaks, the trainer's loop, profile, generation."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wordrun
from gpu_common import Bench, overrides, spread
from gpu_trace import summarize
from wordrun.backend.native import prepare
from wordrun.config import AdamWConfig, GPTConfig
from wordrun.model import Transformer, build, materialise
from wordrun.train.hooks import Hook
from wordrun.train.optim import adamw
from wordrun.train.trainer import Trainer


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(action: Callable[[], Any], repeats: int, inner: int = 1) -> list[float]:
    """Return the seconds of ``action`` on the device, ``repeats`` times, each the mean of ``inner`` calls."""
    for _ in range(3):
        action()
    found = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                action()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000 / inner)
        else:
            began = time.perf_counter()
            for _ in range(inner):
                action()
            found.append((time.perf_counter() - began) / inner)
    return found


def peak(bench: Bench) -> None:
    """The speed of a large bf16 matrix product and of a copy within device memory."""
    size, megabytes = (256, 8) if bench.tiny else (8192, 2048)
    generator = torch.Generator(bench.device).manual_seed(0)
    a, b = (torch.randn(size, size, device=bench.device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    with torch.no_grad():
        times = seconds_of(lambda: torch.mm(a, b, out=product), 50 if not bench.tiny else 3, 4)
    rates = [2 * size**3 / each / 1e12 for each in times]
    bench.add("device peaks", what=f"bf16 {size}^3 torch.mm, random data", unit="TFLOP/s", **spread(rates))
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = seconds_of(lambda: target.copy_(source), 20 if not bench.tiny else 3)
    rates = [2 * source.numel() / each / 1e9 for each in times]
    bench.add("device peaks", what=f"copy of {megabytes} MiB, read and write", unit="GB/s", **spread(rates))


class BareBlocks(Hook):
    """After every few steps of the trainer, takes as many bare steps on a second model, and times both."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self._left = 0.0

    def at_start(self, trainer: Any) -> None:
        """Build the second model and put a block's batches on the device."""
        backend, cfg = trainer.backend, trainer.cfg
        self.device, self.dtype = backend.device, backend.dtype
        self.model = materialise(trainer.task.make_model(), cfg.train.seed, self.device)
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
        step, read = trainer.loader.step, trainer.meter.clock.read

        def timed(number: int) -> Any:
            began = time.perf_counter()
            batches = step(number)
            self.host_s.append(time.perf_counter() - began)
            return batches

        def seen() -> dict[str, float]:
            seconds = read()
            self.lap_s.append(seconds.get("data", 0.0) / trainer.cfg.train.log_interval)
            return seconds

        for owner, name, function in ((trainer.loader, "step", timed), (trainer.meter.clock, "read", seen)):
            setattr(owner, name, function)


def loop(bench: Bench) -> None:
    """The trainer's loop beside a bare loop of the same compiled model, in turns of ten steps."""
    steps, block = (40, 4) if bench.tiny else (160, 10)
    options = overrides(bench, 2 if bench.tiny else 12, 1, compiled=not bench.tiny)
    cfg = wordrun.compose([
        *options, f"train.max_iters={steps}", f"train.log_interval={block}", f"hydra.run.dir={bench.run_dir('loop')}",
    ])  # fmt: skip
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
    cfg = wordrun.compose([
        *options, "train.max_iters=34", "train.log_interval=1000", f"hydra.run.dir={bench.run_dir('profile')}",
    ])  # fmt: skip
    hook = Profile(15, 3)
    with Trainer(cfg, hooks=[hook]) as trainer:
        trainer.train()
    path = bench.scratch / "trace.json"
    hook.export(str(path))
    summary = summarize(path, hook.steps, on_cpu=bench.tiny)
    step_ms = 1000 * hook.step_s / 10
    idle = step_ms - summary.busy_ms
    bench.add(
        "step", batch=f"{shape[0]} x {shape[1]}", ms=step_ms, busy_ms=summary.busy_ms,
        profiled_ms=summary.window_ms, idle_percent=100 * idle / step_ms, launches=summary.launches,
    )  # fmt: skip
    for kind, milliseconds in [*summary.kinds, ("idle", idle)]:
        bench.add("kinds of kernels", kind=kind, ms=milliseconds, percent=100 * milliseconds / step_ms)
    for row in summary.kernels[:12]:
        bench.add(
            "dearest kernels", ms=row.ms, percent=100 * row.ms / step_ms, calls=row.calls, kind=row.kind, name=row.name
        )
    for row in summary.products[:12]:
        tflops = row.flops / (row.ms * 1e9) if row.flops else None
        of_peak = bench.mfu(tflops * 1e12) if tflops else None
        bench.add("matrix products", ms=row.ms, calls=row.calls, tflops=tflops, of_peak=of_peak, what=row.name)


def generate(bench: Bench) -> None:
    """Tokens per second of one text of 256 new tokens, by wordrun, nanoGPT and transformers, with the same weights."""
    from wordrun.model.generate import Cached, generate as extend
    from wordrun.model.huggingface import huggingface_config, to_huggingface

    new, top_k, device = 16 if bench.tiny else 256, 200, bench.device
    shape, dtype = bench.shape, torch.float32 if bench.tiny else torch.bfloat16
    cfg = GPTConfig(name="gpt2", n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
                    block_size=shape.block_size, bias=True, gelu="none")  # fmt: skip
    ours = build(cfg, 50257, seed=1, device=device).eval()
    state = to_huggingface(ours.state_dict(), cfg)
    prompt = torch.randint(50257, (1, 8), generator=torch.Generator().manual_seed(0)).to(device)
    theirs = nanogpt_model(bench, ours, state)

    def nanogpt() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):  # as in its sample.py
            tokens: Tensor = theirs.generate(prompt, new, top_k=top_k)
        return tokens

    ours = ours.to(dtype)
    rate(
        bench,
        "wordrun, KV cache",
        lambda: extend(Cached(ours), prompt, new, block_size=cfg.block_size, top_k=top_k),
        new,
    )
    rate(bench, "nanoGPT, model.generate", nanogpt, new)
    from transformers import GPT2Config, GPT2LMHeadModel

    peer: Any = GPT2LMHeadModel(GPT2Config(**huggingface_config(cfg, 50257)))
    peer.load_state_dict(state, strict=False)
    peer = peer.to(device, dtype).eval()
    sampling = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": top_k, "pad_token_id": 0}
    rate(bench, "transformers, dynamic cache", lambda: peer.generate(prompt, **sampling), new)
    static = {**sampling, "cache_implementation": "static"}
    rate(bench, "transformers, static cache", lambda: peer.generate(prompt, **static), new)


def nanogpt_model(bench: Bench, ours: Transformer, state: dict[str, Tensor]) -> Any:
    """Return nanoGPT's model with our weights."""
    sys.path.insert(0, str(bench.nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    cfg, device = ours.cfg, bench.device
    gpt = theirs.GPT(theirs.GPTConfig(
        n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=cfg.block_size, bias=True,
        vocab_size=50257, dropout=0.0,
    ))  # fmt: skip
    gpt.load_state_dict({name: x.T if ".h." in name and x.dim() == 2 else x for name, x in state.items()})
    return gpt.to(device).eval()


def rate(bench: Bench, program: str, run: Callable[[], Tensor], new: int) -> None:
    """Add the tokens per second of three texts after one that is not counted."""
    rates = []
    for number in range(4):
        synchronize()
        began = time.perf_counter()
        text = run()
        synchronize()
        seconds = time.perf_counter() - began
        assert text.shape[1] == 8 + new, text.shape
        if number:
            rates.append(new / seconds)
    bench.add(f"tokens/s, one text of {new} new tokens, top_k=200", program=program, **spread(rates))
