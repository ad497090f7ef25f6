"""Every family of models on every backend: the same losses as one process, and the table of docs/backends.md."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest

from wordrun.common.errors import ConfigError, UserError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.dist import torch_private

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.device=cpu train.global_batch_size=4
    optimizer.warmup_iters=1 optimizer.learning_rate=1e-2 model.n_layer=2 model.n_head=4 model.n_embd=32
    model.block_size=16
""")
LLAMA = ["model=llama_debug", "model.n_kv_head=2", "model.n_hidden=40"]
MIXTRAL = ["model=moe_debug", "model.n_kv_head=2", "model.n_hidden=24", "model.n_experts=4", "model.n_shared=0"]
FAMILIES = {
    "GPT-2": ["model.bias=true", "model.gelu=tanh"],
    "LLaMA": LLAMA,
    "Mistral": [*LLAMA, "model.window=5"],
    "Qwen2.5": [*LLAMA, "model.qkv_bias=true", "model.tie=true"],
    "Qwen3": [*LLAMA, "model.head_size=12", "model.qk_norm=true"],
    "Mixtral": MIXTRAL,
    "Qwen3-MoE": [*MIXTRAL, "model.head_size=12", "model.qk_norm=true"],
    "`modern`": shlex.split("""
        model=modern model.n_hidden=48 model.mlp=relu2 model.norm_weights=false model.embed_norm=true
        model.softcap=15 optimizer=adamw schedule=cosine model.ngram_rows=[31] model.value_layers=[1]
        model.zero_init=false
    """),
}
FSDP = ["train.backend=FSDP"]
LAYOUTS = {
    "DDP": ["train.backend=DDP"],
    "FSDP": FSDP,
    "TP": ["train.backend=TP", "backend.tp=2", "model.batch_size=4"],
    "PP": ["train.backend=PP", "backend.pp=2", "model.batch_size=4"],
    "3D": ["train.backend=3D", "backend.pp=2", "backend.tp=2", "model.batch_size=4"],
    "cp, heads": [*FSDP, "backend.cp=2", "backend.cp_attention=heads", "model.batch_size=4"],
    "cp, gather": [*FSDP, "backend.cp=4", "backend.cp_attention=gather", "model.batch_size=4"],
    "LoRA": [*FSDP, "model.lora_rank=2", "train.init_from=weights"],
    "DeepSpeed": ["train.backend=deepspeed", "backend.stage=2"],
}
ON_FOUR = ("3D", "cp, gather")
"""Layouts with two axes, or whose ranks do not all receive from each other; for the others two ranks are enough."""
SHARDED = {"Qwen3", "`modern`"}
"""The two families with most kinds of weights: under TP and PP, on four ranks, theirs are sharded as well."""
SCRIPT = """
import json, pickle, sys
from functools import partial
from pathlib import Path
import torch
from wordrun import backend, dist
from wordrun.backend.step_timer import StepTimer
from wordrun.config.rules import check
from wordrun.data.batch import Batch
from wordrun.dist.collectives import all_mean
from wordrun.model import meta_model
from wordrun.config.registry import part_of

torch.set_num_threads(1)
tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(0))
with dist.session(device="cpu") as world:
    for name, cfg in pickle.loads(Path(sys.argv[1]).read_bytes()).items():
        layout = check(cfg, world.size)
        optimizer = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
        model = partial(meta_model, cfg.model, 61, multiple=layout.tp)
        made = backend.build(backend.BackendSpec(cfg, world, layout, model, optimizer))
        mine = tokens.chunk(layout.dp)[layout.dp_index(world.rank)]
        batch = Batch(mine[:, :-1], mine[:, 1:])
        first = made.train_step([batch], 3e-2, StepTimer(made.device)).loss
        losses = all_mean(torch.stack([first, made.losses(batch).mean()])).tolist()
        made.close()
        if world.rank == 0:
            print(json.dumps({name: losses}), flush=True)
"""


def trained(ranks: Any, n: int, runs: dict[str, Config]) -> dict[str, list[float]]:
    """Return the losses of a step and of an evaluation after it for each of ``runs`` on ``n`` ranks."""
    Path("script.py").write_text(SCRIPT)
    Path(f"runs-{n}").write_bytes(pickle.dumps(runs))
    done = ranks(n, "script.py", f"runs-{n}", under="fork", timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def on_ranks(ranks: Any) -> dict[str, dict[str, bool]]:
    """Return which layouts each family has, after comparing those with one process."""
    runs: dict[int, dict[str, Config]] = {2: {}, 4: {}}
    for family, model in FAMILIES.items():
        for layout, words in LAYOUTS.items():
            shards = family in SHARDED and layout in ("TP", "PP")
            n = 4 if shards or layout in ON_FOUR else 2
            words = [*words, "model.batch_size=2"] if shards else words
            with contextlib.suppress(ConfigError):  # refused
                cfg = compose([*SMALL, *model, *batch(words, n)], ranks=n)
                check(cfg, n)
                runs[n][f"{family}: {layout}"] = cfg
    whole = ["train.backend=DDP", "model.batch_size=4"]
    one = {family: compose([*SMALL, *model, *whole]) for family, model in FAMILIES.items()}
    lora = {
        key: compose([*SMALL, *FAMILIES[key.partition(":")[0]], *whole, *LAYOUTS["LoRA"][1:]])
        for key in runs[2]
        if key.endswith("LoRA")
    }
    alone, found = trained(ranks, 1, one | lora), trained(ranks, 2, runs[2]) | trained(ranks, 4, runs[4])
    assert found.keys() == runs[2].keys() | runs[4].keys()
    for key, losses in found.items():
        reference = alone.get(key) or alone[key.partition(":")[0]]
        assert abs(reference[1] / reference[0] - 1) > 1e-4  # the step matters
        assert losses == pytest.approx(reference, rel=1e-5), key
    return {family: {layout: f"{family}: {layout}" in found for layout in LAYOUTS} for family in FAMILIES}


def batch(words: list[str], n: int) -> list[str]:
    """Return ``words`` with the four sequences of a step divided among ``n`` ranks, if they do not set that."""
    return (
        words if any(word.startswith("model.batch_size") for word in words) else [*words, f"model.batch_size={4 // n}"]
    )


def generates(model: list[str]) -> bool:
    """Return whether a model with a KV cache predicts what it does without."""
    import torch

    from wordrun import model as models
    from wordrun.model.kv_cache import KVCache

    cfg = compose([*SMALL, *model]).transformer
    built = models.build(cfg, 61).eval()
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        caches = [KVCache() for _ in range(cfg.n_layer)]
        parts = [built(tokens[:, a:b], caches=caches) for a, b in [(0, 7), *((n, n + 1) for n in range(7, 16))]]
        return bool(torch.cat(parts, dim=1).allclose(built(tokens), rtol=1e-4, atol=1e-5))


def exports(model: list[str]) -> bool:
    """Return whether the family has an architecture in transformers; ``test_hf_parity.py`` compares the logits."""
    from wordrun.model.huggingface import huggingface_config

    try:
        return bool(huggingface_config(compose([*SMALL, *model]).transformer, 61))
    except UserError:
        return False


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not torch_private.pipeline_takes_tensor_parallel(),
    reason="the table is of all backends: needs DeepSpeed, and torch 2.11 for tensor parallelism in a pipeline",
)
def test_the_table_of_families_says_what_works(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = on_ranks(ranks)
    for family, model in FAMILIES.items():
        found[family] |= {"generation": generates(model), "export, import": exports(model)}
    heads = [*next(iter(found.values()))]
    rows = [["family", *heads], ["---"] * (len(heads) + 1)]
    rows += [[family, *("yes" if works[head] else "no" for head in heads)] for family, works in found.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in (ROOT / "docs" / "backends.md").read_text(), f"put this table into docs/backends.md:\n{table}"
