"""DeepSpeed's engine beside one process: the same losses, weights, norms and evaluations, and what a rank holds."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

# Without importing it: each worker collects this file.
if not importlib.util.find_spec("deepspeed"):
    pytest.skip("needs DeepSpeed: pip install 'wordrun[deepspeed]'", allow_module_level=True)

if TYPE_CHECKING:
    from conftest import Command

TEXT = 100 * "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
SMALL = shlex.split("""
    model=nano
    data=text tokenizer=char data.path=text.txt train.sample_prompt=The tracker=jsonl train.dtype=fp32
    train.device=cpu train.global_batch_size=8 train.max_iters=8
    train.log_interval=1 train.eval_interval=4 train.eval_iters=3
    train.sample_interval=0 train.sample_tokens=4 train.save_best=false optimizer.warmup_iters=2
    optimizer.learning_rate=2e-3 optimizer.grad_clip=0.5
    model.n_layer=2 model.n_head=2 model.n_embd=32 model.block_size=32
""")
SCRIPT = """
import json, sys
import wordrun
from wordrun import dist

with dist.session() as world:
    for words in json.load(open(sys.argv[1])):
        cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
        with wordrun.Trainer(cfg, world) as trainer:
            text = trainer.train() and trainer.generate(length=4)
            model = trainer.backend.parts[0]
            parameters = list(model.parameters())
            storages = [getattr(p, "ds_tensor", p).untyped_storage() for p in parameters]
            held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            optimizer = trainer.backend.optimizer
            state = getattr(optimizer, "optimizer", optimizer).state
            kept = ("exp_avg", "momentum_buffer")
            means = sum(value.nbytes for values in state.values() for key, value in values.items() if key in kept)
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
                         "held": held, "means": means,
                         "bytes": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
                         "text": text}
                sys.stdout.write("found " + json.dumps(found) + "\\n")
"""


MODELS = {"gpt": ["model.bias=true"], "llama": ["model=llama_debug", "model.n_kv_head=1", "model.n_hidden=40"]}
# Half as far: enough where a setting changes how the same sums are made.
SHORT = ["train.max_iters=4", "train.eval_interval=2"]
SGD = ["optimizer=sgd", "optimizer.learning_rate=0.3", "optimizer.weight_decay=0.1"]
REFERENCES = {"gpt, long": MODELS["gpt"], **{name: [*words, *SHORT] for name, words in MODELS.items()}}
REFERENCES["gpt, sgd"] = [*REFERENCES["gpt"], *SGD]
DEEPSPEED = ["train.backend=deepspeed", "model.batch_size=4"]
STAGE_3 = [*DEEPSPEED, "backend.stage=3", "backend.keep_below=0"]
EVERY_STAGE = {
    f"stage {stage}, {gas} micro-steps": [
        *STAGE_3,
        f"backend.stage={stage}",
        f"model.batch_size={4 // gas}",
        f"optimizer.gas={gas}",
    ]
    for stage in (0, 1, 2, 3)
    for gas in (1, 2)
}
OTHERS = {
    "stage 2, optimizer offloaded": [*DEEPSPEED, "backend.stage=2", "backend.offload_optimizer=true"],
    "stage 3, all offloaded": [*STAGE_3, "backend.offload_optimizer=true", "backend.offload_params=true"],
    "stage 3, blocks computed again": [*STAGE_3, "train.activation_checkpointing=full"],
    "stage 3, a ds_config": [*STAGE_3, "backend.config=ds_config.json"],
}
DS_CONFIG = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": "auto"},
}


def train(ranks: Any, n: int, runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Train each of ``runs`` on ``n`` ranks, one after the other in the same processes; return what rank 0 found."""
    Path("script.py").write_text(SCRIPT)
    Path("text.txt").write_text(TEXT)
    Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
    words = [[*SMALL, *run, f"hydra.run.dir=run_{n}_{i}"] for i, run in enumerate(runs.values())]
    Path(f"runs_{n}.json").write_text(json.dumps(words))
    done = ranks(n, "script.py", f"runs_{n}.json", timeout=300, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "WARN" in line or "DeepSpeed" in line]
    assert (said, done.stderr) == ([], "")
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    return dict(zip(runs, found, strict=True))


def values(found: dict[str, Any], *names: str) -> list[float]:
    return [value for name, value in found["metrics"] if name in names]


@pytest.mark.timeout(400)
def test_the_engine_goes_as_one_process(ranks: Command) -> None:
    ones = train(ranks, 1, {model: ["model.batch_size=8", *words] for model, words in REFERENCES.items()})
    runs = {("gpt", name): words for name, words in (EVERY_STAGE | OTHERS).items()}
    runs |= {(model, "stage 3"): EVERY_STAGE["stage 3, 1 micro-steps"] for model in ("gpt, long", "llama")}
    runs |= {("gpt, sgd", f"stage {n}"): [*STAGE_3, f"backend.stage={n}"] for n in (0, 1, 3)}
    words = {f"{model}, {name}": [*words, *REFERENCES[model]] for (model, name), words in runs.items()}
    found = train(ranks, 2, words)
    for one in ones.values():
        losses = values(one, "loss")
        assert losses[0] > losses[-1] + len(losses) / 100, "the model should have learned something to compare"
        assert max(values(one, "grad_norm")) > 0.5, "something should be clipped"
    for (model, name), each in zip(runs, found.values(), strict=True):
        one, name = ones[model], f"{model}, {name}"
        for metric, near in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3)):
            assert values(each, metric) == pytest.approx(values(one, metric), rel=near), f"{name}: {metric}"
        for key, weights in one["weights"].items():
            error = (torch.tensor(each["weights"][key]) - torch.tensor(weights)).norm() / torch.tensor(weights).norm()
            assert error < 1e-4, f"{name}: {key}"
        assert each["text"] == one["text"], name
        stage = int(name.partition("stage ")[2][0])
        assert each["held"] / each["bytes"] == pytest.approx(0.5 if stage == 3 else 1, abs=0.02), name
        assert each["means"] / each["bytes"] == pytest.approx(0.5 if stage else 1, abs=0.02), name


def test_an_operation_that_cannot_be_compiled_is_named(ranks: Command) -> None:
    Path("text.txt").write_text(TEXT)
    Path("ds.json").write_text('{"zero_optimization": {"zero_quantized_weights": true}}')
    words = [*SMALL, *STAGE_3, "backend.config=ds.json", "hydra.run.dir=run"]
    done = ranks(1, "-m", "wordrun", *words, under="fork", CXX="/nonexistent", TORCH_EXTENSIONS_DIR="extensions")
    assert done.returncode == 1
    assert "DeepSpeed failed to JIT-compile an op" in done.stderr
    assert "backend.config=ds.json" in done.stderr
    assert "Traceback" not in done.stderr


HOSTILE = """
import json, sys
from pathlib import Path
from wordrun import dist

world = dist.identify()
import torch
import wordrun
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.load import find
from wordrun.common.errors import UserError


class Trap:
    def __reduce__(self):
        return open, ("ran", "w")


class Attribute:
    def __reduce__(self):
        return getattr, (fragment_address, "__new__")


def said(read):
    try:
        read()
    except UserError as error:
        return str(error)


with dist.guard(world):
    for words, trap, by_name in json.load(open(sys.argv[1])):
        if by_name:  # as Python 3.11.0 to 3.11.3
            ZeroStageEnum.__reduce_ex__ = lambda member, protocol: (getattr, (type(member), member.name))
        with wordrun.Trainer(wordrun.compose(words), world) as trainer:
            trainer.train()
            folder = folders.all_in(trainer.run.path)[-1].path
            manifest = json.loads((folder / "manifest.json").read_text())
            load = lambda: trainer.backend.load(folder, manifest["backend"], ["rng.0"])
            convert = lambda: find(folder).weights()
            load()
            for name, weight in convert().items():
                assert weight.shape == dict(trainer.task.meta_model.weights())[name].shape, name
            del manifest["crc32"]
            messages = {}
            for file in sorted((folder / "engine").glob("*.pt")):
                content = file.read_bytes()
                torch.save({"module": globals()[trap]()}, file)
                facts = manifest["files"] | folders.describe(folder, [f"engine/{file.name}"])
                folders.write_manifest(folder, manifest | {"files": facts})  # sizes and checksums are forged along
                messages[file.name] = [said(load), said(convert)]
                file.write_bytes(content)
        sys.stdout.write("found " + json.dumps(messages) + "\\n")
"""


def test_a_hostile_file_of_the_engine_runs_nothing(ranks: Command) -> None:
    Path("script.py").write_text(HOSTILE)
    Path("text.txt").write_text(TEXT)
    short = [*SMALL, *DEEPSPEED, "train.max_iters=1", "train.eval_interval=0", "train.global_batch_size=4"]
    runs = [
        ([*short, f"backend.stage={stage}", f"hydra.run.dir=run_{stage}"], trap, stage == 3)
        for stage, trap in ((0, "Trap"), (1, "Trap"), (3, "Attribute"))
    ]
    Path("runs.json").write_text(json.dumps(runs))
    done = ranks(1, "script.py", "runs.json", under="fork", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert [len(messages) for messages in found] == [2, 3, 3]  # at stage 0 the model, and what the rank saves
    for messages, code in zip(found, ("io.open", "io.open", "getattr"), strict=True):
        for name, said in messages.items():
            readers = said[:1] if name.startswith("rank-") else said  # its RNG states are not needed for the weights
            assert all(f"{name} cannot be read: it contains {code}, which is code" in each for each in readers), said
    assert not Path("ran").exists()
