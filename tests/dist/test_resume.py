"""A run that stops and goes on equals one that never stopped: on the same ranks to the bit, on others to 1e-5."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import together
from wordrun.checkpoint.load import find
from wordrun.commands.export import ExportConfig, export
from wordrun.dist import torch_private

pytestmark = pytest.mark.timeout(300)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
STEPS = 12
SMALL = [
    *shlex.split("""
    data=text data.path=text.txt tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu
"""),
    f"train.max_iters={STEPS}",
    f"optimizer.lr_decay_iters={STEPS}",
    *shlex.split("""
    model=nano
    train.log_interval=1 train.eval_interval=4
    train.eval_iters=1 train.sample_tokens=0 train.global_batch_size=8 optimizer.warmup_iters=2
    optimizer.learning_rate=2e-3 train.checkpoint_interval=3 train.keep_checkpoints=9 train.save_best=false
    model.n_layer=2 model.n_head=2 model.n_embd=16 model.block_size=16
"""),
]
# wordrun refuses these with an older torch, as test_compat.py shows.
ZBV = "ZBVZeroBubble" if torch_private.zbv_runs_on_cpus() else "InterleavedZeroBubble"
TP = 2 if torch_private.pipeline_takes_tensor_parallel() else 1
GPT = ["model.bias=true"]
FOUR = "model.n_layer=4"  # a block for each of two ranks' stages
LLAMA = ["model=llama_debug", "model.n_kv_head=2", "model.n_hidden=40"]
MUP = ["model.mup=true", "model.mup_base_width=4"]


def train(ranks: Any, n: int, runs: dict[str, list[str]]) -> None:
    together.train(ranks, n, {name: [*SMALL, *words] for name, words in runs.items()}, together.ALIGNED)


KEYS = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens")


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return everything in metrics.jsonl that does not depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in KEYS) for line in lines]


def resume(run: str, step: int = 6) -> str:
    return f"train.resume={run}/checkpoints/step-{step:08d}"


SAME = {
    # Dropout, whose RNG states are resumed as well; an accumulation of two.
    "ddp": ["train.backend=DDP", "model.batch_size=2", "model.dropout=0.1"],
    "fsdp": ["train.backend=FSDP", "model.batch_size=4", "backend.reshard_after_forward=false"],
    "offload": ["train.backend=FSDP", "model.batch_size=4", "backend.cpu_offload=true", *LLAMA],
    # Of 128 rows, the second rank has padding only.
    "aligned": ["train.backend=FSDP", "model.batch_size=4", *LLAMA],
    "tp": ["train.backend=TP", "model.batch_size=8", *MUP],
    "muon": ["train.backend=FSDP", "model.batch_size=4", "optimizer=muon", "optimizer.momentum_warmup=9"],
    "pp": ["train.backend=PP", "model.batch_size=8"],
    "zero-bubble": ["train.backend=PP", "model.batch_size=8", f"backend.schedule={ZBV}", FOUR],
}
if importlib.util.find_spec("deepspeed"):
    SAME |= {
        f"deepspeed-{stage}": ["train.backend=deepspeed", "model.batch_size=4", f"backend.stage={stage}"]
        for stage in (1, 3)
    }


# Sums of more than two ranks' gradients, in several buckets; two copies of two shards; shards of shards that do not
# divide, and a rank without some of them.
SAME_ON_FOUR = {
    "sums": ["train.backend=DDP", "model.batch_size=2", "model.n_embd=256", "backend.bucket_cap_mb=1"],
    "copies": ["train.backend=FSDP", "model.batch_size=2", "backend.replicate=2"],
    "uneven": ["train.backend=FSDP", "model.batch_size=4", "backend.tp=2", "model.vocab_size=50"],
}
# The one checkpoint to go on from, and two steps and an evaluation after it.
ONCE = ["train.checkpoint_interval=2", "train.max_iters=4", "train.eval_interval=2"]
# Four ranks on two cores: a smaller model, and fewer steps.
SHORT = ["model.n_layer=1", "train.checkpoint_interval=2", "train.max_iters=4", "train.eval_interval=0"]


def test_the_same_ranks_go_on_to_the_bit(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for size, some in ((2, SAME), (4, SAME_ON_FOUR)):
        runs = {}
        for name, words in some.items():
            words = words if "model=llama_debug" in words else [*words, *GPT]
            words = [*words, *(SHORT if size == 4 else ONCE)]
            runs |= {name: words, f"{name}-on": [*words, resume(name, 2)]}
        train(ranks, size, runs)
    for name in SAME | SAME_ON_FOUR:
        assert figures(tmp_path / f"{name}-on") == figures(tmp_path / name), name
        record = json.loads((tmp_path / f"{name}-on" / "run.json").read_text())
        assert record["resumed_from"]["step"] == 2


FULL = """
import json, sys
import wordrun
from wordrun import dist
from wordrun.checkpoint import folder, shards
from wordrun.train.hooks import Hook

def fail(*args):
    raise OSError(28, "No space left on device")

words = json.load(open(sys.argv[1]))
with dist.session() as world:
    for name, module, function, rank in (("begin", folder.Draft, "begin", 0), ("write", shards, "save_file", 1)):
        real = getattr(module, function)

        class Fail(Hook):
            def after_step(self, trainer):  # the save after step 3 fails, and no other
                broken = trainer.step == 3 and world.rank == rank
                trainer.checkpoints.join(None)
                setattr(module, function, fail if broken else real)

        cfg = dist.broadcast(wordrun.compose([*words, f"hydra.run.dir={name}"]) if world.rank == 0 else None, world)
        with wordrun.Trainer(cfg, world, hooks=[Fail()]) as trainer:
            trainer.train()
"""


def test_a_full_disk_on_one_rank_is_known_to_all(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "script.py").write_text(FULL)
    (tmp_path / "words.json").write_text(json.dumps([*SMALL, *GPT, "model.batch_size=4", "train.timeout_s=20"]))
    done = ranks(2, "script.py", "words.json", under="fork", timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for name, rank in (("begin", 0), ("write", 1)):
        said = (tmp_path / name / "log.txt").read_text()
        assert f"the checkpoint of step 3 could not be written (rank {rank}: [Errno 28] No space" in said
        assert sorted(path.name for path in (tmp_path / name / "checkpoints").glob("step-*"))[0] == "step-00000006"


def test_weights_in_hugging_faces_form_begin_runs_of_any_layout(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads its share of them, and the runs go as the one that begins with the checkpoint itself."""
    monkeypatch.chdir(tmp_path)
    models = {"gpt": GPT, "llama": LLAMA}
    short = ["train.max_iters=3", "train.checkpoint_interval=0"]
    whole = {m: [*model, "model.batch_size=8"] for m, model in models.items()}
    begun = {f"{m}-begun": [*words, *short, f"train.init_from={m}"] for m, words in whole.items()}
    train(ranks, 1, whole | begun)
    for m in models:
        export(ExportConfig(run=m, out=f"{m}-hf"))
    two = {
        f"{m}-{backend}": [
            *model,
            *short,
            f"train.backend={backend}",
            f"model.batch_size={size}",
            f"train.init_from=hf:{m}-hf",
        ]
        for m, model in models.items()
        for backend, size in (("FSDP", 4), ("TP", 8), ("PP", 8))
    }
    train(ranks, 2, two)
    for name in two:
        m = name.partition("-")[0]
        ours, theirs, before = (
            [line[1] for line in figures(tmp_path / each) if line[1]] for each in (name, f"{m}-begun", m)
        )
        assert ours == pytest.approx(theirs, rel=1e-5), name
        assert len(theirs) == 3
        assert theirs[0] < before[0] - 0.1, "it begins where the training has ended"


def test_other_ranks_and_backends_go_on(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 -> 2 -> 4 -> 1 ranks: DDP, padded FSDP, 3D, DDP; and from 1 straight into every other backend."""
    monkeypatch.chdir(tmp_path)
    eight = shlex.split("""
        train.max_iters=8 optimizer.lr_decay_iters=8 optimizer.learning_rate=4e-3
        train.checkpoint_interval=2 train.eval_interval=2
    """)
    models = {"gpt": [*GPT, *eight], "llama": [*LLAMA, "model.mup=true", "model.mup_base_width=8", *eight]}
    muon = ["optimizer=muon", "optimizer.momentum_warmup=7", *eight]
    ramp = [*GPT, *eight, "train.batch_ramp=[3:4]"]

    def runs(name: str, source: str, step: int, backend: str, size: int, *more: str) -> dict[str, list[str]]:
        """Return a run of each model that goes on from the run ``source`` after ``step`` steps."""
        words = [f"train.backend={backend}", f"model.batch_size={size}", *more]
        return {f"{m}-{name}": [*model, *words, resume(f"{m}-{source}", step)] for m, model in models.items()}

    whole = {f"{m}-whole": [*model, "model.batch_size=8"] for m, model in models.items()}
    whole |= {f"{m}-deep": [*model, "model.batch_size=8", FOUR] for m, model in models.items()}
    whole |= {"muon-whole": ["model.batch_size=8", *muon], "ramp-whole": ["model.batch_size=4", *ramp]}
    train(ranks, 1, whole)
    # 31 characters, padded to 32 and 128 rows, of which a checkpoint has none.
    schedule = f"backend.schedule={ZBV}"
    two = runs("tp", "whole", 2, "TP", 8) | runs("aligned", "whole", 2, "FSDP", 4) | runs("pp", "whole", 2, "PP", 8)
    two |= runs("zero-bubble", "deep", 2, "PP", 8, schedule, FOUR)
    two["muon-tp"] = ["train.backend=TP", "model.batch_size=8", *muon, resume("muon-whole", 2)]
    two["ramp-fsdp"] = ["train.backend=FSDP", "model.batch_size=2", *ramp, resume("ramp-whole", 2)]
    train(ranks, 2, {name: [*words, "train.max_iters=4"] for name, words in two.items()})
    four = runs("3d", "aligned", 4, "3D", 4 * TP, f"backend.tp={TP}")
    words = ["train.backend=3D", f"backend.tp={TP}", f"model.batch_size={4 * TP}"]
    four["muon-3d"] = [*words, *muon, resume("muon-tp", 4)]
    train(ranks, 4, {name: [*words, "train.max_iters=6"] for name, words in four.items()})
    back = runs("3d-back", "3d", 6, "DDP", 8) | runs("zero-bubble-back", "zero-bubble", 4, "DDP", 8, FOUR)
    back["muon-back"] = ["model.batch_size=8", *muon, resume("muon-3d", 6)]
    back["ramp-back"] = ["model.batch_size=2", *ramp, resume("ramp-fsdp", 4)]
    for name in (*two, *four):
        (newest,) = find(tmp_path / name, check=False).weights()["tokens.weight"].shape[:1]
        assert newest == 31
    train(ranks, 1, back)
    for name, last in (dict.fromkeys(two, 4) | dict.fromkeys(four, 6) | dict.fromkeys(back, 8)).items():
        reference = f"{name.partition('-')[0]}-{'deep' if 'zero-bubble' in name else 'whole'}"
        whole, found = figures(tmp_path / reference), figures(tmp_path / name)
        assert whole[0][1] > whole[-2][1] + 0.1, "the model should have learned something to compare"
        whole = [line for line in whole if line[0] <= last]
        assert [line[0] for line in found] == [line[0] for line in whole], f"{name}: one curve without gaps"
        for ours, theirs in zip(found, whole, strict=True):
            for key, a, b in zip(KEYS, ours, theirs, strict=True):
                tolerance = 1e-3 if key == "grad_norm" else 1e-5
                assert a == (b and pytest.approx(b, rel=tolerance)), f"{name}: {key} of step {theirs[0]}"
