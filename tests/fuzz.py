"""Trains combinations of options that nobody has chosen, on one process and on several ranks, and compares the two.

  python tests/fuzz.py --cases 1000 --seed 7          # one of them again: --first NUMBER --cases 1
  python tests/fuzz.py --case '{"options": ...}'      # a case that a failure has printed

Which parts and options exist is read from the registry: a new one is drawn without a change here. An option is drawn
by its type, and of those with fixed choices each choice, which the option's own error message lists. A case fails if
the run on ranks differs from the run of one process on the same global batch:

- losses, gradient norms, rates, FLOP and all other metrics of six steps; the initial weights, the gradients of the
  first step and (with SGD) the weights after the last, by name; the number of validation tokens;
- the memory of weights and optimizer, compared with the plan, and the size of a checkpoint;
- one of: a second run without evaluations, which has to be bitwise identical; a run on another layout that resumes
  from a checkpoint of this one; an export that is read back.

The gradients of one process are compared with those of a plain loop. A difference counts if it is beyond both rounding
and ten times what relative changes of 3e-7 in the initial weights do to the run of one process. What ranks reject and
one process does not is listed with its reasons. fuzz_runs.py has what ranks do, and the comparison.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

import forked
import fuzz_runs
from fuzz_runs import Job, RejectedError, RunError, run_on
from wordrun.common.errors import ConfigError
from wordrun.common.section import field_types, value_text
from wordrun.config.compose import compose
from wordrun.config.registry import parts
from wordrun.config.rules import check
from wordrun.config.schema import SEVERAL, Config
from wordrun.dist.mesh import Layout
from wordrun.train.options import TrainConfig

Words = dict[str, Any]
STEPS = 6
# Parts that need a folder, a network or an hour, or that end the run.
LEFT_OUT = yaml.safe_load("""
model: [hf, resnet]
data: [download, hf, mnist, cifar10, shards]
tokenizer: [hf, gpt2]
hooks: [lr_range, early_stop]
""")
# What kinds of data need besides their defaults; write_inputs makes the files.
INPUTS = yaml.safe_load("""
file: [{data.path: text.txt}, {data.path: short.txt}, {data.path: documents.jsonl}]
pairs: [{data.path: pairs.jsonl, tokenizer: byte}]
mix: [{data.mix: {sample: 3, shards: 1}, tokenizer: byte, train.eval_iters: 2}]
sample: [{train.eval_iters: 1}]
imagefolder: [{data.path: images, data.size: 8}]
fake_images: [{data.size: 8, data.classes: 4, data.examples: 50}]
digits: [{train.eval_iters: 1}]
""")
OFTEN = ("file", "file", "file", "pairs", "pairs", "mix", "sample")
# Options that are not drawn: of time, paths, devices, the output or random numbers; those whose meaning depends on the
# number of ranks; and lower precisions of sums.
FIXED = re.compile(
    r".*\.(name|kind|\w*dropout|batch_size|gas)|data\.(workers|threads|offline|format|size|examples)"
    r"|optimizer\.(scale_lr|decay_lr|learning_rate)|backend\.(compress|reduce_dtype)|train\.(backend|max_iters|device"
    r"|global_batch_size|\w*_interval|sample\w*|suggest|report|temperature|top_k|float8|memory_budget_gb|timeout_s"
    r"|activation_offload|hang_s|check_memory|keep_checkpoints|save_best|best_\w+|on_save_error|resume|init_from)"
)
# Options of how a step is computed, which must not change its result: one process has their defaults.
FREE = re.compile(
    r"backend\..*|data\.prefetch|model\.batch_size|train\.(backend|chunked_loss|activation_checkpointing|compile"
    r"|compile_scope|async_save|on_nonfinite|deterministic)"
)
# Values of options whose types do not tell which make sense for small models and short runs.
VALUES = yaml.safe_load("""
model.n_layer: [2, 3, 4]
model.n_head: [2, 4, 6]
model.n_embd: [16, 24, 48]
model.n_kv_head: [1, 2]
model.head_size: [4, 6, 8]
model.block_size: [8, 12, 32]
model.n_hidden: [24, 48]
model.vocab_size: [260, 300]
model.depth: []
model.lora_rank: [2]
model.lora_targets: []
model.ngram_rows: [[31], [31, 15]]
model.value_layers: [[], [0], [1], [0, -1]]
model.window: [3, 5]
model.channels: [3, 4]
model.norm: [sync]
model.mup_base_width: [8, 16]
tokenizer.vocab_size: [270, 300]
data.template: ["Q {prompt} A {answer}", "{prompt} {answer}."]
train.batch_ramp: [["2:4"], ["1:4", "3:8"]]
train.compile: [true, false, false, false]
train.dtype: [fp32, fp32, fp32, bf16]
train.eval_iters: [null, 1, 2]
backend.ep: [2, 2, 4]
optimizer.lr_decay_iters: [4, 9]
optimizer.warmup_iters: [0, 3]
optimizer.grad_clip: [0.0, 0.3, 0.7]
""")
BASE = yaml.safe_load("""
{model.n_layer: 2, model.n_head: 4, model.n_embd: 32, model.block_size: 16, model.n_hidden: 40, model.n_experts: 4,
model.channels: 4, model.hidden: 12, model.dropout: 0.0, data.workers: 1, data.shard_mb: 1, data.threads: 1,
optimizer.warmup_iters: 1, hooks.statistics.interval: 2, train.eval_interval: 3, train.eval_iters: null,
train.log_interval: 1, train.sample_tokens: 0, train.suggest: false, train.report: false, train.dtype: fp32,
train.device: cpu, train.save_best: false, train.checkpoint_interval: 0, train.keep_checkpoints: 9,
train.timeout_s: 240, train.hang_s: 0, train.check_memory: false}
""") | {"train.max_iters": STEPS}
SIMPLEST = {"model": "gpt", "tokenizer": "byte", "data": "file", "optimizer": "sgd", "schedule": "constant"}
# The probability that each option of a section is drawn.
DRAWN = {"model": 0.3, "tokenizer": 0.5, "data": 0.2, "optimizer": 0.2, "schedule": 0.4, "train": 0.15}
AXES = {axis.name for axis in fields(Layout)}
DRAWN |= {"hooks": 0.5, "metrics": 0.5, "backend": 0.25}


@dataclass(frozen=True)
class Case:
    """What one process and several ranks train."""

    options: Words
    """Options of both, by name; a part is named by its kind."""
    how: Words
    """Options that must not change the result: the layout and the like."""
    ranks: int
    probe: str = ""
    """What else is tried: quiet (without evaluations), resume, export or nothing."""
    step: int = 3
    """The step whose checkpoint is resumed."""
    then: Words = field(default_factory=dict)
    """The layout that resumes it."""
    then_ranks: int = 1

    @property
    def alone(self) -> Words:
        """The options with which one process computes the same."""
        batch = self.options["train.global_batch_size"]
        size = math.gcd(batch, *(int(each.partition(":")[2]) for each in self.options.get("train.batch_ramp", ())))
        if self.options.get("model.norm", "none") != "none":  # whose statistics are those of all ranks' micro-batches
            at = config(self.options | self.how).backend.layout(self.ranks, self.ranks)
            size = self.how["model.batch_size"] * at.dp
        return self.options | {"model.batch_size": size}


def options_of(kind: str, name: str, words: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the options of a part, with those of ``BASE`` and ``words`` that it has."""
    part = parts(kind)["file" if (kind, name) == ("data", "mix") else name.lower()]
    known = {each.name for each in fields(part.options)}
    values: Words = {"name": name if kind == "data" else part.name, "kind": name} if kind != "model" else {}
    for key, value in {**BASE, **words}.items():
        if key.rpartition(".")[0] == (prefix or kind):
            values[key.rpartition(".")[2]] = value
    return part.options(**{key: value for key, value in values.items() if key in known})


def config(words: Mapping[str, Any], run_dir: str = "run") -> Config:
    """Return the Config of these options, without the second that Hydra takes."""
    one = {kind: options_of(kind, words.get(kind, name), words) for kind, name in SIMPLEST.items()}
    one["backend"] = options_of("backend", words.get("train.backend", "DDP"), words)
    for kind in SEVERAL:
        names = words.get(kind, ["jsonl"] if kind == "tracker" else [])
        one[kind] = {name: options_of(kind, name, words, f"{kind}.{name}") for name in names}
    train = {key.partition(".")[2]: value for key, value in {**BASE, **words}.items() if key.startswith("train.")}
    return Config(**one, train=TrainConfig(**train), run_dir=run_dir)


def sections(cfg: Config) -> dict[str, Any]:
    """Return the options of each part of ``cfg`` by the prefix of their names."""
    found = {kind: getattr(cfg, kind) for kind in (*SIMPLEST, "backend", "train")}
    return found | {
        f"{kind}.{name}": each for kind in ("hooks", "metrics") for name, each in getattr(cfg, kind).items()
    }


def fits(words: Words, ranks: int) -> bool:
    """Return whether options suit this number of ranks; only a ConfigError says that they do not."""
    try:
        check(config(words), ranks)
    except ConfigError:
        return False
    return True


def available(kind: str) -> list[str]:
    """Return the names of a kind's parts that can be drawn."""
    names = [name for name in parts(kind) if name not in LEFT_OUT.get(kind, ())]
    return [*names, "mix"] if kind == "data" else names


def candidates(options: Any, key: str) -> list[Any]:
    """Return values for the option ``key``, by its type and by what its own check says."""
    name = key.rpartition(".")[2]
    kind, default = field_types(type(options))[name], getattr(options, name)
    kinds, values = {*get_args(kind)} or {kind}, list(VALUES.get(key, ()))
    if get_origin(kind) in (list, dict):
        values = values or ([[], [0], [0, 1]] if kind == list[int] and key not in VALUES else [])
    elif key not in VALUES:
        values += [True, False] if bool in kinds else []
        values += {0, 1, 2, 3, 4, (default or 0) // 2, min(64, 2 * (default or 0))} if int in kinds else []
        if float in kinds:
            values += [default * 0.5, default * 1.5, 0.0] if default else [0.01, 0.1]
        if kinds >= {str}:
            said = " ".join(replace(options, **{name: "?"}).problems())
            listed = re.search(rf"{name}=\? should be one of ([^()]*)", said)
            values += re.sub(r"\bN\b", "1", listed[1]).split(", ") if listed else []
        values += [None] if type(None) in kinds and values else []
        values = [value for value in values if value != default]
    return [value for value in values if not [*replace(options, **{name: value}).problems()]]


def drawn(draw: random.Random, words: Words, kinds: Sequence[str], works: Callable[[Words], bool]) -> Words:
    """Return ``words`` with some more options of these kinds, as long as it works."""
    keys = {f"{prefix}.{f.name}": each for prefix, each in sections(config(words)).items() for f in fields(each)}
    free = [key for key in keys if key.partition(".")[0] in kinds and not FIXED.fullmatch(key) and key not in words]
    draw.shuffle(free)
    for key in free:
        chance = 0.6 if key.rpartition(".")[2] in AXES else DRAWN[key.partition(".")[0]]
        if draw.random() < chance and (values := candidates(keys[key], key)):
            changed = words | {key: draw.choice(values)}
            words = changed if works(changed) else words
    return words


def draw_layout(draw: random.Random, options: Words, ranks: int, *, more: bool) -> Words | None:
    """Return a layout and, if ``more``, other ways to compute ``options`` on ``ranks``; None: none was found."""
    backends = [parts("backend")[name] for name in available("backend")]
    names = [each.name for each in backends if each.options.synchronous]
    draw.shuffle(names)
    first = draw.random()  # layouts that divide the model suit fewer options, and would be rare
    if first < 0.7:
        simple = {each.name: not each.options.pipeline if first < 0.3 else each.options.replicated for each in backends}
        names.sort(key=simple.__getitem__)
    batch = options["train.global_batch_size"]
    for name in (name for name in names for _ in range(12)):
        empty, rest = options_of("backend", name, {}), ranks
        sizes = dict.fromkeys((axis for axis in empty.axes() if hasattr(empty, axis)), 1)
        for prime in (2, 2, 3):
            if sizes and rest % prime == 0:
                sizes[draw.choice([*sizes, *(axis for axis in sizes if axis not in ("replicate", "shard"))])] *= prime
                rest //= prime
        how = {"train.backend": name} | {f"backend.{axis}": size for axis, size in sizes.items()}
        try:
            dp = config(options | how).backend.layout(ranks, ranks).dp
        except ConfigError:
            continue
        if not (possible := [size for size in range(1, batch + 1) if batch % (size * dp) == 0]):
            continue
        how["model.batch_size"] = draw.choice(possible)
        if fits(options | how, ranks):
            kinds = ("backend", "train", "data") if more else ()
            whole = drawn(draw, options | how, kinds, lambda words: fits(words, ranks))
            return {key: value for key, value in whole.items() if FREE.fullmatch(key)}
    return None


def draw_case(seed: int, number: int) -> Case:
    """Return the case of this number."""
    draw = random.Random(f"{seed} {number}")

    def works(words: Words) -> bool:
        base = {"train.init_from": "base"} if words.get("model.lora_rank") else {}
        return fits(words | base | {"model.batch_size": 4}, 1)

    while True:
        kind = draw.choice([*available("data"), *OFTEN])
        options: Words = {"data": kind, "model.n_layer": draw.choice([2, 2, 3, 4])}
        task = options_of("data", kind, {}).task
        options["model"] = draw.choice(
            [name for name in available("model") if parts("model")[name].options.task == task]
        )
        for part in ("tokenizer", "optimizer", "schedule"):
            options[part] = draw.choice(available(part))
        for several in ("hooks", "metrics"):
            options |= {several: [draw.choice(available(several))]} if draw.random() < 0.2 else {}
        options |= draw.choice(INPUTS.get(kind, [{}]))
        options["train.global_batch_size"] = draw.choice([4, 8, 12])
        options["optimizer.learning_rate"] = draw.choice([0.03, 0.2] if options["optimizer"] == "sgd" else [1e-3, 3e-3])
        options = drawn(draw, options, [kind for kind in DRAWN if kind != "backend"], works)
        options = {key: value for key, value in options.items() if not FREE.fullmatch(key)}
        if options.get("model.lora_rank"):
            options["train.init_from"] = "base/checkpoints/step-00000001"
        ranks = draw.choice([1, 2, 2, 2, 3, 4, 4, 4])
        if not works(options) or (how := draw_layout(draw, options, ranks, more=True)) is None:
            continue
        same = "model.norm" in options  # its statistics depend on the micro-batches, which another layout divides
        probe = draw.choice(["", "quiet", "export", "quiet" if same else "resume"])
        case = Case(options, how, ranks, probe, draw.randrange(1, STEPS))
        if case.probe != "resume":
            return case
        then_ranks = draw.choice([1, 2, 2, 4])
        if (then := draw_layout(draw, options, then_ranks, more=False)) is not None:
            return replace(case, then=then, then_ranks=then_ranks)


def examined(case: Case, folder: Path, limit: float = 240) -> list[str]:
    """Return what is wrong with ``case``: a line for each difference, which begins with its kind.

    Raises:
        RejectedError: ranks reject it; the text is the reason. "alone": one process does, too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in folder.parent.glob("[!c]*"):
        (folder / path.name).symlink_to(path)
    saving = {"train.checkpoint_interval": case.step} if case.probe in ("resume", "export") else {}
    alone, ours = case.alone | saving, case.options | case.how | saving
    try:
        if "train.init_from" in alone:
            base = {k: v for k, v in alone.items() if not k.startswith(("model.lora", "train.init_from"))}
            base |= {"train.max_iters": 1, "train.checkpoint_interval": 1}
            run_on(1, [Job("base", config(base, "base"))], folder, limit)
        one = run_on(1, [Job("one", config(alone, "one"), plain=True)], folder, limit)["one"]
    except RejectedError as error:
        raise RejectedError(f"alone: {error}") from None
    except RunError as error:
        if " is NaN" in str(error) or "non-finite gradients" in str(error):
            raise RejectedError("alone: the loss diverges to NaN, or its gradients do") from None
        return [f"one process: {error}"]
    losses = [line["loss"] for line in one["lines"] if "loss" in line]
    if max(losses) > 1.5 * losses[0]:
        raise RejectedError("alone: the loss diverges, so that rounding decides its course")
    exports = case.probe == "export" and "model.lora_rank" not in ours  # whose adapters are merged
    jobs = [Job("many", config(ours, "many"), exports=exports)]
    if case.probe == "quiet":
        jobs.append(Job("quiet", config(ours | {"train.eval_interval": 0}, "quiet")))
    try:
        found = run_on(case.ranks, jobs, folder, limit)
        if case.probe == "resume":
            then = case.options | case.then | {"train.resume": f"many/checkpoints/step-{case.step:08d}"}
            found |= run_on(case.then_ranks, [Job("again", config(then, "again"))], folder, limit)
    except RunError as error:
        return [str(error)]
    many, cfg = found["many"], config(ours)
    kinds = {"sgd": cfg.optimizer.name == "sgd", "bf16": cfg.train.dtype == "bf16"}
    distances = fuzz_runs.compared(one, many, **kinds)
    if "again" in found:
        rest = {"start": {}, "gradients": {}, "plain": {}}
        pair = [
            run | rest | {"lines": [x for x in run["lines"] if x["step"] > case.step]} for run in (one, found["again"])
        ]
        distances |= {f"again: {what}": distance for what, distance in fuzz_runs.compared(*pair, **kinds).items()}
    wrong = {what for what, distance in distances.items() if not distance <= 1}
    for seed in (1, 2) if wrong else ():
        noisy = run_on(1, [Job(f"noisy{seed}", config(alone, f"noisy{seed}"), noise=seed)], folder, limit)
        rounding = fuzz_runs.compared(one, noisy[f"noisy{seed}"], **kinds)
        wrong = {w for w in wrong if not distances[w] <= max(1, 10 * rounding.get(w.removeprefix("again: "), 0))}
    said = [f"{what}: {distances[what]:.3g} times the tolerance" for what in distances if what in wrong]
    said += [*fuzz_runs.counted(one, many), *fuzz_runs.planned(cfg, case.ranks, many)]
    if "quiet" in found:
        said += fuzz_runs.changed(found["quiet"], many)
    if saving and cfg.backend.keeps_parameters:
        sizes = [fuzz_runs.stored_bytes(folder / run / "checkpoints" / f"step-{STEPS:08d}") for run in ("many", "one")]
        if sizes[0] > sizes[1] + fuzz_runs.RANDOM_STATES * case.ranks:
            said.append(f"bytes: the checkpoint has {sizes[0]} bytes of tensors, and that of one process {sizes[1]}")
    return said


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one choice less."""
    yield replace(case, probe="", then={}, then_ranks=1)
    for kind in (*SIMPLEST, "hooks", "metrics"):
        if case.options.get(kind) not in (None, SIMPLEST.get(kind)):
            kept = {key: value for key, value in case.options.items() if key.partition(".")[0] != kind}
            added = {kind: SIMPLEST[kind]} if kind in SIMPLEST else {}
            yield replace(case, options=kept | added | (INPUTS["file"][0] if kind == "data" else {}))
    for section in ("options", "how"):
        words = getattr(case, section)
        for key in words:
            if "." in key and key not in ("train.global_batch_size", "data.path", "train.backend", "model.batch_size"):
                yield replace(case, **{section: {k: v for k, v in words.items() if k != key}})


def shrunken(case: Case, folder: Path, kind: str, tries: int = 60) -> Case:
    """Return the smallest case that was found to fail with a message of this kind."""
    pending = simpler(case)
    while tries > 0 and (smaller := next(pending, None)):
        if smaller == case or not fits(smaller.options | smaller.how, smaller.ranks):
            continue
        tries -= 1
        try:
            fails = any(each.startswith(kind) for each in examined(smaller, folder))
        except RejectedError:
            continue
        if fails:
            case, pending = smaller, simpler(smaller)
    return case


_composing = threading.Lock()  # Hydra has one state for all threads


def command(ranks: int, words: Words) -> str:
    """Return the command for a person; it also names options of which presets have other values than their classes."""
    groups = {**SIMPLEST, "tracker": "jsonl"} | {key: value for key, value in words.items() if "." not in key}
    groups["data"] = "text" if groups["data"] == "file" else groups["data"]
    ours = {
        f"{prefix}.{f.name}": getattr(o, f.name) for prefix, o in sections(config(words)).items() for f in fields(o)
    }
    said = groups | {key: value for key, value in {**BASE, **words}.items() if key in ours}
    with _composing:
        composed = sections(compose([f"{key}={_text(value)}" for key, value in said.items()], checked=False))
    theirs = {f"{prefix}.{f.name}": getattr(o, f.name) for prefix, o in composed.items() for f in fields(o)}
    said |= {key: value for key, value in ours.items() if theirs[key] != value and not key.endswith(".name")}
    return f"launch -n {ranks} python -m wordrun {shlex.join(f'{key}={_text(value)}' for key, value in said.items())}"


def _text(value: Any) -> str:
    if isinstance(value, str) and "{" in value:
        return json.dumps(value)
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {_text(each)}' for key, each in value.items())}}}"
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list) else value_text(value)


def write_inputs(folder: Path) -> None:
    """Write the texts, pairs and images on which cases train, unless they are there."""
    import numpy as np
    from PIL import Image

    from wordrun.data.options import TextConfig
    from wordrun.data.prepare import run
    from wordrun.data.prepare.sources import locate
    from wordrun.data.tokenizers.options import ByteTokenizerConfig
    from wordrun.dist import World

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "images").exists():
        return
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz,", k=draw.randrange(1, 8))) for _ in range(60)]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count)) + ".\n"

    (folder / "text.txt").write_text("".join(text(12) for _ in range(90)))
    (folder / "short.txt").write_text("".join(text(9) for _ in range(40)))  # a few steps are more than an epoch
    documents = [{"text": text(draw.choice([1, 2, 5, 20]))} for _ in range(150)]
    pairs = [{"prompt": text(1 + n % 2), "answer": text(draw.choice([1, 1, 2, 9]))} for n in range(150)]
    for name, rows in (("documents", documents), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = TextConfig("shards", path=str(folder / "text.txt"), prepared=str(folder / "shards"))
    run.execute(run.begin(locate(prepared), ByteTokenizerConfig(), folder / "shards"), World())
    pixels = np.random.default_rng(0).integers(0, 256, (40, 9, 11, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        kind = folder / "images" / f"class{number % 3}"
        kind.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(kind / f"{number}.png")


def fuzz(seed: int, numbers: Sequence[int], home: Path, jobs: int = 2, *, shrinks: bool = True) -> list[str]:
    """Examine the cases of these numbers, print what is wrong, and return the text about each that failed."""
    write_inputs(home)
    failed, rejected, done, begun = list[str](), collections.Counter[str](), 0, time.monotonic()

    def examine(number: int) -> None:
        nonlocal done
        case, folder = draw_case(seed, number), home / f"case-{number}"
        try:
            wrong = examined(case, folder)
        except RejectedError as error:
            reason = str(error).removeprefix("alone: ").strip()
            wrong = [] if reason and "Traceback" not in reason else [f"rejected: without a reason: {reason}"]
            rejected[re.sub(r"\d+", "N", " ".join(str(error).split("\n")[:2]))] += 1
        done += 1
        if not wrong:
            shutil.rmtree(folder)
            return
        first = wrong[0].strip().partition("\n")[0]
        kind = first if first.startswith(("crash", "one process", "rejected")) else re.split(r"[ :]", first)[0]
        small = shrunken(case, folder, kind) if shrinks else case
        said = [f"FAILED: case {number} of seed {seed} ({done} are done)", *(each[:3000] for each in wrong[:6])]
        said += [f"in {home}:", command(1, small.alone), command(small.ranks, small.options | small.how)]
        said += [command(small.then_ranks, small.options | small.then)] if small.then else []
        failed.append("\n  ".join([*said, f"python tests/fuzz.py --case {shlex.quote(json.dumps(asdict(small)))}"]))
        print(failed[-1], flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(examine, numbers):
            pass
    print(f"{done} cases of seed {seed} in {time.monotonic() - begun:.0f} s: {len(failed)} failed")
    for reason, count in rejected.most_common():
        print(f"  rejected {count} times: {reason}")
    return failed


def main() -> int:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at the same time")
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--folder", type=Path, help="where to train; failed cases stay there")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    home = (args.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))).absolute()
    forked.preload("sklearn.datasets", "torch._inductor.compile_fx", "deepspeed", "PIL.Image")
    if args.case:
        write_inputs(home)
        wrong = examined(Case(**json.loads(args.case)), home / "case")
        print("\n".join(wrong) or "nothing is wrong")
        return bool(wrong)
    numbers = range(args.first, args.first + args.cases)
    return bool(fuzz(args.seed, numbers, home, args.jobs, shrinks=not args.no_shrink))


if __name__ == "__main__":
    sys.exit(main())
