"""float8 linear layers on ranks, with emulated products: DDP and FSDP agree, and come near bf16."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

SCRIPT = """
import json, sys
from dataclasses import replace
import torch
import wordrun
from wordrun import dist
from wordrun.backend import float8

exact = float8.settings
float8.settings = lambda recipe: replace(exact(recipe), emulate=True)
float8.require = lambda recipe, device: None

with dist.session() as world:
    torch.set_num_threads(1)
    for words in json.load(open(sys.argv[1])):
        cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
        with wordrun.Trainer(cfg, world) as trainer:
            trainer.train()
            kinds = [type(m).__name__ for m in trainer.backend.parts[0].modules() if isinstance(m, torch.nn.Linear)]
            assert kinds.count("Float8Linear") == 8 * (trainer.cfg.train.float8 != "none"), kinds
"""
SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.device=cpu train.dtype=bf16 train.max_iters=10
    train.log_interval=1 train.eval_interval=0 train.sample_tokens=0 train.checkpoint_interval=0
    model.n_layer=2 model.n_head=2 model.n_embd=32 model.block_size=16 model.batch_size=4
    optimizer.learning_rate=3e-3 optimizer.warmup_iters=0
""")


def test_ddp_and_fsdp_have_the_same_losses(ranks: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding in bf16: DDP casts fp32 weights to float8, and FSDP those that it has gathered in bf16."""
    pytest.importorskip("torchao.float8", exc_type=ImportError, reason="pip install 'wordrun[float8]'")
    monkeypatch.chdir(tmp_path)
    runs = [("DDP", "none"), ("DDP", "tensorwise"), ("FSDP", "tensorwise"), ("FSDP", "rowwise")]
    words = [
        [*SMALL, f"train.backend={backend}", f"train.float8={float8}", f"hydra.run.dir={backend}-{float8}"]
        for backend, float8 in runs
    ]
    (tmp_path / "runs.json").write_text(json.dumps(words))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", "runs.json", under="fork", timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = {}
    for run in runs:
        lines = (tmp_path / "-".join(run) / "metrics.jsonl").read_text().splitlines()
        found[run] = [json.loads(line)["loss"] for line in lines]
        assert len(found[run]) == 10
    usual = found["DDP", "none"]
    assert usual[-1] < usual[0] - 0.3, "the model should have learned something to compare"
    for run in runs[1:]:
        assert found[run] != usual
        assert found[run] == pytest.approx(usual, rel=0.02), run
    assert found["FSDP", "tensorwise"] == pytest.approx(found["DDP", "tensorwise"], rel=0.01)
