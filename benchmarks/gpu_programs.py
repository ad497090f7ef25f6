"""The sections of gpu.py that start whole programs: training beside nanoGPT, start-up, Llama, and the plan for them."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import restart
from gpu_common import PADDED, Bench, load, overrides, quiet, replaced, spread

WATCH = str(Path(__file__).with_name("gpu_watch.py"))
INTERVAL = 10
"""Steps between two lines of metrics."""
NO_ENV: Mapping[str, str] = {}
SKIP = 10
"""Steps left out at the start of a run: they allocate memory and may compile."""
LLAMA = "llama3_1b, MFU by Transformer.flops_per_token"
SHAPES = ((12, 5), (48, 1))
"""Sequences per micro-step and micro-steps per step; 12 is nanoGPT's default."""


def shapes(bench: Bench) -> tuple[tuple[int, int], ...]:
    """Return the sequences per micro-step and micro-steps per step of each setting."""
    return ((2, 2), (3, 1)) if bench.tiny else SHAPES


@dataclass(frozen=True)
class Trained:
    """What one run measured."""

    steps: list[float]
    """Seconds per step, one value for each log interval."""
    memory: dict[str, int]
    """Peak device memory in bytes, allocated and reserved."""


def call(
    command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str] = NO_ENV, limit: float | None = None
) -> str:
    """Run a command to its end, or for ``limit`` seconds, and return its output, which also goes to ``log``."""
    status: int | str
    with log.open("w") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env={**os.environ, **env})
        try:
            status = job.wait(limit)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            status = f"the limit of {limit:.0f} s"
    text = log.read_text(errors="replace")
    if status:
        raise RuntimeError(f"{' '.join(command)}\nended with {status}:\n{text[-2000:]}")
    return text


def reason(error: Exception) -> str:
    """Return how a program ended and the end of what it printed, in one line."""
    text = str(error)
    status = re.search(r"^ended with .*", text, re.MULTILINE)
    return " ".join([status[0] if status else "", text[-300:]]).replace("\n", " ")


def memory(text: str) -> dict[str, int]:
    """Return the peak that gpu_watch.py printed."""
    found = re.search(r"peak device memory: (\d+) allocated, (\d+) reserved", text)
    assert found, text[-2000:]
    return {"allocated": int(found[1]), "reserved": int(found[2])}


def wordrun_command(run: Path, options: Sequence[str], steps: int, log_interval: int) -> list[str]:
    """Return the command that trains wordrun into the folder ``run``."""
    return [
        sys.executable,
        WATCH,
        "-m",
        "wordrun",
        *options,
        f"train.max_iters={steps}",
        f"train.log_interval={log_interval}",
        f"hydra.run.dir={run}",
    ]


def train_wordrun(
    bench: Bench,
    name: str,
    options: Sequence[str],
    steps: int,
    log_interval: int = INTERVAL,
    env: Mapping[str, str] = NO_ENV,
    limit: float | None = None,
) -> Trained:
    """Train wordrun. The time of a step is from one line of metrics.jsonl to the next, logging included."""
    run = bench.run_dir(name)
    text = call(wordrun_command(run, options, steps, log_interval), run.with_suffix(".log"), bench.scratch, env, limit)
    lines = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    skip = min(SKIP, steps // 2)
    found = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if before["step"] >= skip
    ]
    return Trained(found, memory(text))


def nanogpt_command(bench: Bench, batch: int, gas: int, steps: int) -> list[str]:
    """Return the command that trains nanoGPT, to run in its folder."""
    shape = bench.shape
    options = {
        "dataset": bench.data,
        "out_dir": bench.scratch / "nanogpt",
        "batch_size": batch,
        "max_iters": steps,
        "gradient_accumulation_steps": gas,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "block_size": shape.block_size,
        "eval_interval": 10**6,
        "eval_iters": 0,
        "log_interval": 1,
        "device": bench.device,
        "compile": not bench.tiny,
        "dtype": "float32" if bench.tiny else "bfloat16",
    }
    return [sys.executable, "-u", WATCH, "train.py", *(f"--{name}={value}" for name, value in options.items())]


def train_nanogpt(bench: Bench, batch: int, gas: int, steps: int) -> Trained:
    """Train nanoGPT's train.py. It waits for the device at every step, as by default."""
    log = bench.scratch / f"nanogpt-{time.time_ns()}.log"
    text = call(nanogpt_command(bench, batch, gas, steps), log, bench.nanogpt)
    times = re.findall(r"^iter \d+: loss .* time ([\d.]+)ms", text, re.MULTILINE)
    seconds = [float(ms) / 1000 for ms in times][min(SKIP, steps // 2) :]
    # Means over as many steps as between two lines of wordrun: its clock stops before it waits for the device, so that
    # one step is printed too long and the next too short.
    size = min(INTERVAL, len(seconds))
    return Trained([statistics.mean(each) for each in batched(seconds, size)], memory(text))


def batched(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Return consecutive parts of ``size`` values, without the incomplete last one."""
    return [values[at : at + size] for at in range(0, len(values) - size + 1, size)]


def compile_all(bench: Bench) -> None:
    """Compile several settings at once, so that the runs that are measured find them in the cache.

    nanoGPT at the larger micro-batch compiles when it is measured: the device has no memory for all of them together.
    """
    commands = [compile_command(bench, overrides(bench, *shape)) for shape in SHAPES]
    together(bench, [*commands, (nanogpt_command(bench, *SHAPES[0], 2), bench.nanogpt)])


def compile_command(bench: Bench, options: Sequence[str]) -> tuple[list[str], Path]:
    """Return the command that trains two steps of wordrun, and its folder."""
    return wordrun_command(bench.run_dir("compile"), [*options, "train.check_memory=false"], 2, 1), bench.scratch


def together(bench: Bench, commands: Sequence[tuple[Sequence[str], Path]]) -> None:
    """Run commands in their folders, all at once."""
    began = time.perf_counter()
    jobs: list[subprocess.Popen[bytes]] = []
    for command, cwd in commands:
        with (bench.scratch / f"compile-{len(jobs)}.log").open("w") as log:
            jobs.append(subprocess.Popen(command, cwd=cwd, stdout=log, stderr=subprocess.STDOUT))
    failed = sum(job.wait() != 0 for job in jobs)
    bench.add("compilation, settings at once", settings=len(jobs), seconds=time.perf_counter() - began, failed=failed)


def add_trained(
    bench: Bench, table: str, program: str, batch: int, gas: int, runs: Sequence[Trained], flops: int = 0
) -> float:
    """Add a row for one program at one setting, and return its tokens per second.

    ``flops`` are a token's; 0: GPT-2's.
    """
    steps = [step for run in runs for step in run.steps]
    tokens = batch * gas * bench.shape.block_size
    speed = tokens / statistics.median(steps)
    most = max((run.memory for run in runs), key=lambda each: each["allocated"])
    bench.add(
        table,
        program=program,
        batch=f"{batch} x {gas}",
        tokens_per_s=speed,
        ms_median=1000 * statistics.median(steps),
        ms_min=1000 * min(steps),
        ms_max=1000 * max(steps),
        intervals=len(steps),
        mfu_of_measured_peak=bench.mfu(speed * (flops or bench.shape.flops_per_token)),
        allocated_gib=most["allocated"] / 2**30,
        reserved_gib=most["reserved"] / 2**30,
    )
    return speed


def gpt2(bench: Bench) -> None:
    """GPT-2 124M: wordrun's trainer and nanoGPT's train.py in turns."""
    table = (
        f"training, {bench.shape.parameters:,} parameters, MFU by 6 N + 12 L H Q T = {bench.shape.flops_per_token:,}"
    )
    steps = 12 if bench.tiny else 80
    if not bench.tiny:
        compile_all(bench)
    for number, (batch, gas) in enumerate(shapes(bench)):
        ours: list[Trained] = []
        theirs: list[Trained] = []
        for _ in range(bench.rounds if number == 0 else 1):
            theirs.append(train_nanogpt(bench, batch, gas, steps))
            ours.append(train_wordrun(bench, f"gpt2-{batch}", overrides(bench, batch, gas), steps, 10 - 8 * bench.tiny))
        nanogpt = add_trained(bench, table, "nanoGPT", batch, gas, theirs)
        wordrun = add_trained(bench, table, "wordrun", batch, gas, ours)
        each = [statistics.median(b.steps) / statistics.median(a.steps) for a, b in zip(ours, theirs, strict=True)]
        bench.add(
            "wordrun / nanoGPT", batch=f"{batch} x {gas}", ratio=wordrun / nanogpt, rounds=len(each), **spread(each)
        )
        if number == 0:
            if not bench.tiny:
                options = [*overrides(bench, batch, gas), "train.compile_scope=blocks"]
                blocks = [train_wordrun(bench, "blocks", options, steps, 10)]
                add_trained(bench, table, "wordrun, compile_scope=blocks", batch, gas, blocks)
            options = overrides(bench, batch, gas, compiled=False)
            eager = [train_wordrun(bench, "eager", options, steps // 2, 5 - 3 * bench.tiny)]
            add_trained(bench, table, "wordrun, not compiled", batch, gas, eager)


def variants(bench: Bench) -> None:
    """The first setting of gpt2 with the defaults, with the vocabulary's own padding, and with each --variant."""
    usual = shapes(bench)[0]
    steps = 12 if bench.tiny else 60
    for name in ("", "model.vocab_size=null", *bench.variants):
        words = name.split()
        env = dict(word.split("=", 1) for word in words if word[:1].isupper())
        changed = dict(word.split("=", 1) for word in words if not word[:1].isupper())
        batch, gas = (
            int(changed.get(key, value))
            for key, value in zip(("model.batch_size", "optimizer.gas"), usual, strict=True)
        )
        options = replaced(overrides(bench, batch, gas), [f"{key}={value}" for key, value in changed.items()])
        try:
            done = train_wordrun(bench, "variant", options, steps, 10 - 8 * bench.tiny, env)
        except RuntimeError as error:
            bench.add("not run", variant=name, why=reason(error))
        else:
            add_trained(bench, "variants of wordrun", name or "defaults", batch, gas, [done])


ROWS = {
    "AdamW": "",
    "float8, tensorwise": "train.float8=tensorwise",
    "float8, rowwise": "train.float8=rowwise",
    "attention within documents": "data.mask_documents=true",
    "Muon": "optimizer=muon",
    "modern, depth 12, Muon": "optimizer=muon model=modern",
    "activation offload, not compiled": "train.activation_offload=true train.compile=false train.compile_scope=blocks",
    "48 x 1": "model.batch_size=48 optimizer.gas=1",
}
"""What section rows compares at nanoGPT's setting, each with its changes."""


def row_options(bench: Bench, words: str) -> list[str]:
    """Return the overrides of a row with the changes ``words``."""
    batch, gas = shapes(bench)[0]
    options = overrides(bench, batch, gas)
    if "model=modern" in words:  # depth sets its shape
        options = [each for each in options if not each.startswith("model")]
        options += ["model.depth=2" if bench.tiny else "model.depth=12", f"model.block_size={bench.shape.block_size}"]
        options += [f"model.vocab_size={PADDED}", f"model.batch_size={batch}"]
    if "mask_documents" in words:
        options = replaced(options, [f"data.path={bench.documents}"])
    return replaced(options, [*words.split(), *["train.compile=false"] * bench.tiny])


def rows(bench: Bench) -> None:
    """GPT-2 124M at nanoGPT's setting with one change each, and llama3_1b with full activation checkpointing."""
    import wordrun
    from wordrun.model.construction import meta_model

    steps, interval = (12, 2) if bench.tiny else (40, 10)
    every = {name: row_options(bench, words) for name, words in ROWS.items()}
    if not bench.tiny:
        together(bench, [compile_command(bench, each) for each in every.values() if "train.compile=true" in each])
    for name, options in every.items():
        try:
            cfg = wordrun.compose(options)
            flops = (meta_model(cfg.transformer, PADDED).flops_per_token() or 0) if "modern" in name else 0
            done = train_wordrun(bench, "row", options, steps, interval, limit=60)
            batch, gas = cfg.transformer.batch_size, cfg.train.accumulation or 1
            add_trained(bench, "rows", name, batch, gas, [done], flops)
        except Exception as error:  # a row that fails must not stop the next
            bench.add("not run", row=name, why=reason(error))
    add_checkpointed_llama(bench, "full", (24, 16))


def first_step(bench: Bench, options: Sequence[str], cache: Path) -> float:
    """Return the seconds from the start of wordrun until metrics.jsonl has the first step."""
    run = bench.run_dir("start")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    with run.with_suffix(".log").open("w") as log:
        began = time.perf_counter()
        job = subprocess.Popen(
            wordrun_command(run, options, 1, 1), stdout=log, stderr=subprocess.STDOUT, env=env, cwd=bench.scratch
        )
        lines = run / "metrics.jsonl"
        while not (lines.exists() and lines.stat().st_size) and job.poll() is None:
            time.sleep(0.01)
        seconds = time.perf_counter() - began
    if job.wait():
        raise RuntimeError(run.with_suffix(".log").read_text()[-2000:])
    return seconds


def start(bench: Bench) -> None:
    """Start to the first step: not compiled, compiled with an empty cache, and with the cache of that run."""
    cache = bench.scratch / f"cold-{time.time_ns()}"
    for name, compiled in (("not compiled", False), ("compiled, empty cache", True), ("compiled, warm cache", True)):
        options = overrides(bench, *shapes(bench)[0], compiled=compiled and not bench.tiny)
        bench.add("start to first step", kind=name, seconds=first_step(bench, options, cache))


STUCK = """
import sys, time, torch
from wordrun import dist
with dist.session() as world:
    if world.device == "cpu":
        time.sleep(60)
    torch.cuda._sleep(10**12)
    torch.cuda.synchronize()
"""


def elastic(bench: Bench) -> None:
    """A rank that is killed, with guardians and without: seconds to the next step; and a rank that waits for ever."""
    sizes = [f"train.device={bench.device}", "train.backend=DDP", "train.deterministic=true", "optimizer=adamw"]
    before = used_mib(bench)
    for way in restart.WAYS:
        folder = bench.scratch / f"elastic-{time.time_ns()}"
        found = restart.train(way, 1, 1, folder, sizes)
        left = used_mib(bench)
        for fault in found:
            lost = fault["last_step"] - fault["resumed_step"]
            bench.add("killed rank", way=way, seconds=fault["seconds"], steps_lost=lost, mib_before=before, after=left)
    log = bench.scratch / "stuck.log"
    command = [sys.executable, "-m", "wordrun.launch", "-n", "1", "--idle-timeout", "20", sys.executable, "-c", STUCK]
    began = time.perf_counter()
    try:
        call(command, log, bench.scratch, limit=50)
    except RuntimeError as error:
        print(error, flush=True)
    shown = log.read_text(errors="replace")[-700:]
    bench.add("rank that waits", seconds=time.perf_counter() - began, mib_after=used_mib(bench), report=repr(shown))


def used_mib(bench: Bench) -> int | None:
    """Return the device's memory in use, by all processes, in MiB."""
    if bench.tiny:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def planned_bytes(options: Sequence[str], checkpointing: str) -> float | None:
    """Return the planned peak of the configured strategy on one H100 in bytes, or None if there is no estimate."""
    from wordrun.commands.plan import plan as report
    from wordrun.plan.estimator import Estimate

    row = report(["plan.ranks=1", "plan.device=h100-80", *options]).rows[0]
    return row.memory[checkpointing].total if isinstance(row, Estimate) else None


def llama_options(bench: Bench, backend: str, checkpointing: str, batch: int) -> list[str]:
    """Return the overrides of llama3_1b at 2,048 tokens."""
    options = ["model=llama3_1b", "model.block_size=2048", "train.dtype=bf16", "train.compile=true"]
    if bench.tiny:
        options = ["model=llama_debug", f"model.vocab_size={PADDED}", "train.dtype=fp32"]
    return [
        *options,
        f"train.backend={backend}",
        f"train.activation_checkpointing={checkpointing}",
        f"model.batch_size={batch}",
        "optimizer=adamw",
        "optimizer.gas=1",
        *quiet(bench),
    ]


def llama(bench: Bench) -> None:
    """llama3_1b at the largest of a few batches that fits by the plan, by kind of activation checkpointing.

    One rank computes without shards, so ``train.backend=FSDP`` is refused there, and DDP measures the same step.
    """
    for checkpointing, batches in (("none", (8, 6, 4)), ("selective", (12, 8))):
        add_checkpointed_llama(bench, checkpointing, batches)


def add_checkpointed_llama(bench: Bench, checkpointing: str, batches: Sequence[int]) -> None:
    """Measure llama3_1b at the first of ``batches`` that fits by the plan, or at the last."""
    for batch in (2,) if bench.tiny else batches:
        need = planned_bytes(llama_options(bench, "DDP", checkpointing, batch), checkpointing)
        if need is not None and need <= 79.2 * 0.9 * 2**30:
            break
    try:
        options = llama_options(bench, "DDP", checkpointing, batch)
        add_llama(bench, "DDP", checkpointing, batch, train_wordrun(bench, f"llama-{checkpointing}", options, 20, 5))
    except RuntimeError as error:
        why = reason(error)
        bench.add("not run", backend="DDP", checkpointing=checkpointing, batch=batch, why=why)


def add_llama(bench: Bench, backend: str, checkpointing: str, batch: int, done: Trained) -> None:
    """Add a row for one run of llama3_1b."""
    import wordrun
    from wordrun.model.construction import meta_model

    model = wordrun.compose(llama_options(bench, "DDP", checkpointing, batch)).transformer
    median = statistics.median(done.steps)
    speed = batch * model.block_size / median
    bench.add(
        LLAMA,
        backend=backend,
        checkpointing=checkpointing,
        batch=batch,
        block=model.block_size,
        tokens_per_s=speed,
        ms_median=1000 * median,
        ms_min=1000 * min(done.steps),
        ms_max=1000 * max(done.steps),
        mfu_of_measured_peak=bench.mfu(speed * meta_model(model, PADDED).flops_per_token()),
        allocated_gib=done.memory["allocated"] / 2**30,
        reserved_gib=done.memory["reserved"] / 2**30,
    )


def plan(bench: Bench) -> None:
    """The plan of each measured configuration, beside what was measured."""
    cases = []
    for table, rows in load(bench.out)["sections"].get("gpt2", {}).get("tables", {}).items():
        for row in rows if table.startswith("training") else ():
            if row["program"].startswith("wordrun"):
                batch, gas = map(int, row["batch"].split(" x "))
                options = overrides(bench, batch, gas, compiled="not" not in row["program"])
                cases.append((f"{row['program']}, {row['batch']}", options, "none", row))
    for row in bench.rows("llama", LLAMA):
        options = llama_options(bench, "DDP", row["checkpointing"], row["batch"])
        name = f"llama3_1b, {row['backend']}, {row['checkpointing']}, batch {row['batch']}"
        cases.append((name, options, row["checkpointing"], row))
    for name, options, checkpointing, row in cases:
        need, had = planned_bytes(options, checkpointing), row["allocated_gib"]
        gib = None if need is None else need / 2**30
        bench.add(
            "plan (its peak of allocated memory) beside the measurement",
            configuration=name,
            plan_gib=gib,
            measured_gib=had,
            ratio=gib / had if gib and had else None,
            measured_ms=row["ms_median"],
        )
