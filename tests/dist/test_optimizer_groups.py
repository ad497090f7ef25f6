"""What an optimizer changes in its parameter groups, and the dtype of its state, in every layout of ranks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)

SMALL = shlex.split("""
    model=nano
    data=sample tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=6
    train.log_interval=1 train.eval_interval=0 train.sample_tokens=0 train.checkpoint_interval=2
    train.keep_checkpoints=9 train.save_best=false train.global_batch_size=8 optimizer=estimating
    optimizer.warmup_iters=0 optimizer.learning_rate=0.3 schedule=constant model.n_layer=2 model.n_head=2
    model.n_embd=16 model.block_size=16 model.batch_size=4
""")
SCRIPT = """
import json, sys
from dataclasses import dataclass
import torch
import wordrun
from wordrun import dist
from wordrun.config import OptimizerConfig

@dataclass
class Estimating(OptimizerConfig):
    '''Has a group for each block, so that a pipeline's ranks have different groups, and values in the groups.'''

class Estimates(torch.optim.Optimizer):
    def __init__(self, cfg, parameters):
        names = dict.fromkeys(name.split(".")[1] if name[:6] == "blocks" else "rest" for name, _ in parameters)
        groups = [
            {"params": [p for name, p in parameters if (name.split(".")[1] if name[:6] == "blocks" else "rest") == key],
             "decay": {"0": 0.5, "1": 0.9, "rest": 0.7}[key]}
            for key in names
        ]
        super().__init__(groups, {"lr": cfg.learning_rate, "k": 0, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= group["decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                state["mean"].mul_(0.5).add_(p.grad)
                p.add_(state["mean"].to(p.dtype), alpha=-group["lr"] * group["d"])

wordrun.register("optimizer", "estimating", Estimating, Estimates)
with dist.session() as world:
    torch.set_num_threads(1)
    for words in json.load(open(sys.argv[1])):
        cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
        with wordrun.Trainer(cfg, world) as trainer:
            trainer.train()
            groups = trainer.backend.optimizer.param_groups
            assert {group["k"] for group in groups} == {trainer.step}
            assert all(s["mean"].dtype == torch.float64 for s in trainer.backend.optimizer.state.values())
"""


def resume(run: str, step: int) -> str:
    return f"train.resume={run}/checkpoints/step-{step:08d}"


def losses(run: str) -> list[float]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_changed_values_of_groups_and_the_dtype_of_states_resume_in_any_layout(ranks: Any, tmp_path: Path) -> None:
    pipeline = ["train.backend=PP", "model.batch_size=8"]
    islands = ["train.backend=diloco", "backend.sync_every=3"]
    runs = {
        "whole": [],
        "fsdp": ["train.backend=FSDP", resume("whole", 2)],
        "pp": [*pipeline, resume("whole", 2)],
        "back": [resume("pp", 4)],
        "tp": ["train.backend=TP", "model.batch_size=8", resume("pp", 4)],
        "islands": islands,
        "islands-on": [*islands, resume("islands", 4)],
    }
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [[*SMALL, f"hydra.run.dir={name}", *more] for name, more in runs.items()]
    (tmp_path / "runs.json").write_text(json.dumps(words))
    done = ranks(2, "script.py", "runs.json", under="fork", timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    whole = losses("whole")
    assert whole[-1] < whole[0] - 0.1, "the model should have learned something to compare"
    for name in ("fsdp", "pp", "back", "tp"):
        assert losses(name) == pytest.approx(whole, rel=1e-5), name
    assert losses("islands-on") == losses("islands")


ADAMW = """
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from wordrun import dist
from wordrun.train.optim.adamw import AdamW

with dist.session(device="cpu") as world:
    mesh, steps = init_device_mesh("cpu", (2,)), {}
    for kind in (AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        parameters = []
        for shape, placement, of_gradient in (
            ((5, 4), Shard(0), Shard(0)), ((4, 3), Shard(1), Replicate()),
            ((3,), Replicate(), Partial()), ((2,), None, None),
        ):
            whole, gradient = torch.randn(shape), torch.randn(shape)
            if placement is None:
                p = torch.nn.Parameter(whole)
                p.grad = gradient
            else:
                shard = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(mesh, [placement])
                p = torch.nn.Parameter(shard)
                p.grad = (
                    DTensor.from_local(gradient * (world.rank + 1), mesh, [Partial()])
                    if of_gradient == Partial()
                    else DTensor.from_local(gradient, mesh, [Replicate()]).redistribute(mesh, [of_gradient])
                )
            parameters.append(p)
        groups = [{"params": each, "weight_decay": 0.1} for each in (parameters[:3], parameters[3:])]  # not to be mixed
        optimizer = kind(groups, lr=0.1, betas=(0.9, 0.99), fused=FUSED)
        for _ in range(3):
            optimizer.step()
        states = [optimizer.state[p]["exp_avg_sq"] for p in parameters]
        assert [isinstance(state, DTensor) for state in states] == [True, True, True, False]
        steps[kind] = [t.to_local() if isinstance(t, DTensor) else t for t in (*parameters, *states)]
    for ours, theirs in zip(*steps.values(), strict=True):
        assert torch.equal(ours, theirs)
"""


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_steps_shards_as_torch_steps_sharded_tensors(fused: bool, ranks: Any, tmp_path: Path) -> None:
    """To the bit, also where a gradient is sharded otherwise than its parameter, or still to be summed."""
    (tmp_path / "script.py").write_text(ADAMW.replace("FUSED", str(fused)))
    done = ranks(2, "script.py", under="fork", timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
