"""Fine-tuning on prompts and answers, fully and with LoRA: every layout gives the losses of one process."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from wordrun.checkpoint import index
from wordrun.checkpoint.load import find
from wordrun.common.errors import UserError

pytestmark = pytest.mark.timeout(300)
BASE = transformers.Qwen3Config(
    vocab_size=257,
    max_position_embeddings=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    rope_theta=1e4,
    tie_word_embeddings=True,
)
MODEL = shlex.split("""
    model=qwen3_0_6b model.n_layer=2 model.n_head=2 model.n_kv_head=2 model.head_size=8
    model.n_embd=32 model.n_hidden=40 model.block_size=32 model.vocab_size=null model.rope_theta=1e4
""")
SMALL = [
    *MODEL,
    *shlex.split("""
    data=pairs data.path=pairs.jsonl tokenizer=byte train.init_from=hf:base tracker=jsonl
    train.dtype=fp32 train.device=cpu train.global_batch_size=8 train.max_iters=4 train.log_interval=1
    train.eval_interval=2 train.eval_iters=2 train.sample_tokens=0 train.save_best=false
    optimizer.warmup_iters=2 optimizer.learning_rate=1e-2 optimizer.decay_lr=false
"""),
]
LORA = ["model.lora_rank=4"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and pairs of several lengths."""
    folder = tmp_path_factory.mktemp("finetune")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(BASE).save_pretrained(folder / "base")
    draw = random.Random(1)
    pairs = [(f"{n}+{n}=" + "?" * draw.randrange(4), f"{2 * n}" * draw.randrange(1, 5)) for n in range(300)]
    lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs)
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder


def train(ranks: Any, n: int, run_dir: str, *words: str) -> list[tuple[str, float]]:
    """Train on ``n`` ranks and return every loss in its order, training and validation."""
    done = ranks(n, "-m", "wordrun", *SMALL, *words, f"hydra.run.dir={run_dir}", under="fork")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [(name, line[name]) for line in lines for name in ("loss", "val_loss") if name in line]


def same(a: list[tuple[str, float]], b: list[tuple[str, float]]) -> bool:
    return [name for name, _ in a] == [name for name, _ in b] and [x for _, x in a] == pytest.approx(
        [x for _, x in b], rel=1e-5
    )


def test_every_layout_goes_as_one_process(ranks: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    full = train(ranks, 1, "full", "model.batch_size=8")
    assert full[0][1] > full[-1][1] + 0.5
    for backend, size in (("DDP", 2), ("FSDP", 4), ("TP", 8), ("PP", 4)):
        words = [f"train.backend={backend}", f"model.batch_size={size}"]
        assert same(train(ranks, 2, f"full-{backend}", *words), full), backend


def test_lora(ranks: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    one = train(ranks, 1, "lora", *LORA, "model.batch_size=8")
    assert one[0][1] > one[-1][1] + 0.05  # the output layer is frozen and random
    for backend, size in (("DDP", 2), ("FSDP", 4)):
        words = [*LORA, f"train.backend={backend}", f"model.batch_size={size}"]
        assert same(train(ranks, 2, f"lora-{backend}", *words), one), backend
    # The checkpoint has the additions alone, and resumes bit for bit.
    stored = [name for name in index.load(find(Path("lora")).folder) if name.startswith("model.")]
    assert len(stored) == 2 * 2 * 7
    assert all(name.endswith(("lora_a", "lora_b")) for name in stored)
    half = train(ranks, 2, "half", *LORA, "train.backend=FSDP", "model.batch_size=4", "train.max_iters=2")
    words = [*LORA, "train.backend=FSDP", "model.batch_size=4", "train.resume=half"]
    whole = train(ranks, 2, "half", *words)
    assert whole[: len(half)] == half
    assert same(whole[-1:], one[-1:])
    ours, theirs = (find(Path(name)).stored() for name in ("half", "lora-FSDP"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    weights, base = find(Path("lora")).weights(), load_file("base/model.safetensors")
    assert not weights["blocks.0.mlp.up.weight"].equal(base["model.layers.0.mlp.up_proj.weight"])
    assert weights["tokens.weight"].equal(base["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.backend=TP"], "adapters are not split across tensor-parallel ranks or pipeline stages"),
        (["train.backend=PP"], "adapters are not split across tensor-parallel ranks or pipeline stages"),
        (["train.init_from=null"], "model.lora_rank=4 needs pretrained weights for its adapters: set train.init_from"),
        (["model.lora_targets=[attention.qkv]"], "has no attention.qkv; its layers are attention.q, attention.k"),
    ],
)
def test_what_lora_cannot_do_is_refused(
    words: list[str], says: str, ranks: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    done = ranks(2, "-m", "wordrun", *SMALL, *LORA, "model.batch_size=4", *words, "hydra.run.dir=no", under="fork")
    assert done.returncode == 2
    assert says in done.stderr + done.stdout


def test_another_base_is_noticed(ranks: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    train(ranks, 1, "short", *LORA, "model.batch_size=8", "train.max_iters=1")
    find(Path("short")).weights()
    path = Path("base/model.safetensors")
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match="put the original model back"):
        find(Path("short")).weights()
    path.write_bytes(content)
