"""What the ranks of tests/fuzz.py do, and how their runs are compared with that of one process."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import forked
from wordrun.common.errors import UserError
from wordrun.config.schema import Config

# Relative tolerances of metrics; those of the last line are absolute.
TOLERANCES = {
    r"loss|(\w+_)?val_loss|grad_norm": 1e-5,
    r"lr|flops": 1e-9,
    r".*(accuracy|top\d|load).*": 0.05,
}
# Metrics of time and memory; coordinates, which are those of rank 0's first validation batch; the score of a spike, a
# ratio of small differences of losses; and the perplexity, an exponential of a loss that is compared.
NOT_COMPARED = re.compile(
    r"(dt|sps|tps|slowest|memory|time)(_.*)?|dt[fb]|spike.*|.*perplexity|(activation|change)/.*|step"
)
# One weight differs by this much of the gradient or the change of its tensor, or of all gradients.
OF_TENSOR, OF_ALL = 3e-5, 3e-6
RANDOM_STATES = 20_000
"""Bytes of the random states that each rank saves."""


@dataclass
class Job:
    """A run that ranks execute."""

    name: str
    cfg: Config
    noise: int = 0
    """Seed of relative changes of the initial weights, 3e-7 or with bf16 4e-3; 0: none."""
    exports: bool = False
    plain: bool = False
    """Whether to compute the gradients of the first step by a plain loop, too."""


class RunError(Exception):
    """A run on ranks did not end well; the text says how."""


class RejectedError(Exception):
    """A run was rejected; the text is the reason."""


def run_on(ranks: int, jobs: Sequence[Job], folder: Path, limit: float) -> dict[str, Any]:
    """Run ``jobs`` on ``ranks`` in ``folder``, and return what they found by name.

    Raises:
        RejectedError: one of them was rejected before its first step.
        RunError: they failed, or did not end within ``limit`` seconds.
    """
    import torch

    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    for file in folder.glob("rejected-*"):
        file.unlink()
    env = os.environ | {"WORDRUN_DATA_HOME": str(folder.parent / "data"), "WANDB_MODE": "disabled"}
    script = str(Path(__file__).absolute())
    try:
        done = forked.run(ranks, [script, "jobs"], env | {"OMP_NUM_THREADS": "1"}, limit, folder)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"hang: no end after {limit:.0f} s\n{str(error.stderr)[-2000:]}") from None
    for file in sorted(folder.glob("rejected-*")):
        raise RejectedError(file.read_text())
    if done.returncode:
        raised = [line for line in done.stderr.splitlines() if re.match(r"\S*(Error|Exception)\b", line)]
        raise RunError(f"crash: {(raised or [f'exit status {done.returncode}'])[-1]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = {}
    for job in jobs:
        found[job.name] = torch.load(folder / f"{job.name}.pt", weights_only=False)
        lines = (folder / job.name / "metrics.jsonl").read_text().splitlines()
        found[job.name]["lines"] = [json.loads(line) for line in lines]
    return found


def rank_program(file: str) -> None:
    """Train the jobs in ``file`` on this rank, and write what rank 0 gathers."""
    import torch

    from wordrun import dist

    compiled = torch.compile  # as far as the graph: g++ takes minutes
    torch.compile = lambda *call, **options: compiled(*call, **{**options, "backend": "eager", "mode": None})
    with dist.session(device="cpu", timeout_s=240, hang_s=0) as world:
        torch.set_num_threads(1)
        for job in pickle.loads(Path(file).read_bytes()):
            found = _gathered(_train(job, world), world)
            if world.rank == 0:
                found["exported"] = _exported(job.name) if job.exports else {}
                torch.save(found, f"{job.name}.pt")


def _train(job: Job, world: Any) -> dict[str, Any]:
    """Train, and return what this rank has seen."""
    import torch

    import wordrun
    from wordrun.backend.sharded_tensors import full, local
    from wordrun.train.hooks import Hook

    found: dict[str, Any] = {"gradients": {}, "plain": {}}
    visible = job.cfg.backend.keeps_parameters

    def parameters(trainer: Any) -> list[tuple[str, Any]]:
        return [each for part in trainer.backend.parts for each in part.named_parameters() if visible]

    class Watch(Hook):
        def at_start(self, trainer: Any) -> None:
            trainer.meter.peak = 1e12

        if visible:  # an engine does not show gradients

            def on_gradients(self, trainer: Any) -> None:
                if not found["gradients"]:
                    graded = [(name, p.grad) for name, p in parameters(trainer) if p.grad is not None]
                    found["gradients"] = {name: full(gradient).clone() for name, gradient in graded}

    try:
        trainer = wordrun.Trainer(job.cfg, world, hooks=[Watch()])
    except UserError as error:
        Path(f"rejected-{world.rank}").write_text(str(error))
        raise
    with trainer:
        named, backend = parameters(trainer), trainer.backend
        generator = torch.Generator().manual_seed(job.noise)
        relative = 3e-7 if backend.dtype == torch.float32 else 4e-3
        for _, p in named if job.noise else ():
            p.data.mul_(1 + relative * torch.randn(p.shape, generator=generator))
        found["start"] = {name: full(p.detach()).clone() for name, p in named}
        if job.plain and backend.dtype == torch.float32:
            found["plain"] = _plain_gradients(trainer)
        validation = trainer.evaluation.validation
        found["val_tokens"] = sum(float(validation[i][1].sum()) for i in range(len(validation)))
        trainer.train()
        if visible:
            backend.model_state()  # an evaluation may have left the weights gathered
        named = parameters(trainer)
        buffers = [each for part in backend.parts for each in part.named_buffers() if visible]
        kept = [(name, each) for name, each in buffers if name in backend.buffer_names]
        found["weights"] = {name: full(each.detach()).clone() for name, each in [*named, *kept]}
        if job.plain and backend.dtype == torch.float32:
            found["plain_val_loss"] = _plain_evaluation(trainer)
        states = backend.optimizer.state.values() if visible else ()
        tensors = [each for state in states for each in state.values() if torch.is_tensor(each)]
        found["sizes"] = {
            kind: sum(local(each).numel() * each.element_size() for each in some)
            for kind, some in (("parameters", [p for _, p in named]), ("optimizer", tensors))
        }
        found["dp"] = trainer.layout.dp_index(world.rank)
        found["vocab_size"] = getattr(trainer.task, "vocab_size", None)
    return found


def _gathered(found: dict[str, Any], world: Any) -> dict[str, Any]:
    """Return what all ranks have found together; every rank must call this."""
    import torch.distributed as dist

    ranks: list[Any] = [found]
    if world.size > 1:
        ranks = [None] * world.size
        dist.all_gather_object(ranks, found)
    kinds = ("gradients", "plain", "start", "weights")
    whole = {kind: {name: each for rank in ranks for name, each in rank[kind].items()} for kind in kinds}
    val_tokens = sum({rank["dp"]: rank["val_tokens"] for rank in ranks}.values())
    return {**found, **whole, "val_tokens": val_tokens, "sizes": [rank["sizes"] for rank in ranks]}


def _plain_gradients(trainer: Any) -> dict[str, Any]:
    """Return the gradients of the first step by a loop over examples in plain torch; none if they have another loss."""
    from torch.nn.functional import cross_entropy

    model, batches = copy.deepcopy(trainer.backend.parts[0]), trainer._micro_batches()
    mixes = any("BatchNorm" in type(module).__name__ for module in model.modules())
    if len(batches) > 1 or mixes or getattr(trainer.cfg.model, "balance_loss", 0):
        return {}
    (batch,) = batches
    if hasattr(batch, "tokens"):
        predicted = int((batch.targets != -100).sum())
        for i in range(len(batch)):
            documents = None if batch.documents is None else batch.documents[i : i + 1]
            logits = model(batch.tokens[i : i + 1], documents=documents)[0]
            (cross_entropy(logits.float(), batch.targets[i], reduction="sum") / predicted).backward()
    else:
        for inputs, target in zip(batch.inputs, batch.targets, strict=True):
            (cross_entropy(model(inputs[None]), target[None]) / len(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _plain_evaluation(trainer: Any) -> float:
    """Return the mean loss over the validation data, by their weights, in evaluation mode and one by one."""
    import torch

    model, losses, weights = copy.deepcopy(trainer.backend.parts[0]).eval(), 0.0, 0.0
    with torch.no_grad():
        for batch, counts in map(trainer.evaluation.validation.__getitem__, range(len(trainer.evaluation.validation))):
            for loss, count in zip(model.losses(batch).tolist(), counts.tolist(), strict=True):
                losses, weights = losses + loss * count, weights + count
    return losses / weights


def _exported(run: str) -> dict[str, Any]:
    """Return pairs of weights: those of the last checkpoint, and of an export that is read back, if there is one."""
    import wordrun
    from wordrun.commands.export import ExportConfig, export
    from wordrun.model import mup, pretrained

    model: Any = wordrun.load(run)
    found = {"checkpoint": model.state_dict()}
    out = Path(f"{run}-exported")
    try:
        export(ExportConfig(run=run, out=str(out)))
    except UserError:
        return found
    plain = replace(model.cfg, mup=False, mup_base_width=None, mup_base_head_size=None)  # an export has no other scale
    read = pretrained.open_weights(out, plain, model.vocab_size)
    return found | {"export": dict(read), "folded": dict(mup.folded(found["checkpoint"], model.cfg))}


def compared(one: Mapping[str, Any], many: Mapping[str, Any], *, sgd: bool, bf16: bool) -> dict[str, float]:
    """Return by how many tolerances each number of two runs differs; ``sgd``: also the weights at the end."""
    total = OF_ALL * sum(float(gradient.square().sum()) for gradient in one["gradients"].values()) ** 0.5
    distances = dict(_tensors("initial weight", one["start"], many["start"], 1e-6, 1e-9))
    distances |= _tensors("plain gradient", one["plain"], one["gradients"], OF_TENSOR, total)
    if not bf16:
        distances |= _tensors("gradient", one["gradients"], many["gradients"], OF_TENSOR, total)
    distances |= lines_compared(one["lines"], many["lines"], bf16=bf16)
    if sgd and not bf16:
        distances |= _tensors("weight", one["weights"], many["weights"], OF_TENSOR, 1e-7)
    return distances


def _tensors(kind: str, theirs: Any, ours: Any, relative: float, absolute: float) -> Iterator[tuple[str, float]]:
    """Yield by how many tolerances each of our tensors differs; none, if an engine does not show ours."""
    for name, value in theirs.items() if ours else ():
        if name not in ours:
            yield f"{kind} {name} (missing)", math.inf
            continue
        mine, padding = (ours[name][: len(value)], ours[name][len(value) :]) if value.dim() else (ours[name], None)
        error, norm = float((mine.double() - value.double()).norm()), float(value.double().norm())
        yield f"{kind} {name}", error / (relative * norm + absolute)
        if padding is not None and padding.any():
            yield f"{kind} {name} (its padding)", math.inf


def lines_compared(theirs: list[Any], ours: list[Any], *, bf16: bool) -> dict[str, float]:
    """Return by how many tolerances each metric of each step differs."""
    found: dict[str, float] = {}
    mine = {(line["step"], key): line for line in ours for key in line}
    for line in theirs:
        for key in (key for key in line if not NOT_COMPARED.fullmatch(key) and line[key] is not None):
            other = mine.get((line["step"], key))
            if other is None:
                found[f"{key} of step {line['step']} (missing)"] = math.inf
                continue
            a, b = line[key], other[key]
            if key == "mfu":  # times the time of a step and the ranks
                key, (a, b) = (
                    "flops",
                    (each["mfu"] * each["dt"] * each["sps"] / each["sps_per_gpu"] for each in (line, other)),
                )
            tolerance = next((value for pattern, value in TOLERANCES.items() if re.fullmatch(pattern, key)), 1e-3)
            if bf16:
                tolerance = max(tolerance, 0.2 if "norm" in key else 0.03)
            a, b = [*_numbers(a)], [*_numbers(b)]
            scale = 1.0 if tolerance == TOLERANCES[r".*(accuracy|top\d|load).*"] else max(1e-6, *map(abs, a), 0.0)
            apart = [abs(x - y) for x, y in zip(a, b, strict=False)]
            worst = max(apart, default=0.0) if len(a) == len(b) else math.inf
            found[f"{key} of step {line['step']}"] = worst / (tolerance * scale)
    return found


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


def counted(one: Mapping[str, Any], many: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with counts, and with weights that are read back."""
    if abs(one["val_tokens"] - many["val_tokens"]) > 1e-6 * one["val_tokens"]:
        yield f"val_tokens: {many['val_tokens']} instead of {one['val_tokens']}"
    evaluated = {line["step"]: line["val_loss"] for line in one["lines"] if "val_loss" in line}
    plain, last = one.get("plain_val_loss"), evaluated.get(one["lines"][-1]["step"])
    if plain and last and abs(last / plain - 1) > 1e-5:
        yield f"plain val_loss: {plain}, and the run says {last}"
    read = many["exported"]
    for kind, wanted in (("checkpoint", many["weights"]), ("export", read.get("folded", {}))):
        for name, value in read.get(kind, {}).items():
            rows = slice(len(value)) if value.dim() else ()
            if name in wanted and not wanted[name][rows].equal(value):
                yield f"{kind}: {name} is not that of the run"


def changed(quiet: Mapping[str, Any], many: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs, bitwise, in a run without evaluations."""
    for name, value in many["weights"].items():
        if not value.equal(quiet["weights"][name]):
            yield f"evaluation: it changes {name}"
    lines = {
        (line["step"], key): line[key] for line in many["lines"] for key in line if not NOT_COMPARED.fullmatch(key)
    }
    for line in quiet["lines"]:
        for key, value in line.items():
            if key != "mfu" and lines.get((line["step"], key), value) != value:
                yield f"evaluation: it changes {key} of step {line['step']}"


def stored_bytes(checkpoint: Path) -> int:
    """Return the bytes of the tensors in a checkpoint."""
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def planned(cfg: Config, ranks: int, many: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a rank has more weights or optimizer state than the plan says."""
    from wordrun.model.options import TransformerConfig
    from wordrun.plan.estimator import Estimator
    from wordrun.plan.memory import memory
    from wordrun.plan.options import PlanConfig, hardware
    from wordrun.plan.parameter_shapes import shapes_of

    if not isinstance(cfg.model, TransformerConfig) or not cfg.backend.keeps_parameters or cfg.lora_rank:
        return
    model = shapes_of(cfg.model, many["vocab_size"], split=not cfg.backend.replicated)
    estimator = Estimator(cfg, model, hardware(PlanConfig(ranks=ranks, per_node=ranks, device="cpu")))
    strategy = estimator.strategy("as asked", cfg.backend)
    need = partial(memory, model, strategy, "none")
    for rank, sizes in enumerate(many["sizes"]):
        plan = need(pp_rank=strategy.layout.index(rank, "pp"))
        for kind, size in sizes.items():
            if size > 1.001 * getattr(plan, kind) + 1000 * (kind == "optimizer"):
                yield f"plan: rank {rank} has {size} bytes of {kind}, and the plan says {getattr(plan, kind):.0f}"


if __name__ == "__main__":
    import sys

    rank_program(sys.argv[1])
