"""What users of other frameworks have reported as silently wrong numbers, replayed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fuzz
from fuzz_runs import Job, lines_compared, run_on

pytestmark = pytest.mark.timeout(300)
PAIRS: fuzz.Words = {"data": "pairs", "data.path": "pairs.jsonl", "model": "llama", "model.block_size": 48}
PAIRS |= {"optimizer": "sgd", "optimizer.learning_rate": 0.1, "train.global_batch_size": 8}
TEXT = PAIRS | {"data": "file", "data.path": "text.txt", "model": "gpt", "model.block_size": 16}
CHUNKS = TEXT | {
    "train.max_iters": 300,
    "train.eval_interval": 150,
    "model.n_layer": 1,
    "model.n_embd": 16,
    "optimizer.learning_rate": 0.01,
}
EXPERTS = TEXT | {"model": "moe", "model.balance_rate": 0.02, "model.router": "sigmoid", "optimizer": "adamw"}
RAMP = TEXT | {"optimizer.warmup_iters": 4, "train.batch_ramp": ["3:4"], "schedule": "cosine"}
PP: fuzz.Words = {"train.backend": "PP", "backend.pp": 2, "model.batch_size": 4}
FSDP: fuzz.Words = {"train.backend": "FSDP", "model.batch_size": 2}
TP: fuzz.Words = {"train.backend": "TP", "backend.tp": 2, "model.batch_size": 8, "train.chunked_loss": True}
DDP: fuzz.Words = {"train.backend": "DDP", "model.batch_size": 2}
CASES = {
    # Answers of 5 to 60 tokens: a mean over all predicted tokens of the step, and of all validation data at once.
    "uneven tokens, pipeline": fuzz.Case(PAIRS, PP, 2),
    "uneven tokens, accumulation": fuzz.Case(PAIRS, DDP | {"model.batch_size": 1}, 2),
    "uneven tokens, hybrid sharding": fuzz.Case(PAIRS, FSDP | {"backend.replicate": 2, "model.batch_size": 1}, 4),
    "uneven last batch of an evaluation": fuzz.Case(
        PAIRS | {"train.global_batch_size": 9}, FSDP | {"model.batch_size": 3}, 3
    ),
    "chunked loss, 300 steps": fuzz.Case(CHUNKS, TP, 2),
    "expert bias, pipeline": fuzz.Case(EXPERTS, PP | {"backend.shard": 2, "model.batch_size": 2}, 4),
    "rate after a kill within warm-up and ramp": fuzz.Case(RAMP, DDP, 2, "resume", 2, FSDP, 2),
    "shards with no rows": fuzz.Case(
        TEXT | {"model": "llama", "model.n_hidden": 3, "optimizer": "muon", "optimizer.learning_rate": 1e-3},
        *(FSDP, 4, "resume", 3, FSDP, 2),
    ),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    fuzz.write_inputs(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_learn_what_one_process_learns(name: str, home: Path) -> None:
    assert not fuzz.examined(CASES[name], home / "case")


def test_expert_bias_under_tensor_parallelism_is_rejected() -> None:
    with pytest.raises(fuzz.ConfigError, match=r"backend\.tp=2 .* does not declare how its matrices can be split"):
        fuzz.check(fuzz.config(EXPERTS | TP | {"train.chunked_loss": False}), 2)


ORDERS: dict[str, fuzz.Words] = {
    "mix": TEXT | {"data": "mix", "data.mix": {"sample": 1, "shards": 3}, "train.eval_iters": 1},
    "pairs": PAIRS | {"data.mask_documents": True},
    "images": PAIRS
    | {"data": "imagefolder", "data.path": "images", "data.size": 8, "data.augment": True, "model": "convnet"},
}


def test_the_order_of_data_outlives_three_resumes_across_an_epoch(home: Path) -> None:
    """On 2, 1 and 2 ranks again; every step has the loss of the run that never stopped."""
    folder = home / "orders"
    folder.mkdir()
    for path in home.glob("[!co]*"):
        (folder / path.name).symlink_to(path)
    steps = 2 * 36 // 8  # of 36 training images, and fewer sequences of pairs
    common = {"train.global_batch_size": 8, "train.max_iters": steps, "train.eval_interval": 0}
    jobs = {name: words | common for name, words in ORDERS.items()}
    whole = run_on(1, [Job(n, fuzz.config(w | {"model.batch_size": 8}, n)) for n, w in jobs.items()], folder, 200)
    before: str = ""
    seen: dict[str, list[Any]] = {name: [] for name in jobs}
    for ranks, stop in ((2, 2), (1, 4), (2, 6), (1, steps)):
        after = f"-{stop}"
        parts = []
        for name, words in jobs.items():
            more = {"train.max_iters": stop, "train.checkpoint_interval": stop, "model.batch_size": 4 // ranks}
            more |= {"optimizer.lr_decay_iters": steps}
            more |= {"train.resume": f"{name}{before}"} if before else {}
            parts.append(Job(f"{name}{after}", fuzz.config(words | more, f"{name}{after}")))
        found = run_on(ranks, parts, folder, 200)
        before = after
        for name in jobs:
            first = seen[name][-1]["step"] if seen[name] else 0
            seen[name] += [line for line in found[f"{name}{after}"]["lines"] if line["step"] > first]
    for name, lines in seen.items():
        assert [line["step"] for line in lines] == [*range(1, steps + 1)]
        apart = lines_compared(whole[name]["lines"], lines, bf16=False)
        assert max(apart.values()) < 10, (name, apart)


SCRIPT = """
import sys
from dataclasses import dataclass
import torch.nn.functional as F
from torch import nn
import wordrun
from wordrun import dist
from wordrun.config import ModelConfig

@dataclass
class NetConfig(ModelConfig):
    name: str = "net"

class Net(nn.Module):
    def __init__(self, cfg, shape, classes):
        super().__init__()
        names = {"near", "far"}  # whose order differs from process to process
        ordered = sorted(names, reverse=bool(world.rank))
        self.branches = nn.ModuleDict({name: nn.Linear(64, classes) for name in ordered})

    def forward(self, images):
        return sum(branch(images.flatten(1)) for branch in self.branches.values())

    def losses(self, batch):
        return F.cross_entropy(self(batch.inputs), batch.targets, reduction="none")

with dist.session() as world:
    wordrun.register("model", "net", NetConfig, Net)
    words = ["data=digits", "model=net", "tracker=jsonl", "train.device=cpu", f"train.backend={sys.argv[1]}"]
    wordrun.Trainer(wordrun.compose([*words, "hydra.run.dir=run"]), world)
"""


@pytest.mark.parametrize("backend", ["DDP", "FSDP"])
def test_modules_in_another_order_on_another_rank_are_refused_by_name(ranks: Any, tmp_path: Path, backend: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", backend, under="fork")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "number 1 is branches.far.weight on rank 0 and branches.near.weight on rank 1" in done.stderr
    assert "Traceback" not in done.stderr
