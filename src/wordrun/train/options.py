"""Options of training: the trainer's, schedules, metrics and profilers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from wordrun.common.section import Section, value_text
from wordrun.common.validation import above_zero, metric_of, not_negative, one_of, positive

DTYPES = {
    "auto": "auto",
    "fp32": "fp32",
    "float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
}


@dataclass
class ScheduleConfig(Section):
    """The learning rate after the warm-up: cosine (half a cosine down to optimizer.min_lr) or constant."""

    name: str = "cosine"
    """Name of the schedule; set by schedule=NAME."""


@dataclass
class LinearScheduleConfig(ScheduleConfig):
    """Constant after the warm-up, then linear decay to optimizer.min_lr (WSD: warm-up, stable, decay)."""

    name: str = "linear"
    """Name of the schedule; set by schedule=NAME."""
    decay_iters: int | None = None
    """Number of decay steps; null: all steps after the warm-up, or decay_fraction of them."""
    decay_fraction: float | None = None
    """Fraction of the steps after the warm-up in which the learning rate decays, instead of decay_iters."""

    def problems(self) -> Iterable[str]:
        yield from positive("schedule", self, "decay_iters")
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            yield f"schedule.decay_fraction={self.decay_fraction} should be above 0 and at most 1"
        if None not in (self.decay_iters, self.decay_fraction):
            yield (
                f"schedule.decay_iters={self.decay_iters} and schedule.decay_fraction={self.decay_fraction} both set "
                "the decay: omit one"
            )


CHECKPOINTING = re.compile(r"none|full|selective|0*[1-9]\d*|full:\d+|(full:\d+\+)?selective:\d+")
"""The values of train.activation_checkpointing."""


def checkpointing_of(setting: str, block: int) -> str:
    """Return what the value ``setting`` of train.activation_checkpointing means for the block of this number.

    Returns:
        none, selective or full.
    """
    if setting.isdecimal():
        return "none" if block % int(setting) else "full"
    if ":" not in setting:
        return setting
    for part in setting.split("+"):
        kind, _, count = part.partition(":")
        if block < int(count):
            return kind
        block -= int(count)
    return "none"


@dataclass
class TrainConfig(Section):
    """Steps, batch size, precision, evaluation, samples and checkpoints."""

    backend: str = "DDP"
    """Parallelization backend: DDP, FSDP, TP, PP, 3D, deepspeed or diloco."""
    max_iters: int = 2000
    """Number of optimizer steps."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; sets train.accumulation."""
    accumulation: int | None = None
    """Gradient accumulation: micro-batches of model.batch_size per optimizer step; null: 1, or as required by
    train.global_batch_size."""
    batch_ramp: list[str] = field(default_factory=list)
    """Other global batch sizes at the start, as STEP:SEQUENCES: [100:16,300:32] takes 16 sequences per step until step
    100, then 32 until step 300, then global_batch_size."""
    eval_interval: int = 250
    """Steps between evaluations; 0: never."""
    eval_iters: int | None = 50
    """Number of validation batches per evaluation, each as large as the global batch, evenly spaced in the validation
    data; null: all validation data."""
    log_interval: int = 10
    """Steps between logged metrics."""
    sample_interval: int = 500
    """Steps between generated samples; 0: only at the end."""
    sample_tokens: int = 200
    """Tokens to generate per sample; 0: no samples."""
    sample_prompt: str = "\n"
    """Prompt for the samples; if it has no tokens, they begin with the end-of-text token. With data=pairs they are
    answers to it, by default to the first validation prompt."""
    suggest: bool = True
    """Suggest commands for the next step when the run has finished."""
    report: bool = True
    """Draw the plots and write report.html when the run ends; wordrun report also writes the page later."""
    temperature: float = 0.8
    """Sampling temperature; lower is more deterministic."""
    top_k: int | None = 200
    """Sample from the k most likely tokens; null: from all tokens."""
    dtype: str = "auto"
    """Compute precision: fp32, bf16, fp16, or auto (bf16 if the device supports it at full speed, else fp32)."""
    float8: str = "none"
    """Multiply in float8 in the linear layers of the blocks, with train.dtype=bf16: none, tensorwise (one scale per
    matrix) or rowwise (one per row); for NVIDIA GPUs of the Ada (rowwise: Hopper) generation or later."""
    compile: bool | str = "auto"
    """Compile the model with torch.compile: faster steps, up to minutes of extra startup time. auto: time some steps
    without and with it and keep the faster, if enough of the run is left for that to pay off."""
    compile_scope: str = "blocks"
    """What is compiled as one graph: blocks (each block, and the loss; all blocks share their code, and DDP overlaps
    its communication with them) or model (the complete model: takes longer to compile, a few percent faster)."""
    chunked_loss: bool | None = None
    """Compute the logits chunk by chunk, each turned into its gradient at once, so that they exist only in the compute
    precision, which takes less memory. null: for more than 2^24 logits in a micro-step."""
    activation_checkpointing: str = "none"
    """What to recompute in the backward pass to save memory: none, full (every block), a number n (every n-th block),
    selective (everything in a block except matrix products and attention), or for how many blocks from the first one
    on: full:4+selective:8 (4 blocks full, the next 8 selective, none of the others)."""
    memory_budget_gb: float | None = None
    """Memory budget per rank in GB (10^9 bytes): sets activation_checkpointing to the least recomputation whose
    estimated memory fits; null: no budget."""
    activation_offload: bool = False
    """Offload the activations that blocks save for the backward pass to host memory; for accelerators."""
    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda or xpu."""
    seed: int = 1337
    """Random seed for weights, data order, dropout and samples."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs with the same options on the same number of ranks, devices
    and versions have bitwise identical losses and weights; slower."""
    check_memory: bool = True
    """Do not start a run whose estimated memory is more than a rank has."""
    timeout_s: int = 1800
    """Timeout of collectives in seconds: the run is aborted if a rank does not take part in time."""
    hang_s: int = 120
    """Seconds without progress after which the run reports where each rank is and for which ranks the others wait, and
    continues; start-up, the first step, samples and saves may take five times as long; 0: never."""
    checkpoint_interval: int = 1000
    """Steps between checkpoints, in addition to one after the last step; 0: no checkpoints."""
    keep_checkpoints: int = 2
    """Number of recent checkpoints to keep, in addition to the best one."""
    memory_checkpoint_interval: int = 0
    """Steps between checkpoints in the nodes' memory (/dev/shm), of which each node also keeps a copy of another node's
    share: a run that is relaunched after a failure resumes from the newest one. 0: none."""
    save_best: bool = True
    """Also write a checkpoint whenever train.best_metric is the best so far."""
    best_metric: str = "val_loss"
    """Metric of an evaluation by which checkpoints are compared, such as val_accuracy."""
    best_mode: str = "auto"
    """Which values of train.best_metric are better: min, max, or auto (known from its name)."""
    async_save: bool = True
    """Write checkpoints in the background: only the device-to-host copy blocks training."""
    on_save_error: str = "continue"
    """What to do if a checkpoint cannot be written: continue (with a warning) or stop."""
    on_nonfinite: str = "stop"
    """What to do if gradients are non-finite: stop, skip (the step), or rollback (to the last checkpoint, continuing
    with the data that comes next)."""
    resume: str | None = None
    """Run directory or checkpoint to resume from, or auto: the newest checkpoint in this run directory if there is
    one, else a new run; null: auto if the job was requeued, chained or retried, else a new run."""
    init_from: str | None = None
    """Where a new run loads its initial weights from: a run directory, a checkpoint, a Hugging Face model (hf:DIRECTORY
    or hf:NAME), or a checkpoint of nanoGPT or wordplay (nanogpt:FILE). A resumed run ignores it."""

    @property
    def save_intervals(self) -> tuple[int, ...]:
        """Steps between checkpoints of each kind; 0: there are none of that kind."""
        return self.checkpoint_interval, self.memory_checkpoint_interval

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return any(self.save_intervals)

    @property
    def save_hooks(self) -> list[str]:
        """The hooks, as ``module:Class``, that keep checkpoints elsewhere than on disk."""
        return ["wordrun.checkpoint.memory.hook:MemoryCheckpoint"] if self.memory_checkpoint_interval else []

    def problems(self) -> Iterable[str]:
        yield from positive(
            "train", self, "accumulation", "max_iters", "eval_iters", "log_interval", "top_k", "timeout_s"
        )
        yield from positive("train", self, "keep_checkpoints")
        yield from not_negative("train", self, "eval_interval", "sample_interval", "sample_tokens", "seed")
        yield from not_negative("train", self, "checkpoint_interval", "memory_checkpoint_interval", "hang_s")
        yield from above_zero("train", self, "temperature")
        for name, most in (("seed", 2**62), ("timeout_s", 10**8), ("hang_s", 10**8)):
            if getattr(self, name) > most:
                yield f"train.{name}={getattr(self, name)} should be at most {most}"
        yield from one_of("train.dtype", self.dtype, DTYPES)
        yield from one_of("train.device", self.device, ["auto", "cpu", "cuda", "xpu"])
        yield from one_of("train.float8", self.float8, ["none", "tensorwise", "rowwise"])
        if self.compile not in (True, False, "auto"):
            yield f"train.compile={self.compile} should be true, false or auto"
        yield from one_of("train.compile_scope", self.compile_scope, ["blocks", "model"])
        yield from metric_of("train.best_metric", self.best_metric, self.best_mode, "train.best_mode")
        yield from one_of("train.on_save_error", self.on_save_error, ["continue", "stop"])
        yield from one_of("train.on_nonfinite", self.on_nonfinite, ["stop", "skip", "rollback"])
        checkpointing = self.activation_checkpointing
        if not CHECKPOINTING.fullmatch(checkpointing):
            known = ["none", "full", "selective", "N", "full:N", "selective:N", "full:N+selective:N"]
            yield from one_of("train.activation_checkpointing", checkpointing, known)
        yield from above_zero("train", self, "memory_budget_gb") if self.memory_budget_gb is not None else ()
        if self.memory_budget_gb is not None and checkpointing != "none":
            yield (
                f"train.memory_budget_gb={self.memory_budget_gb:g} chooses what to recompute, and so does "
                f"train.activation_checkpointing={checkpointing}: omit one of the two"
            )
        yield from self._offload_problems()
        ramp = ",".join(self.batch_ramp)
        try:
            steps = [step for step, _ in self.ramp()]
        except ValueError:
            yield f"train.batch_ramp=[{ramp}] should be a list of STEP:SEQUENCES, such as [100:16,300:32]"
        else:
            if steps != sorted(set(steps)) or min(steps, default=1) < 1:
                yield f"train.batch_ramp=[{ramp}] should have rising steps, from 1 up"
        if not self.sample_prompt:
            yield "train.sample_prompt is empty: set a prompt, such as a line break"
        if self.on_nonfinite == "rollback" and not self.checkpoint_interval:
            yield "train.on_nonfinite=rollback needs checkpoints: set train.checkpoint_interval"

    def _offload_problems(self) -> Iterable[str]:
        """Return what rules out activation_offload."""
        for is_conflict, other, reason in (
            (self.activation_checkpointing != "none", "activation_checkpointing", "recomputes what this would keep"),
            (self.memory_budget_gb is not None, "memory_budget_gb", "estimates recomputation, not offloading"),
            (self.compile is True, "compile", "leaves to the compiler what is saved"),
            (self.device == "cpu", "device", "has no other memory"),
        ):
            if self.activation_offload and is_conflict:
                value = value_text(getattr(self, other))
                yield f"train.activation_offload=true: train.{other}={value} {reason}: omit one of the two"

    def ramp(self) -> list[tuple[int, int]]:
        """Return the entries of batch_ramp: until which step, how many sequences.

        Raises:
            ValueError: an entry is not STEP:SEQUENCES.
        """
        pairs = [entry.split(":") for entry in self.batch_ramp]
        return [(int(step), int(sequences)) for step, sequences in pairs]


def accumulation(cfg: Any, dp: int, step: int | None = None) -> int:
    """Return the number of micro-steps in an optimizer step on ``dp`` data-parallel ranks.

    Args:
        cfg: the complete Config.
        dp: number of data-parallel ranks.
        step: the optimizer step, counted from 0; None: any step after train.batch_ramp.
    """
    per_micro_step: int = cfg.model.batch_size * dp
    for until, sequences in cfg.train.ramp():
        if step is not None and step < until:
            return int(sequences // per_micro_step)
    if cfg.train.global_batch_size is not None:
        return int(cfg.train.global_batch_size // per_micro_step)
    if cfg.train.accumulation or cfg.optimizer.gas:
        return int(cfg.train.accumulation or cfg.optimizer.gas)
    suits: int = cfg.model.sequences_per_step() or 0
    return max(1, round(suits / per_micro_step))


@dataclass
class MetricConfig(Section):
    """Options of a metric, which evaluations report besides the loss."""


@dataclass
class AccuracyConfig(MetricConfig):
    """Fraction of targets that are the likeliest class (or, for text, token)."""


@dataclass
class TopKConfig(MetricConfig):
    """Fraction of targets that are among the likeliest classes (or, for text, tokens)."""

    k: int = 5
    """How many of the likeliest count."""

    def problems(self) -> Iterable[str]:
        return positive("metrics.top5", self, "k")


@dataclass
class ProfilerConfig(Section):
    """Profiling of the run."""

    name: str = "none"
    """Name of the profiler."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile; each writes its own files under profile/ in the run directory."""

    def problems(self) -> Iterable[str]:
        if min(self.ranks, default=0) < 0:
            yield f"profiler.ranks={self.ranks} should not be negative"


@dataclass
class PyinstrumentConfig(ProfilerConfig):
    """Sampling profile of the Python code, as HTML and text."""

    name: str = "pyinstrument"
    """Name of the profiler."""
    interval_s: float = 0.001
    """Sampling interval in seconds."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *above_zero("profiler", self, "interval_s")]


@dataclass
class ScheduledProfilerConfig(ProfilerConfig):
    """Options of profilers that record a few steps."""

    wait: int = 10
    """Number of steps before the profiler starts."""
    warmup: int = 2
    """Number of warm-up steps: profiled but discarded, because profiler start-up distorts them."""
    active: int = 3
    """Number of steps to record."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from not_negative("profiler", self, "wait", "warmup")
        yield from positive("profiler", self, "active")


@dataclass
class TorchProfilerConfig(ScheduledProfilerConfig):
    """Trace of operators and kernels over a few steps, by torch.profiler, and a table of the slowest."""

    name: str = "torch"
    """Name of the profiler."""
    shapes: bool = False
    """Also record the shapes of inputs."""
    stacks: bool = False
    """Also record the Python stacks, which slows the recorded steps down."""


@dataclass
class SpansProfilerConfig(ProfilerConfig):
    """A timeline of all ranks: when each is in which phase of a step."""

    name: str = "spans"
    """Name of the profiler."""
    ranks: list[int] = field(default_factory=list)
    """Ranks in the timeline; []: all."""
    wait: int = 10
    """Number of steps before the first that is recorded, at least 1."""
    active: int = 10
    """Number of steps to record."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *positive("profiler", self, "wait", "active")]


@dataclass
class MemoryProfilerConfig(ScheduledProfilerConfig):
    """What allocates memory: on CUDA a snapshot, also when memory runs out; on CPUs a table of operations."""

    name: str = "memory"
    """Name of the profiler."""
    entries: int = 100_000
    """On CUDA: number of allocations and frees to keep, the last ones."""
    rows: int = 30
    """On CPUs: number of operations in the table."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *positive("profiler", self, "entries", "rows")]
