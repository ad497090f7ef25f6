"""train.batch_ramp: the sizes of the steps, what they read, and what continues exactly."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun.common.errors import ConfigError
from wordrun.config.rules import check
from wordrun.data.loader import Loader
from wordrun.data.order import Sequences
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.train.options import accumulation

RAMP = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.device=cpu model.n_layer=1 model.n_head=2
    model.n_embd=16 model.block_size=8 train.max_iters=7 train.log_interval=1 train.eval_interval=0
    train.eval_iters=2 train.sample_tokens=0 train.save_best=false optimizer.warmup_iters=2
    train.checkpoint_interval=3 train.keep_checkpoints=9 train.global_batch_size=12
    train.batch_ramp=[2:4,5:8]
""")


def test_the_steps_have_the_sizes_of_the_ramp() -> None:
    cfg = wordrun.compose([*RAMP, "model.batch_size=2"])
    assert [accumulation(cfg, 2, step) for step in (0, 1, 2, 4, 5, 99)] == [1, 1, 2, 2, 3, 3]
    assert accumulation(cfg, 2) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_of_other_sizes_follow_without_a_gap(prefetch: int) -> None:
    order = Sequences(np.arange(5000), 7, seed=3)
    loaders = [Loader(order, 2, rank=rank, ranks=2, prefetch=prefetch) for rank in range(2)]
    first = 0
    for gas in (1, 1, 2, 2, 2, 3, 3, 1):
        expected = order.batch(first, 4 * gas).tokens
        found = [
            batch.tokens for micro in zip(*(each.take(first, gas) for each in loaders), strict=True) for batch in micro
        ]
        assert torch.equal(torch.cat(found), expected)
        first += 4 * gas
    for each in loaders:
        each.close()


def lines(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Train with the ramp into ``folder``; return the lines of metrics."""
    with wordrun.Trainer(wordrun.compose([*RAMP, *words, f"hydra.run.dir={folder}"])) as trainer:
        trainer.train()
    return [line for line in read(folder) if "loss" in line]


def test_a_run_with_a_ramp_counts_and_resumes_exactly(tmp_path: Path) -> None:
    whole = lines(tmp_path / "whole", "model.batch_size=4")
    assert [line["tokens"] // 8 for line in whole] == [4, 8, 16, 24, 32, 44, 56]
    assert [round(line["sps"] * line["dt"]) for line in whole] == [4, 4, 8, 8, 8, 12, 12]
    for step in (3, 6):
        found = lines(
            tmp_path / f"on-{step}", "model.batch_size=4", f"train.resume={tmp_path}/whole/checkpoints/step-{step:08d}"
        )
        assert [line["loss"] for line in found] == [line["loss"] for line in whole]
    divided = lines(tmp_path / "divided", "model.batch_size=2")
    assert [line["loss"] for line in divided] == pytest.approx([line["loss"] for line in whole], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["model.batch_size=3"],
            r"train\.batch_ramp=\[2:4,5:8\]: 4 sequences are not a multiple of .* = 3: use 3",
        ),
        (["train.batch_ramp=[16]"], r"train\.batch_ramp=\[16\] should be a list of STEP:SEQUENCES"),
        (["train.batch_ramp=[5:4,2:8]"], r"should have rising steps, from 1 up"),
        (["train.backend=PP", "model.batch_size=4"], r"train\.backend=PP builds a pipeline for one number"),
        (["backend.static_graph=true", "model.batch_size=4"], r"backend\.static_graph=true does not allow"),
    ],
)
def test_a_wrong_ramp_is_named(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(wordrun.compose([*RAMP, *words]), 1)
