"""DeepSpeed's engine beside one process: the same losses, weights, norms and evaluations, and what a rank holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'wordrun[deepspeed]'")

if TYPE_CHECKING:
    from conftest import Command

SMALL = [
    "data=sample", "tracker=jsonl", "train.dtype=fp32", "train.device=cpu", "train.global_batch_size=8",
    "train.max_iters=20", "train.log_interval=1", "train.eval_interval=10", "train.eval_iters=3",
    "train.sample_interval=0", "train.sample_tokens=4", "optimizer.warmup_iters=2", "optimizer.learning_rate=2e-3",
    "optimizer.grad_clip=0.5", "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32",
]  # fmt: skip
SCRIPT = """
import json, sys
import torch
import wordrun
from wordrun import dist

world = dist.identify()
with dist.guard(world):
    for words in json.load(open("runs.json")):
        cfg = wordrun.compose(words)
        with wordrun.Trainer(cfg, world) as trainer:
            text = trainer.train() and trainer.generate(length=4)
            model = trainer.backend.parts[0]
            parameters = list(model.parameters())
            held = sum(getattr(p, "ds_tensor", p).untyped_storage().nbytes() for p in parameters)
            shared = [p for p in parameters if hasattr(p, "ds_tensor")]
            if shared:
                import deepspeed
                with deepspeed.zero.GatheredParameters(shared):
                    weights = {name: p.detach().double().tolist() for name, p in model.named_parameters()}
            else:
                weights = {name: p.detach().double().tolist() for name, p in model.named_parameters()}
            lines = [json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]
            if world.rank == 0:
                keys = ("loss", "grad_norm", "val_loss")
                found = {"metrics": [(k, line[k]) for line in lines for k in keys if k in line], "weights": weights,
                         "held": held, "bytes": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
                         "text": text}
                sys.stdout.write("found " + json.dumps(found) + "\\n")
"""


def train(ranks: Any, n: int, tmp_path: Path, *runs: list[str]) -> list[dict[str, Any]]:
    """Train each of ``runs`` on ``n`` ranks, one after the other in the same processes; return what rank 0 found."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [[*SMALL, *run, f"hydra.run.dir=run_{n}_{i}"] for i, run in enumerate(runs)]
    (tmp_path / "runs.json").write_text(json.dumps(words))
    done = ranks(n, "script.py", timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    noise = [line for line in done.stderr.splitlines() if "deprecated" in line]
    assert noise == []
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]


def assert_equal(many: dict[str, Any], one: dict[str, Any]) -> None:
    assert [name for name, _ in many["metrics"]] == [name for name, _ in one["metrics"]]
    assert [value for _, value in many["metrics"]] == pytest.approx([value for _, value in one["metrics"]], rel=1e-5)
    for name, weights in one["weights"].items():
        assert flat(many["weights"][name]) == pytest.approx(flat(weights), rel=1e-5, abs=1e-6), name
    assert many["text"] == one["text"]


def flat(values: Any) -> list[float]:
    return [number for each in values for number in flat(each)] if isinstance(values, list) else [values]


DEEPSPEED = "train.backend=deepspeed"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one process finds with DDP."""
    folder = tmp_path_factory.mktemp("one")
    return {}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_weights_and_norms_are_those_of_one_process(ranks: Command, stage: int, tmp_path: Path) -> None:
    (one,) = train(ranks, 1, tmp_path, ["model.batch_size=8"])
    norms = [value for name, value in one["metrics"] if name == "grad_norm"]
    assert max(norms) > 0.5, "nothing would be clipped"
    found = train(ranks, 2, tmp_path, *[
        [DEEPSPEED, f"backend.stage={stage}", "backend.keep_below=0", f"model.batch_size={size}"] for size in (4, 2)
    ])  # fmt: skip
    for each in found:
        assert_equal(each, one)
    assert len(found) == 2
    share = found[0]["held"] / found[0]["bytes"]
    assert share == pytest.approx(0.5 if stage == 3 else 1.0, abs=0.01)
