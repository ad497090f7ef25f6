"""Any optimizer and any model: what they keep is saved and resumed exactly, and two ranks compute what one does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import forked

SCRIPT = """
import json, sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
import wordrun
from wordrun.config.registry import part_of
from wordrun import backend, dist
from wordrun.backend.sharded_tensors import full
from wordrun.backend.step_timer import StepTimer
from wordrun.config.rules import check
from wordrun.model import Model

WIDTH, OUT, ROWS = 6, 3, 8


@dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor

    def to(self, device):
        return Rows(self.x.to(device), self.y.to(device))


class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.empty(WIDTH))
        self.register_buffer("calls", torch.empty((), dtype=torch.long))
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)

    def reset_parameters(self):
        self.mean.zero_()
        self.calls.zero_()
        self.scale.copy_(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        y = (x - self.mean.clone()) * self.scale
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.calls += 1
        return y


class Block(nn.Module):
    def __init__(self, batch_norm):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else Center()

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Regression(Model):
    def __init__(self, batch_norm):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.blocks = nn.ModuleDict({str(i): Block(batch_norm) for i in range(2)})
        self.head = nn.Linear(WIDTH, OUT)

    def initial_std(self, name):
        return 0.5

    def forward(self, x):
        x = x * self.gain
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)

    def losses(self, batch, forward=None):
        return ((forward or self)(batch.x) - batch.y).square().mean(1)


def make_model(batch_norm):
    with torch.device("meta"):
        return Regression(batch_norm)


class Uneven(torch.optim.Optimizer):
    '''Vectors have no state; matrices take every second or third step, and count calls and steps.'''

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2:
                    p.sub_(p.grad, alpha=group["lr"])
                    continue
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["factor"] = 0.9 * state.get("factor", 1.0)
                if state["calls"] % (2 + p.shape[0] % 2):
                    continue
                if "step" not in state:
                    state["step"], state["sum"], state["unused"] = torch.zeros(()), torch.zeros_like(p), None
                state["step"] += 1
                state["sum"].add_(p.grad)
                p.sub_(state["sum"] / state["step"], alpha=group["lr"] * state["factor"])


def uneven(cfg, named):
    return Uneven([p for _, p in named], cfg.learning_rate)


def two_rates(cfg, named):
    named = list(named)
    head = [p for name, p in named if name.startswith("head.")]
    rest = [p for name, p in named if not name.startswith("head.")]
    return torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 3 * cfg.learning_rate}], lr=cfg.learning_rate)


OWN = {"uneven": uneven, "two rates": two_rates}
OPTIONS = {"plain": ["optimizer=sgd", "optimizer.momentum=0"], "momentum": ["optimizer=sgd", "optimizer.nesterov=true"],
           "lion": ["optimizer=lion"]}


def micro_batches(step, dp, size):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, OUT, generator=generator)
    x[:, 0] += 2
    # One process takes in one batch what two take in one each.
    return [Rows(x[dp::size], y[dp::size])]


def build(case, name, batch_norm, world):
    cfg = wordrun.compose(
        ["data=sample", "tracker=jsonl", f"train.backend={name}", "train.dtype=fp32", "optimizer.learning_rate=0.05",
         *OPTIONS.get(case, [])], ranks=world.size,
    )
    optimizer = partial(OWN.get(case) or part_of("optimizer", cfg.optimizer).load(), cfg.optimizer)
    spec = backend.BackendSpec(cfg, world, check(cfg, world.size), partial(make_model, batch_norm), optimizer)
    return backend.build(spec)


def train(made, first, steps, world):
    clock = StepTimer(made.device)
    clock.start()
    made.parts[0].train()
    losses = []
    for step in range(first, first + steps):
        result = made.train_step(micro_batches(step, world.rank, world.size), 0.05 / (step + 1), clock)
        loss = result.loss.clone()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / world.size)
    made.parts[0].eval()
    seen = made.losses(Rows(torch.ones(2, WIDTH), torch.zeros(2, OUT))).tolist()
    weights = {n: full(t.detach()).tolist() for n, t in made.parts[0].weights()}
    constants = [b.tolist() for n, b in made.parts[0].named_buffers() if n not in weights]
    return {"losses": losses, "seen": seen, "weights": weights, "constants": constants}


def saved(made, folder, world):
    if world.rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    save = made.begin_save({})
    save.write(folder)
    torch.distributed.barrier()
    if world.rank == 0:
        save.finish(folder)
    torch.distributed.barrier()
    return json.loads(json.dumps(save.facts))


with dist.session(device="cpu") as world:
    found = {}
    for case, batch_norm in json.loads(sys.argv[1]):
        names = ["DDP", "FSDP"] if world.size > 1 else ["DDP"]
        facts, folders = {}, {}
        for name in names:
            made = build(case, name, batch_norm, world)
            key = f"{case} {batch_norm} {name}"
            found[key] = {"start": train(made, 0, 0, world)}
            train(made, 0, 5, world)
            folders[name] = Path(f"{key}-{world.size}")
            facts[name] = saved(made, folders[name], world)
            found[key]["never stopped"] = train(made, 5, 4, world)
            # Back to the checkpoint, then in a new backend, and in the other one.
            made.load(folders[name], facts[name])
            found[key]["back"] = train(made, 5, 4, world)
            made.close()
            made = build(case, name, batch_norm, world)
            made.load(folders[name], facts[name])
            found[key]["resumed"] = train(made, 5, 4, world)
            ratios = [g["lr"] / made.optimizer.param_groups[0]["lr"] for g in made.optimizer.param_groups]
            found[key]["ratios"] = ratios
            made.close()
        if world.size > 1:
            made = build(case, "FSDP", batch_norm, world)
            made.load(folders["DDP"], facts["DDP"])
            found[f"{case} {batch_norm} DDP"]["as FSDP"] = train(made, 5, 4, world)
            made.close()
    made = build("plain", "DDP", False, world)
    part = made.parts[0]
    part.train()
    micro_steps = [micro_batches(step, world.rank, world.size)[0] for step in range(2)]
    expected = torch.zeros(WIDTH)
    with torch.no_grad():
        for batch in micro_steps:
            expected.lerp_(part.blocks["0"].linear(batch.x * part.gain).mean(0), 0.1)
    torch.distributed.all_reduce(expected)
    made.train_step(micro_steps, 0.05, StepTimer(made.device))
    found["accumulated"] = [part.blocks["0"].norm.mean.tolist(), (expected / world.size).tolist()]
    made.close()
    if world.rank == 0:
        Path(f"found-{world.size}.json").write_text(json.dumps(found))
"""
CASES = [(optimizer, False) for optimizer in ("plain", "momentum", "lion", "uneven", "two rates")] + [
    ("momentum", True)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one rank and two ranks computed, by case and backend."""
    home = tmp_path_factory.mktemp("state")
    (home / "script.py").write_text(SCRIPT)
    before = Path.cwd()
    os.chdir(home)
    try:
        for ranks in (1, 2):
            done = forked.run(ranks, ["script.py", json.dumps(CASES)], dict(os.environ), 200)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    finally:
        os.chdir(before)
    return {ranks: json.loads((home / f"found-{ranks}.json").read_text()) for ranks in (1, 2)}


def near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fail unless both computed the same, up to rounding."""
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["seen"] == pytest.approx(theirs["seen"], rel=1e-5)
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(torch.tensor(ours["weights"][name]), torch.tensor(value), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("case", "batch_norm"), CASES)
def test_a_resumed_run_equals_one_that_never_stopped(found: Any, case: str, batch_norm: bool) -> None:
    for ranks, name in ((1, "DDP"), (2, "DDP"), (2, "FSDP")):
        each = found[ranks][f"{case} {batch_norm} {name}"]
        assert each["resumed"] == each["never stopped"] == each["back"], (ranks, name)
        assert each["resumed"]["weights"] != each["start"]["weights"]
        assert each["ratios"] == pytest.approx([1, 3] if case == "two rates" else [1] * len(each["ratios"]))
    near(found[2][f"{case} {batch_norm} DDP"]["as FSDP"], found[2][f"{case} {batch_norm} DDP"]["never stopped"])


@pytest.mark.parametrize("case", [case for case, batch_norm in CASES if not batch_norm])
def test_two_ranks_compute_what_one_does(found: Any, case: str) -> None:
    """With buffers that each rank updates from its own share of the batch."""
    one = found[1][f"{case} False DDP"]
    for name in ("DDP", "FSDP"):
        each = found[2][f"{case} False {name}"]
        assert each["start"]["weights"] == one["start"]["weights"]
        near(each["never stopped"], one["never stopped"])


def test_buffers_begin_as_their_modules_say(found: Any) -> None:
    for ranks, name in ((1, "DDP"), (2, "DDP"), (2, "FSDP")):
        start, end = (found[ranks][f"plain False {name}"][at] for at in ("start", "never stopped"))
        assert start["weights"]["blocks.0.norm.mean"] == [0.0] * 6
        assert start["weights"]["gain"] == [1.0] * 6
        assert end["weights"]["blocks.0.norm.calls"] == 9
        assert end["weights"]["blocks.0.norm.mean"] != start["weights"]["blocks.0.norm.mean"]
        assert start["constants"] == end["constants"]
        torch.testing.assert_close(torch.tensor(start["constants"][0]), torch.linspace(0.5, 1.5, 6))
        norm = found[ranks][f"momentum True {name}"]["start"]["weights"]
        assert norm["blocks.1.norm.running_var"] == [1.0] * 6


def test_buffers_are_averaged_over_all_micro_steps_of_all_ranks(found: Any) -> None:
    for ranks in (1, 2):
        mean, expected = found[ranks]["accumulated"]
        assert mean == pytest.approx(expected, rel=1e-5)
