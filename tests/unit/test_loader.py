"""The loader, mixes, alignment and staging: every sequence once, the same for any number of ranks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import wordrun
from wordrun.common.errors import ConfigError, UserError
from wordrun.data import manifest as manifests
from wordrun.data.batch import Batch
from wordrun.data.corpus import corpus_of_run
from wordrun.data.loader import Loader
from wordrun.data.options import MIX_PERIOD, TextConfig
from wordrun.data.order import Mix, Permutation, Sequences, order_of_run
from wordrun.data.prepare import node_copy, run, writer
from wordrun.data.prepare.sources import locate
from wordrun.data.shards import Tokens, examine
from wordrun.data.tokenizers.options import ByteTokenizerConfig
from wordrun.dist import World


def firsts(batches: list[Batch]) -> list[int]:
    """Return the first token of each sequence, which tells which one it is where the tokens are 0, 1, 2, ..."""
    return [int(token) for batch in batches for token in batch.tokens[:, 0]]


# The thread


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_prefetched_batches_are_those_of_the_order(prefetch: int) -> None:
    order = Sequences(np.arange(5000), 7, seed=3)
    loader = Loader(order, batch_size=4, gas=2, rank=1, ranks=3, prefetch=prefetch)
    for step in [0, 1, 2, 3, 40, 41, 7, 8, 8, 0, 500]:  # jumps, back and forth, and the same again
        for micro, batch in enumerate(loader.step(step)):
            expected = order.batch(step * 24 + (micro * 3 + 1) * 4, 4)
            assert torch.equal(batch.tokens, expected.tokens)
            assert torch.equal(batch.targets, expected.targets)
    loader.close()
    assert firsts(loader.step(3)) == firsts(Loader(order, 4, 2, 1, 3, prefetch=0).step(3))  # closed, it still answers


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(30, 200),
    block=st.integers(1, 6),
    size=st.integers(1, 2),
    ranks=st.integers(1, 5),
    gas=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_all_ranks_together_see_every_sequence_once_an_epoch(
    tokens: int, block: int, size: int, ranks: int, gas: int, seed: int
) -> None:
    """By exhaustion over as many epochs as it takes for steps and epochs to end together."""
    order = Sequences(np.arange(tokens), block, seed)
    if order.per_epoch < ranks:
        return
    step_size = size * ranks * gas
    epochs = step_size  # so that steps x step_size = epochs x per_epoch
    steps = order.per_epoch
    seen: list[Counter[int]] = [Counter() for _ in range(epochs)]
    for rank in range(ranks):
        loader = Loader(order, size, gas, rank, ranks, prefetch=0)
        for step in range(steps):
            indices = [
                step * step_size + (micro * ranks + rank) * size + i for micro in range(gas) for i in range(size)
            ]
            for index, first in zip(indices, firsts(loader.step(step)), strict=True):
                seen[index // order.per_epoch][first] += 1
    for epoch in seen:
        assert set(epoch.values()) == {1}
        assert len(epoch) == order.per_epoch
        assert max(epoch) - min(epoch) == (order.per_epoch - 1) * block


@pytest.mark.parametrize("n", [*range(1, 70), 4095, 4096, 4097, 65_537])
def test_the_shuffle_is_complete_by_exhaustion(n: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, f"key{n}")(np.arange(n))), np.arange(n))


def test_batches_that_are_kept_are_not_overwritten() -> None:
    loader = Loader(Sequences(np.arange(5000), 7, seed=3), 4)
    kept = [loader.step(step)[0] for step in range(20)]
    copies = [batch.tokens.clone() for batch in kept]
    for step in range(20, 40):
        loader.step(step)
    assert all(torch.equal(batch.tokens, copy) for batch, copy in zip(kept, copies, strict=True))
    loader.close()


def test_without_the_thread_buffers_are_used_again_once_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where they are pinned memory."""
    events: list[str] = []
    event = SimpleNamespace(record=lambda: events.append("record"), synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    made, order = [], Sequences(np.arange(5000), 7, seed=3)
    empty = order.empty
    monkeypatch.setattr(order, "empty", lambda size, pinned: (made.append(pinned), empty(size))[1])
    loader = Loader(order, 4, device=torch.device("meta"), prefetch=0)
    for first, gas in ((0, 1), (4, 1), (8, 1), (12, 2), (20, 2)):  # the size of a step changes
        loader.take(first, gas)
    assert made == [True] * (1 + 2)
    assert events == ["record", "wait", "record", "wait", "record", "record", "wait", "record"]


def test_what_goes_wrong_in_the_thread_is_raised_where_the_batch_is_wanted(tmp_path: Path) -> None:
    writer.write_shard(tmp_path / "a.bin", [np.arange(5000)], "<u2")
    tokens = Tokens([examine(tmp_path / "a.bin")])
    (tmp_path / "a.bin").unlink()
    loader = Loader(Sequences(tokens, 7, seed=3), 4)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a\.bin cannot be read: No such file"):
            loader.step(0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wordrun-loader"]


def test_the_thread_ends_with_the_loader() -> None:
    loader: Loader | None = Loader(Sequences(np.arange(500), 7, seed=3), 4)
    assert loader is not None
    assert threads() == []  # it begins when it is needed
    loader.step(0)
    assert len(threads()) == 1
    loader.close()
    assert threads() == []
    loader = Loader(Sequences(np.arange(500), 7, seed=3), 4)
    loader.step(0)
    gone = weakref.ref(loader)
    loader = None
    gc.collect()
    assert gone() is None
    assert threads() == []


def test_the_thread_does_not_hold_the_process(tmp_path: Path) -> None:
    """Not even one that hangs in the file system."""
    script = """
import time, numpy as np
from wordrun.data.loader import Loader
from wordrun.data.order import Sequences
class Slow(Sequences):
    def fill(self, first, batch):
        if first > 4:
            time.sleep(600)
        super().fill(first, batch)
loader = Loader(Slow(np.arange(500), 7, seed=3), 4)
loader.step(0)
time.sleep(0.2)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_fewer_sequences_than_ranks_are_refused() -> None:
    order = Sequences(np.arange(40), 10, seed=1)  # 3 of them
    Loader(order, 1, ranks=3)
    with pytest.raises(ConfigError, match=r"has 3 sequences of model\.block_size=10, fewer than the 4 data-parallel"):
        Loader(order, 1, ranks=4)


# Mixes


def mixed(*shares: float, seed: int = 5) -> Mix:
    """Return a mix of sources whose tokens tell which one they are from: the k-th has 100,000 k + 0, 1, 2, ..."""
    orders = [Sequences(np.arange(50_000 // (k + 1)) + 100_000 * k, 5, seed) for k in range(len(shares))]
    return Mix(orders, shares, seed)


def test_a_mix_has_exactly_the_shares_that_were_asked_for() -> None:
    mix = mixed(0.5, 0.3, 0.2)
    sources = [mix.locate(index)[0] for index in range(3 * MIX_PERIOD)]
    for period in range(3):
        counts = Counter(sources[period * MIX_PERIOD : (period + 1) * MIX_PERIOD])
        assert [counts[k] / MIX_PERIOD for k in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1 / MIX_PERIOD)
    assert sources[:MIX_PERIOD] != sources[MIX_PERIOD : 2 * MIX_PERIOD]  # shuffled again
    assert max(len(run) for run in "".join(map(str, sources)).replace("1", " ").replace("2", " ").split()) < 40


def test_a_mix_takes_each_source_in_its_own_order() -> None:
    mix = mixed(0.5, 0.3, 0.2)
    places = [mix.locate(index) for index in range(2 * MIX_PERIOD)]
    for k in range(3):
        assert [index for source, index in places if source == k] == list(range(2 * int(mix.counts[k])))
    batch = mix.batch(MIX_PERIOD - 3, 6)  # over the end of a period
    for row, (source, index) in zip(batch.tokens, places[MIX_PERIOD - 3 : MIX_PERIOD + 3], strict=True):
        assert torch.equal(row, mix.orders[source].batch(index, 1).tokens[0])


def test_a_mix_is_the_same_for_any_number_of_ranks_and_from_any_step() -> None:
    alone = firsts(Loader(mixed(2, 1), 12, prefetch=0).step(500))
    dealt = [firsts(Loader(mixed(2, 1), 3, 2, rank, 2, prefetch=2).step(500)) for rank in range(2)]
    assert sorted(dealt[0] + dealt[1]) == sorted(alone)
    assert firsts(Loader(mixed(2, 1, seed=6), 12, prefetch=0).step(500)) != alone


@given(shares=st.lists(st.floats(1, 100), min_size=1, max_size=6))
def test_every_source_of_a_mix_has_its_share(shares: list[float]) -> None:
    orders = [Sequences(np.arange(100), 5, 1)] * len(shares)
    counts = Mix(orders, shares, 1).counts
    assert counts.sum() == MIX_PERIOD
    exact = np.array(shares) / sum(shares) * MIX_PERIOD
    assert np.abs(counts - exact).max() < 1


def test_a_run_can_train_on_a_mix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    folder = tmp_path / "shards"
    data = TextConfig("cats", path=str(tmp_path / "a.txt"), prepared=str(folder))
    run.execute(run.begin(locate(data), ByteTokenizerConfig(), folder), World())
    words = ["data=mix", f"data.mix={{sample: 3, {folder}: 1}}", "tokenizer=byte", "model.block_size=16"]
    found = corpus_of_run(wordrun.compose(words), World())
    assert [round(part.fraction, 2) for part in found.mix] == [0.75, 0.25]
    assert len(found.train) == sum(len(part.train) for part in found.mix)
    assert len(found.val) == sum(len(part.val) for part in found.mix)
    assert "75% sample" in found.origin
    assert "25% " in found.origin


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.mix={sampel: 1}", "tokenizer=byte"], "data.mix: .*did you mean 'sample'"),
        (["data.mix={sample: 1}", "tokenizer=bpe"], "tokenizer=bpe would be different for each text"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        corpus_of_run(wordrun.compose(["data=mix", *words]), World())


# Documents


def test_sequences_can_begin_where_documents_do() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(3, 40, 300)
    tokens = np.concatenate([[0, *rng.integers(1, 9, n)] for n in lengths])
    plain, aligned = (Sequences(tokens, 16, 7, eot) for eot in (None, 0))
    first = plain.batch(0, plain.per_epoch).tokens
    moved = aligned.batch(0, aligned.per_epoch)
    for before, after in zip(first, moved.tokens, strict=True):
        if (before == 0).any():
            assert after[0] == 0
            shift = int((before == 0).nonzero()[0])
            assert torch.equal(after[: 16 - shift], before[shift:])
        else:
            assert torch.equal(after, before)
    assert torch.equal(moved.targets[:, :-1], moved.tokens[:, 1:])


def test_alignment_needs_an_end_of_text_token() -> None:
    cfg = wordrun.compose(["data=sample", "data.align=true"])
    with pytest.raises(ConfigError, match=r"data\.align=true .* tokenizer=char has none"):
        order_of_run(cfg, corpus_of_run(cfg, World()))


# Staging


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with several shards."""
    folder = tmp_path_factory.mktemp("in")
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"text number {number}. " * 200)
    out = tmp_path_factory.mktemp("prepared") / "out"
    data = TextConfig("texts", path=str(folder), prepared=str(out), workers=1)
    run.execute(run.begin(locate(data), ByteTokenizerConfig(), out), World())
    return out


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_staging_copies_everything_once(prepared: Path, tmp_path: Path) -> None:
    to = node_copy.target(prepared, str(tmp_path))
    shares: list[float] = []
    node_copy.copy(prepared, to, shares.append)
    assert names(to) == names(prepared)
    assert all((to / name).read_bytes() == (prepared / name).read_bytes() for name in names(prepared))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert node_copy.is_complete(prepared, to)


def test_staging_continues_after_an_interruption(prepared: Path, tmp_path: Path) -> None:
    to = node_copy.target(prepared, str(tmp_path))
    node_copy.copy(prepared, to)
    (to / "manifest.json").unlink()
    (to / "train_000001_00.bin").unlink()
    (to / ".train_000001_00.bin").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in to.glob("train_*.bin")}
    assert not node_copy.is_complete(prepared, to)
    node_copy.copy(prepared, to)
    assert names(to) == names(prepared)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_damaged_shard_is_not_staged(prepared: Path, tmp_path: Path) -> None:
    import shutil

    broken = shutil.copytree(prepared, tmp_path / "broken")
    path = broken / "train_000002_00.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    to = node_copy.target(broken, str(tmp_path / "stage"))
    with pytest.raises(UserError, match=r"train_000002_00\.bin is damaged"):
        node_copy.copy(broken, to)
    assert not node_copy.is_complete(broken, to)


def test_a_stage_without_room_or_rights_is_one_message(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"data\.stage=.*file"):
        node_copy.copy(prepared, node_copy.target(prepared, str(tmp_path / "file")))
    usage: Any = type("Usage", (), {"free": 100})
    monkeypatch.setattr(node_copy.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"name a larger disk, or leave data\.stage out"):
        node_copy.copy(prepared, node_copy.target(prepared, str(tmp_path)))


def test_a_run_reads_what_was_staged(prepared: Path, tmp_path: Path) -> None:
    words = ["data=shards", f"data.path={prepared}", "tokenizer=byte", f"data.stage={tmp_path / 'stage'}"]
    found = corpus_of_run(wordrun.compose(words), World())
    assert isinstance(found.train, Tokens)
    assert all(Path(shard.path).is_relative_to(tmp_path / "stage") for shard in found.train.shards)
    whole = manifests.split(prepared, manifests.load(prepared), "train")
    assert np.array_equal(found.train[:], whole[:])
