"""Preparation by real ranks: the command, and a run that finds nothing prepared."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wordrun.commands.prepare import main
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.track.metrics_jsonl import read_lines as read

pytestmark = pytest.mark.forked_programs

Ranks = Callable[..., Any]


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_two_ranks_prepare_what_one_does(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        lines = (json.dumps({"text": text}) for text in sample_text()[number * 9000 :][:9000].split("\n\n") if text)
        (tmp_path / "in" / f"{number}.jsonl").write_text("\n".join(lines))
    words = ["data=text", f"data.path={tmp_path / 'in'}", "tokenizer.vocab_size=300", "data.workers=1"]
    done = ranks(2, "-m", "wordrun", "prepare", *words, f"data.prepared={tmp_path / '2'}")
    assert done.returncode == 0, done.stderr
    assert main([*words, f"data.prepared={tmp_path / '1'}"]) == 0
    assert len(content(tmp_path / "1")) == 2 + 4 * 5  # manifest, tokenizer, and of each file two shards with documents
    assert content(tmp_path / "2") == content(tmp_path / "1")
    assert done.stdout.count("prepared data=text") == 1


def test_ranks_train_on_data_that_one_of_them_has_prepared(ranks: Ranks, tmp_path: Path) -> None:
    """Byte pairs are learned once, and both ranks read the same shards: the losses are those of one process."""
    words = shlex.split("""
        model=nano
        data=text data.path=play.txt tokenizer.vocab_size=300 tracker=jsonl model.n_layer=1
        model.n_embd=16 model.n_head=2 model.block_size=16 train.global_batch_size=4 train.max_iters=4
        train.log_interval=1 train.eval_iters=2 train.sample_tokens=0 train.dtype=fp32
    """)
    Path("play.txt").write_text(sample_text()[:50_000])
    losses = []
    for size in (2, 1):
        out = tmp_path / f"run{size}"
        run = [*words, f"model.batch_size={4 // size}", f"hydra.run.dir={out}"]
        done = ranks(size, "-m", "wordrun", *run, under="fork")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("prepared data=text in") == (size == 2)  # the second run finds it
        losses.append([line["loss"] for line in read(out) if "loss" in line])
    assert len(losses[0]) == 4
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5
    (folder,) = (tmp_path / "data" / "prepared").iterdir()  # without a lock that was left
    assert folder.name.startswith("text-bpe-")
