"""DeepSpeed's engine beside one process: the same losses, weights, norms and evaluations, and what a rank holds."""

from __future__ import annotations

import json
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
            storages = [getattr(p, "ds_tensor", p).untyped_storage() for p in parameters]
            held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            optimizer = trainer.backend.optimizer
            state = getattr(optimizer, "optimizer", optimizer).state
            means = sum(values["exp_avg"].nbytes for values in state.values())
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
                         "held": held, "means": means, "bytes": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
                         "text": text}
                sys.stdout.write("found " + json.dumps(found) + "\\n")
"""


DEEPSPEED = ["train.backend=deepspeed", "model.batch_size=4"]
STAGE_3 = [*DEEPSPEED, "backend.stage=3", "backend.keep_below=0"]
RUNS = {
    **{
        f"stage {stage}, {gas} micro-steps": [
            *STAGE_3, f"backend.stage={stage}", f"model.batch_size={4 // gas}", f"optimizer.gas={gas}",
        ]
        for stage in (0, 1, 2, 3) for gas in (1, 2)
    },
    "stage 2, optimizer offloaded": [*DEEPSPEED, "backend.stage=2", "backend.offload_optimizer=true"],
    "stage 3, all offloaded": [*STAGE_3, "backend.offload_optimizer=true", "backend.offload_params=true"],
    "stage 3, blocks computed again": [*STAGE_3, "train.activation_checkpointing=full"],
    "stage 3, a ds_config": [*STAGE_3, "backend.config=ds_config.json"],
}  # fmt: skip
DS_CONFIG = {
    "train_batch_size": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": "auto"},
}  # fmt: skip


def train(ranks: Any, n: int, *runs: list[str]) -> list[dict[str, Any]]:
    """Train each of ``runs`` on ``n`` ranks, one after the other in the same processes; return what rank 0 found."""
    Path("script.py").write_text(SCRIPT)
    Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
    words = [[*SMALL, *run, f"hydra.run.dir=run_{n}_{i}"] for i, run in enumerate(runs)]
    Path("runs.json").write_text(json.dumps(words))
    done = ranks(n, "script.py", timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "WARN" in line or "DeepSpeed" in line]
    assert (said, done.stderr) == ([], "")
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]


def flat(values: Any) -> list[float]:
    return [number for each in values for number in flat(each)] if isinstance(values, list) else [values]


def values(found: dict[str, Any], *names: str) -> list[float]:
    return [value for name, value in found["metrics"] if name in names]


@pytest.mark.parametrize("stages", [(0, 1, 2), (3,)])
def test_every_stage_equals_one_process(stages: tuple[int, ...], ranks: Command) -> None:
    (one,) = train(ranks, 1, ["model.batch_size=8"])
    assert min(values(one, "loss")) < values(one, "loss")[0] - 0.3, "the model should have learned something to compare"
    assert min(values(one, "grad_norm")) > 0.5, "every step should be clipped"
    runs = {name: words for name, words in RUNS.items() if stage(name) in stages}
    for name, each in zip(runs, train(ranks, 2, *runs.values()), strict=True):
        for metric, near in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3)):
            assert values(each, metric) == pytest.approx(values(one, metric), rel=near), f"{name}: {metric}"
        for key, weights in one["weights"].items():
            assert flat(each["weights"][key]) == pytest.approx(flat(weights), rel=1e-5, abs=1e-5), f"{name}: {key}"
        assert each["text"] == one["text"], name
        assert each["held"] / each["bytes"] == pytest.approx(0.5 if stage(name) == 3 else 1, abs=0.01), name
        assert each["means"] / each["bytes"] == pytest.approx(0.5 if stage(name) else 1, abs=0.01), name


def stage(name: str) -> int:
    return int(name.removeprefix("stage ")[0])
