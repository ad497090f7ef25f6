"""Every backend gives the losses and the weights of one process, and keeps no more than its share."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import memory_peak
from wordrun.backend.options import INTERLEAVED
from wordrun.dist import torch_private

pytestmark = pytest.mark.timeout(420)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
# An odd number of characters, so that tensor parallelism pads the vocabulary.
assert len(set(TEXT)) == 31
# A gentle learning rate: where a step overshoots, rounding errors of 1e-7 grow to 1e-2.
SMALL = shlex.split("""
    model=nano
    data=text tokenizer=char data.path=text.txt tracker=jsonl train.dtype=fp32 train.device=cpu
    train.max_iters=8
    train.log_interval=1 train.eval_interval=4 train.eval_iters=2 train.sample_tokens=2
    train.sample_prompt=The train.global_batch_size=8 optimizer.warmup_iters=2 optimizer.learning_rate=2e-3
    optimizer.grad_clip=0.9 model.n_layer=2 model.n_head=2 model.n_embd=16 model.block_size=16
    model.batch_size=8 train.save_best=false
""")
MODELS = {
    "gpt": ["model.bias=true"],
    # With the norms and the head size of Qwen3.
    "llama": shlex.split("""
        model=llama_debug
        model.n_kv_head=2
        model.n_hidden=40
        model.qk_norm=true
        model.head_size=12
    """),
    "modern": [
        *shlex.split(
            "model=modern optimizer=adamw model.zero_init=true schedule=cosine model.mlp=relu2 model.norm_weights=false"
        ),
        *shlex.split("model.embed_norm=true model.softcap=15"),
        "model.n_hidden=40",
        "model.ngram_rows=[31,15]" if torch_private.tells_tables_apart() else "model.ngram_rows=[]",
        "model.value_layers=[1]",
        "optimizer.grad_clip=0.65",
        "optimizer.learning_rate=3e-3",
    ],
    # The default, with its optimizer.
    "parts": ["model=modern", "model.n_hidden=40", "model.tie=true", "optimizer.learning_rate=6e-3"],
}
SCRIPT = """
import json, sys
import torch
import torch.distributed as td
import wordrun
from wordrun import dist
from wordrun.config import rules
from wordrun.backend.sharded_tensors import full, local
from wordrun.train import language

with_all_logits = []

def vocab_multiple(cfg, tp, on_cpu):
    return rules.vocab_multiple(cfg, tp, on_cpu="aligned" not in cfg.run_dir)  # as on an accelerator

language.vocab_multiple = vocab_multiple

def nbytes(tensors):
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)

with dist.session() as world:
    torch.set_num_threads(1)
    for name, words in json.load(open(sys.argv[1])).items():
        cfg = wordrun.compose([*words, f"hydra.run.dir={name}"]) if world.rank == 0 else None
        with wordrun.Trainer(dist.broadcast(cfg, world), world) as trainer:
            with_all_logits.clear()
            heads = [part.head for part in trainer.backend.parts if hasattr(part, "head")]
            for head in heads:  # a chunked loss does not call it, unlike samples, which are no training
                head.register_forward_hook(lambda module, *_: with_all_logits.append(1) if module.training else None)
            before = trainer.evaluate()
            parameters = trainer.backend.parameters
            gradients = []
            trainer.backend.optimizer.register_step_pre_hook(
                lambda *_: gradients.append(nbytes(p.grad for p in parameters))
            )
            trainer.train()
            mine = {n: full(p.detach()) for part in trainer.backend.parts for n, p in part.named_parameters()}
            weights = [None] * world.size
            td.all_gather_object(weights, mine)
            states = [s for state in trainer.backend.optimizer.state.values() for s in state.values()]
            states = [s for s in states if torch.is_tensor(s) and s.dim()]
            found = [None] * world.size
            td.all_gather_object(found, {
                "parameters": nbytes(parameters), "gradients": max(gradients), "states": nbytes(states),
                "before": before, "chunked": bool(heads) and not with_all_logits,
                "tokens": [b.tokens.flatten().tolist() for b in trainer._micro_batches()], "coordinates":
                [trainer.layout.dp_index(world.rank), trainer.layout.index(world.rank, "pp")],
            })
            if world.rank == 0:
                merged = {n: w for each in weights for n, w in each.items()}
                copies = [each["head.weight"] for each in weights if "head.weight" in each]
                copies += [each["tokens.weight"] for each in weights if "tokens.weight" in each]
                tied = trainer.task.meta_model.tied and max(float((c - copies[0]).abs().max()) for c in copies) or 0.0
                torch.save({"weights": merged, "ranks": found, "tied": tied}, f"{name}/found.pt")
"""


def train(ranks: Any, n: int, runs: dict[str, list[str]], tmp_path: Path) -> None:
    """Train every one of ``runs`` on ``n`` ranks, one after the other in the same processes."""
    (tmp_path / "text.txt").write_text(TEXT * 60)
    documents = [json.dumps({"text": TEXT[n % 30 : n % 30 + 4 + n % 9]}) for n in range(400)]
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / f"runs{n}.json").write_text(json.dumps({name: [*SMALL, *words] for name, words in runs.items()}))
    done = ranks(n, "script.py", f"runs{n}.json", under="fork", timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def figures(run_dir: Path) -> dict[str, list[float]]:
    """Return losses, validation losses and gradient norms, each in its order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {key: [line[key] for line in lines if key in line] for key in ("loss", "val_loss", "grad_norm")}


def option(run_dir: Path, name: str) -> float:
    """Return a number of the run's config."""
    (value,) = re.findall(rf"^  {name}: (\S+)", (run_dir / "config.yaml").read_text(), re.MULTILINE)
    return float(value)


def compare(tmp_path: Path, name: str, reference: str) -> None:
    """Fail unless the run ``name`` went as ``reference`` did."""
    clip, steps = (option(tmp_path / reference, key) for key in ("grad_clip", "max_iters"))
    ours, theirs = figures(tmp_path / name), figures(tmp_path / reference)
    assert len(theirs["loss"]) == steps
    assert theirs["loss"][0] > theirs["loss"][-1] + steps / 100, "the model should have learned something to compare"
    assert max(theirs["grad_norm"]) > clip > min(theirs["grad_norm"]), "some steps should be clipped, and some not"
    assert (tmp_path / name / "samples.txt").read_text() == (tmp_path / reference / "samples.txt").read_text()
    for key, tolerance in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3)):
        assert ours[key] == pytest.approx(theirs[key], rel=tolerance), f"{name}: {key}"
    a = torch.load(tmp_path / name / "found.pt", weights_only=False)
    b = torch.load(tmp_path / reference / "found.pt", weights_only=False)
    assert a["tied"] == 0.0, f"{name}: the copies of the shared weight differ"
    if "chunked_loss: true" in (tmp_path / name / "config.yaml").read_text():
        assert any(each["chunked"] for each in a["ranks"]), f"{name}: no rank computed its loss by chunks"
    assert not any(each["chunked"] for each in b["ranks"]), f"{reference}: compare with the loss of all logits"
    for each in a["ranks"]:
        assert each["before"] == pytest.approx(b["ranks"][0]["before"], rel=1e-6)
    for parameter, value in b["weights"].items():
        mine, padding = a["weights"][parameter].split([len(value), len(a["weights"][parameter]) - len(value)])
        error = (mine - value).norm() / value.norm()
        assert error < 1e-4, f"{name}: {parameter} {error}"
        assert not padding.any(), f"{name}: {parameter}"
    records = [json.loads((tmp_path / run / "run.json").read_text()) for run in (name, reference)]
    assert records[0]["parameters"] == records[1]["parameters"]
    peers: dict[int, Any] = {}
    for each in a["ranks"]:
        assert peers.setdefault(each["coordinates"][0], each["tokens"]) == each["tokens"], "peers read the same data"
    streams = [json.dumps(tokens) for tokens in peers.values()]
    assert len(set(streams)) == len(streams), "data-parallel ranks share no batch"


def pipelines(*schedules: str) -> dict[str, list[str]]:
    """Return the words of a pipeline run for each schedule."""
    return {f"pp-{name}": ["train.backend=PP", f"backend.schedule={name}"] for name in schedules}


# wordrun refuses these with an older torch, as test_compat.py shows.
ZBV = "ZBVZeroBubble" if torch_private.zbv_runs_on_cpus() else "InterleavedZeroBubble"
TP = 2 if torch_private.pipeline_takes_tensor_parallel() else 1
# Interleaved stages need a block for each.
FOUR = "model.n_layer=4"
# Half as far: enough where a setting changes how the same sums are made. Evaluated before the first step, too.
SHORT = ["train.max_iters=4"]
# GPT with one micro-step the whole way; with two, which is for backends to handle, half as far.
BOTH = {
    "ddp": ["train.backend=DDP", "backend.bucket_cap_mb=1"],
    "fsdp": ["train.backend=FSDP"],
    "tp": ["train.backend=TP"],
    **pipelines("1F1B"),
}
# Two micro-steps, but for a static graph, and half as far.
VARIANTS = {
    "gpt": {
        "ddp-static": ["train.backend=DDP", "backend.static_graph=true"],
        "fsdp-zero2": ["train.backend=FSDP", "backend.reshard_after_forward=false", "backend.prefetch=0"],
        "tp-again": ["train.backend=TP", "train.activation_checkpointing=full"],
        "fsdp-aligned": ["train.backend=FSDP"],
        "fsdp-offload": ["train.backend=FSDP", "backend.cpu_offload=true", "train.activation_checkpointing=2"],
        **pipelines("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", ZBV),
    },
    # "masked-tp" has a vocabulary that is not padded to full rows.
    "llama": pipelines(ZBV) | {"tp-aligned": ["train.backend=TP"]},
    "parts": {},
    "modern": {
        **pipelines("InterleavedZeroBubble" if torch_private.zero_bubble_takes_functions() else "Interleaved1F1B"),
        "fsdp-again": ["train.backend=FSDP", "train.activation_checkpointing=full"],
    },
}
# Short documents, several in a sequence, to which attention is confined.
MASKED = [
    "data.path=documents.jsonl",
    "tokenizer=byte",
    "data.mask_documents=true",
    *MODELS["llama"],
    *SHORT,
    "optimizer.grad_clip=1.0",
    "optimizer.learning_rate=1e-2",
]
THREE_D = [
    "train.backend=3D",
    f"backend.tp={TP}",
    "backend.replicate=-1",
    "backend.shard=1",
    "train.activation_checkpointing=selective",
    *SHORT,
]
# Whole matrices by owner, also of matrices of which a rank has no rows (1 of 2 on 2 ranks).
MUON = shlex.split("""
    optimizer=muon optimizer.learning_rate=5e-3 optimizer.adamw_lr=2e-3 optimizer.momentum_warmup=5
    optimizer.grad_clip=0.72
""")
# At twice the base width, where logits, attention, initial values and learning rates are all scaled.
MUP = [
    "model.bias=true",
    "model.mup=true",
    "model.mup_base_width=8",
    "optimizer.grad_clip=0.5",
    "optimizer.learning_rate=8e-3",
]
MUON_3D = [
    "train.backend=3D",
    f"backend.tp={TP}",
    *MODELS["modern"],
    *MUON,
    "optimizer.split=heads",
    "optimizer.scale=spectral",
]
MUON_EMPTY = [
    "train.backend=TP",
    f"backend.tp={TP}",
    *MODELS["llama"],
    "model.n_hidden=2",
    *MUON,
    "optimizer.grad_clip=0.9",
    *SHORT,
]


def test_two_ranks_go_as_one(ranks: Any, tmp_path: Path) -> None:
    ones = {"gpt-one": MODELS["gpt"]}
    ones |= {f"{model}-one-short": [*words, *SHORT] for model, words in MODELS.items()}
    ones |= {f"{model}-four-short": [*MODELS[model], FOUR, *SHORT] for model in ("gpt", "llama", "modern")}
    ones |= {"muon-one": MUON, "mup-one-short": [*MUP, *SHORT]}
    ones |= {"masked-short": MASKED, "unmasked": [*MASKED, "data.mask_documents=false"]}
    train(ranks, 1, ones, tmp_path)
    runs, references = {}, {}
    for model, words in MODELS.items():
        for name, more in (BOTH | VARIANTS[model]).items():
            if (model, name) in (("llama", "tp"), ("llama", "ddp"), ("parts", "ddp")):  # as with the other models
                continue
            shares = 1 if name.startswith(("tp", "pp")) else 2
            gas = 1 if (name in BOTH and model == "gpt") or name == "ddp-static" else 2
            run = f"{model}-{name}-{gas}"
            runs[run] = [*more, *words, f"model.batch_size={8 // shares // gas}"]
            references[run] = f"{model}-one"
            if name.removeprefix("pp-") in INTERLEAVED:
                runs[run].append(FOUR)
                references[run] = f"{model}-four"
            if model == "modern" or name == "tp-aligned":
                runs[run].append("train.chunked_loss=true")
            if name not in BOTH or model != "gpt":
                runs[run] += SHORT
                references[run] += "-short"
    for name, more in BOTH.items():
        for one in ("muon-one", "mup-one-short"):
            run = f"{one.partition('-')[0]}-{name}-1"
            runs[run] = [*more, *ones[one], f"model.batch_size={8 if name.startswith(('tp', 'pp')) else 4}"]
            references[run] = one
    masked = {}
    for name in ("fsdp", "tp", "pp-1F1B"):
        run = f"masked-{name}"
        masked[run] = [*BOTH[name], *MASKED, f"model.batch_size={2 if name == 'fsdp' else 4}"]
        references[run] = "masked-short"
    dropout = [*BOTH["fsdp"], *MODELS["gpt"], *SHORT, "model.batch_size=4", "model.dropout=0.2"]
    others = {
        "dropout": dropout,
        "dropout-again": [*dropout, "train.activation_checkpointing=full"],
        "rounded": [*BOTH["ddp"], *MODELS["gpt"], *SHORT, "model.batch_size=4", "backend.compress=bf16"],
    }
    # Each vocabulary in processes of its own: DTensor would remember the size of the first up to torch 2.10.
    aligned = {name: runs.pop(name) for name in [*runs] if "aligned" in name}
    for some in (runs | others, masked, aligned):
        train(ranks, 2, some, tmp_path)
    for name, reference in references.items():
        compare(tmp_path, name, reference)
    assert figures(tmp_path / "masked-short")["val_loss"] != figures(tmp_path / "unmasked")["val_loss"]
    names = ("dropout", "dropout-again", "gpt-one-short", "rounded")
    first, again, exact, rounded = (figures(tmp_path / name) for name in names)
    assert again == first, "what is computed again drops the same elements"
    assert first["loss"] != exact["loss"]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=1e-3), "gradients sent in bf16"
    assert rounded["loss"] != exact["loss"]
    for model, one_rank, two_ranks in (
        ("gpt", "gpt-one", "gpt-fsdp-1"),
        ("llama", "llama-one-short", "llama-fsdp-2"),
        ("modern", "modern-one-short", "modern-fsdp-2"),
        ("muon", "muon-one", "muon-fsdp-1"),
    ):
        one = torch.load(tmp_path / one_rank / "found.pt", weights_only=False)["ranks"][0]
        for each in torch.load(tmp_path / two_ranks / "found.pt", weights_only=False)["ranks"]:
            for what in ("parameters", "gradients", "states"):
                assert each[what] == pytest.approx(one[what] / 2, rel=0.02), f"{model}: {what}"


def test_four_and_eight_ranks_go_as_one(ranks: Any, tmp_path: Path) -> None:
    four = {
        "muon-empty": [*MUON_EMPTY, f"model.batch_size={2 * TP}"],
        "muon-3d": [*MUON_3D, f"model.batch_size={2 * TP}"],
    }
    eight = {"modern-3d": [*MODELS["modern"], *THREE_D, f"model.batch_size={2 * TP}", "train.chunked_loss=true"]}
    alone = {
        "modern-alone-short": [*MODELS["modern"], *SHORT],
        "muon-alone": MUON_3D[2:],
        "muon-empty-alone-short": MUON_EMPTY[2:],
    }
    train(ranks, 1, alone, tmp_path)
    train(ranks, 4, four, tmp_path)
    train(ranks, 8, eight, tmp_path)
    for name, reference in zip(("modern-3d", "muon-3d", "muon-empty"), alone, strict=True):
        compare(tmp_path, name, reference)


BUILD = """
import json, sys
from functools import partial
import torch
import wordrun
from memory_peak import peak
from wordrun import backend, dist
from wordrun.config.rules import check
from wordrun.model import meta_model
from wordrun.train.optim.adamw import adamw

with dist.session(device="cpu") as world:
    cfg = wordrun.compose(sys.argv[1:])
    spec = backend.BackendSpec(
        cfg, world, check(cfg, world.size), partial(meta_model, cfg.model, 64), partial(adamw, cfg.optimizer)
    )
    made = []
    most = peak(lambda: made.append(backend.build(spec)))
    sys.stdout.write(json.dumps({"most": most}) + "\\n")
    torch.distributed.barrier()  # the other rank may not have connected yet
    made[0].close()
"""


def test_no_rank_ever_holds_the_whole_model(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    shutil.copy(memory_peak.__file__, tmp_path)
    n_layer, n_embd = 16, 64
    words = [
        "data=sample",
        f"model.n_layer={n_layer}",
        f"model.n_embd={n_embd}",
        "train.dtype=fp32",
        "train.backend=FSDP",
    ]
    done = ranks(2, "build.py", *words, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    most = [json.loads(line)["most"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(most) == 2
    whole = 4 * n_layer * 12 * n_embd**2  # bytes of the blocks' matrices
    # Its half, a block that is being cut, and torch's copies of that.
    assert max(most) < 0.5 * whole + 4 * whole / n_layer


DYING = """
import sys
from pathlib import Path
import wordrun
from wordrun import dist

with dist.session() as world:
    trainer = wordrun.Trainer(wordrun.compose(sys.argv[1:]), world)
    step = trainer.backend.train_step

    def dying_step(*args):
        if trainer.step == 2 and world.rank == 1:
            Path("died").touch()
            raise RuntimeError("a rank that dies")
        return step(*args)

    trainer.backend.train_step = dying_step
    trainer.train()
"""


@pytest.mark.parametrize(
    ("backend", "under"), [("FSDP", "fork"), ("TP", "fork"), ("PP", "fork"), ("deepspeed", "mpiexec")]
)
def test_a_rank_that_dies_ends_the_job(backend: str, under: str, ranks: Any, tmp_path: Path) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'wordrun[deepspeed]'")
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "dying.py").write_text(DYING)
    words = [*SMALL, *MODELS["gpt"], f"train.backend={backend}", "model.batch_size=4", "hydra.run.dir=run"]
    done = ranks(2, "dying.py", *words, under=under)
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: a rank that dies") == 1
    assert "[rank 1] failed on host" in done.stderr
    assert time.time() - (tmp_path / "died").stat().st_mtime < 60
