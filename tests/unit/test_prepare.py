"""Preparation: the same result for any number of ranks, restarted where it was, one at a time, and never half."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from matplotlib.image import imread

import wordrun
from wordrun.config import BPETokenizerConfig, Config, DataConfig, TokenizerConfig
from wordrun.data import corpus, lock, opening, piecework, preparing, workers
from wordrun.data import manifest as manifests
from wordrun.data.documents import documents, pieces
from wordrun.data.piecework import record_of
from wordrun.data.sample import sample_text
from wordrun.data.sources import locate
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError
from wordrun.prepare.cli import main

if TYPE_CHECKING:
    from conftest import Command, Start

BYTE = TokenizerConfig("byte")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of documents, two of them one text, so that there are pieces to be shared out."""
    folder = tmp_path_factory.mktemp("texts")
    paragraphs = sample_text()[:120_000].split("\n\n")
    for number in range(4):
        lines = (json.dumps({"text": text}) for text in paragraphs[number::4] if text)
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "a.txt").write_text(sample_text()[200_000:220_000])
    (folder / "b.txt").write_text(sample_text()[220_000:230_000])
    return folder


def made(texts: Path, folder: Path, tokenizer: TokenizerConfig = BYTE, ranks: int = 1, **options: Any) -> DataConfig:
    """Prepare ``texts`` as that many ranks, threads here, and return the options."""
    data = DataConfig("mine", path=str(texts), prepared=str(folder), **options)
    plan = preparing.plan(data, tokenizer, locate(data), folder)
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            preparing.execute(plan, World(rank=number, size=ranks, local_rank=number, local_size=ranks))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return data


def content(folder: Path) -> dict[str, str]:
    """Return the hash of every file in ``folder``."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# The same for any number of ranks and processes


@pytest.mark.parametrize("tokenizer", [BYTE, TokenizerConfig("char"), BPETokenizerConfig(vocab_size=300)])
def test_any_number_of_ranks_and_processes_makes_the_same(
    tokenizer: TokenizerConfig, texts: Path, tmp_path: Path
) -> None:
    made(texts, tmp_path / "1", tokenizer, workers=3)
    alone = content(tmp_path / "1")
    assert len([name for name in alone if name.endswith(".bin")]) == 12  # of six pieces, for training and validation
    made(texts, tmp_path / "2", tokenizer, ranks=2, workers=1)
    assert content(tmp_path / "2") == alone


def test_nothing_is_lost_and_nothing_twice(texts: Path, tmp_path: Path) -> None:
    data = made(texts, tmp_path / "out")
    words, train, val = opening.open_prepared(tmp_path / "out", data, BYTE)
    written = sorted(words.decode(split[:]) for split in (train, val))
    whole = [d.text for piece in pieces(data, locate(data)) for d in documents(piece, data)]
    together = "".join(written).replace("<|endoftext|>", "")
    assert len(together) == sum(map(len, whole))
    assert sorted(together) == sorted("".join(whole))
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.1, abs=0.02)


def test_documents_begin_where_the_manifest_says(texts: Path, tmp_path: Path) -> None:
    made(texts, tmp_path / "out")
    manifest = manifests.load(tmp_path / "out")
    for entry in [*manifest.train, *manifest.val]:
        tokens = np.fromfile(tmp_path / "out" / entry.file, dtype="<u2")[512:]  # behind the header
        assert len(tokens) == entry.tokens
        marks = np.flatnonzero(tokens == 256).tolist()
        assert marks == manifests.document_starts(tmp_path / "out", entry).tolist()
        assert entry.documents == len(marks)
    whole = sum(manifest.documents(split) for split in manifests.SPLITS)
    assert whole == 2 + sum(len((texts / f"{n}.jsonl").read_text().splitlines()) for n in range(4))


def test_a_text_is_split_as_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(sample_text()[:50_001])
    data = made(tmp_path / "a.txt", tmp_path / "out", TokenizerConfig("char"))
    plain = corpus.load(data, locate(data))
    words, train, val = opening.open_prepared(tmp_path / "out", data, TokenizerConfig("char"))
    assert words.to_json() == plain.tokenizer.to_json()
    assert (train[:].tolist(), val[:].tolist()) == (plain.train[:].tolist(), plain.val[:].tolist())


def test_long_documents_are_encoded_in_parts_that_no_tokenizer_would_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(sample_text()[:60_000])
    cfg = BPETokenizerConfig(vocab_size=500)
    made(tmp_path / "a.txt", tmp_path / "whole", cfg)
    monkeypatch.setattr(piecework, "CHUNK", 1000)
    made(tmp_path / "a.txt", tmp_path / "parts", cfg)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_shards_end_at_a_document_when_they_are_full(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecework.shards, "SHARD_TOKENS", 5000)
    data = made(texts / "0.jsonl", tmp_path / "out")
    manifest = manifests.load(tmp_path / "out")
    assert [entry.file for entry in manifest.train][:2] == ["train_000000_00.bin", "train_000000_01.bin"]
    assert all(5000 <= entry.tokens < 8000 for entry in manifest.train[:-1])
    monkeypatch.undo()
    made(texts / "0.jsonl", tmp_path / "one")
    both = [opening.open_prepared(tmp_path / name, replace(data), BYTE)[1][:].tolist() for name in ("out", "one")]
    assert both[0] == both[1]


# Restarted, and one at a time


def test_what_was_finished_is_not_done_again(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    work_on = workers.work_on
    done: list[int] = []

    def counted(task: str, data: DataConfig, out: Path, mine: Any, count: int) -> Any:
        done.append(len(mine))
        return work_on(task, data, out, mine, count)

    def broken_off(task: str, data: DataConfig, out: Path, mine: Any, count: int) -> Any:
        yield from counted(task, data, out, mine[:3], count)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "work_on", broken_off)
    with pytest.raises(KeyboardInterrupt):
        made(texts, folder)
    assert not opening.is_whole(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    (folder / ".train_000005_00.bin.host-1").write_bytes(b"half")  # what a killed process leaves
    monkeypatch.setattr(workers, "work_on", counted)
    made(texts, folder)
    assert done == [3, 3]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    made(texts, tmp_path / "at once")
    assert content(folder) == content(tmp_path / "at once")


def test_a_shard_that_was_damaged_in_between_is_made_again(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    data = DataConfig("mine", path=str(texts), prepared=str(folder))
    plan = preparing.plan(data, BYTE, locate(data), folder)
    for piece in plan.pieces[:2]:
        piecework.run("shards", piece, data, folder, lambda *counts: None)
    assert preparing.plan(data, BYTE, locate(data), folder).todo["shards"] == [2, 3, 4, 5]
    os.truncate(folder / "train_000001_00.bin", 2000)
    assert preparing.plan(data, BYTE, locate(data), folder).todo["shards"] == [1, 2, 3, 4, 5]
    assert record_of(folder, "shards", 0).exists()
    other = replace(data, val_fraction=0.2)  # what was made with other settings does not count
    assert preparing.plan(other, BYTE, locate(other), folder).todo["shards"] == [0, 1, 2, 3, 4, 5]


def test_a_killed_preparation_goes_on(texts: Path, tmp_path: Path, start: Start, command: Command) -> None:
    """The command is killed without warning when some shards are there, and started again."""
    for number in range(20):
        (tmp_path / "in" / f"{number:02d}").mkdir(parents=True)
        (tmp_path / "in" / f"{number:02d}" / "a.txt").write_text(sample_text()[number * 4000 : (number + 1) * 4000])
    words = [sys.executable, "-m", "wordrun.prepare", "data=text", f"data.path={tmp_path / 'in'}", "tokenizer=byte",
             f"data.prepared={tmp_path / 'out'}", "data.workers=1"]  # fmt: skip
    process = start(*words, stderr=subprocess.STDOUT)
    while len(list((tmp_path / "out").glob("work/*.shards.json"))) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ConfigError, match="did not come to its end"):
        opening.open_prepared(tmp_path / "out", DataConfig(), BYTE)
    again = command(*words)
    assert again.returncode == 0, again.stderr
    assert main([*words[3:-2], f"data.prepared={tmp_path / 'at once'}"]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "at once")
    assert not list(tmp_path.glob(".*.lock"))


def test_two_preparations_at_once_are_refused(texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with lock.held(tmp_path / ".out.lock") as mine:
        assert mine
        with pytest.raises(SystemExit) as caught:
            main(["data=text", f"data.path={texts}", "tokenizer=byte", f"data.prepared={tmp_path / 'out'}"])
    assert caught.value.code == 1
    said = capfd.readouterr().err
    assert f"is being prepared in {tmp_path / 'out'} by process {os.getpid()} on {socket.gethostname()}" in said
    assert len(said.splitlines()) == 1


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": gone.pid}))
    with lock.held(path) as mine:
        assert mine
        with lock.held(path) as again:
            assert not again
    assert not path.exists()
    monkeypatch.setattr(lock, "SILENCE_S", 0.5)
    path.write_text(json.dumps({"host": "another", "pid": 1}))  # nobody here can know; it gives no sign
    with lock.held(path) as mine:
        assert mine


def test_a_lock_on_another_host_that_gives_signs_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SILENCE_S", 5.0)
    path, done = tmp_path / "lock", threading.Event()
    path.write_text(json.dumps({"host": "another", "pid": 1}))
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    beat = threading.Thread(target=lock._beat, args=(path, done))
    beat.start()
    with lock.held(path) as mine:
        assert not mine
    done.set()
    beat.join()


# A run on data that is not prepared


def config(texts: Path, *words: str) -> Config:
    return wordrun.compose(["data=text", f"data.path={texts}", "tokenizer=byte", "model.block_size=16", *words])


def test_ranks_that_find_nothing_prepared_have_one_of_them_prepare(
    texts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three ranks of one file system, two of them the first of their node, as threads that share nothing but files."""
    cfg = config(texts)
    monkeypatch.setattr("wordrun.dist.share", lambda value, world: value or asked[0])
    calls: list[int] = []
    prepare = preparing.plan

    def counted(*args: Any) -> Any:
        calls.append(1)
        time.sleep(1.0)
        return prepare(*args)

    monkeypatch.setattr(preparing, "plan", counted)
    monkeypatch.setattr(corpus, "TELL_S", 0.2)
    source = locate(cfg.data)
    asked = [(source, corpus.identity.folder_of(cfg.data, cfg.tokenizer, source), False)]
    found: list[int] = []
    worlds = [World(0, 3, 0, 2, 0, 2), World(1, 3, 1, 2, 0, 2), World(2, 3, 0, 1, 1, 2)]
    threads = [
        threading.Thread(target=lambda world: found.append(len(corpus.obtain(cfg, world).train)), args=(world,))
        for world in worlds
    ]
    with caplog.at_level("INFO", logger="wordrun"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert calls == [1]
    assert "waiting for data=text to be prepared, by process" in caplog.text


def test_a_large_source_is_not_prepared_unasked(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "UNASKED", 1000)
    with pytest.raises(UserError, match=r"not prepared .* and large .*launch python -m wordrun\.prepare data=text"):
        corpus.obtain(config(texts), World())


def test_a_run_finds_what_the_command_has_prepared(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["data=text", f"data.path={texts}", "tokenizer=byte"]) == 0
    monkeypatch.setattr(corpus, "UNASKED", 0)
    assert len(corpus.obtain(config(texts), World()).train) > 100_000
    with pytest.raises(UserError, match="not prepared with these options"):
        corpus.obtain(config(texts, "data.val_fraction=0.2"), World())


@pytest.mark.parametrize("where", ["data.prepared", "WORDRUN_DATA_HOME"])
def test_a_folder_that_cannot_be_written_is_one_message(
    where: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("WORDRUN_DATA_HOME", str(tmp_path / ("file" if where == "WORDRUN_DATA_HOME" else "home")))
    words = [f"data.prepared={tmp_path / 'file' / 'out'}"] if where == "data.prepared" else []
    with pytest.raises(
        UserError, match=r"cannot write prepared data to .*file.* Choose another place by data\.prepared"
    ):
        corpus.obtain(config(texts, *words), World())


def test_too_little_for_both_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 5)
    with pytest.raises(ConfigError, match=r"no text for the split val: use a larger data\.val_fraction than 0\.1"):
        made(tmp_path / "a.jsonl", tmp_path / "out")
    assert not opening.is_whole(tmp_path / "out")


def test_a_bad_file_among_good_ones_ends_the_preparation(texts: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "abc"}\n' * 20 if number != 1 else "{")
    with pytest.raises(UserError, match=r"1\.jsonl \(line 1\) is no JSON"):
        made(tmp_path, tmp_path / "out")
    assert not opening.is_whole(tmp_path / "out")


# The command


def test_the_command_shows_what_is_there(texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["data=text", f"data.path={texts}", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    folder = tmp_path / "out"
    assert main([*words, f"data.prepared={folder}", "--inspect", "--verify"]) == 0
    said = capfd.readouterr().out
    manifest = manifests.load(folder)
    wanted = (
        f"train: {manifest.tokens('train'):,} tokens", "12 shards are as they were written", "vocabulary: 300 tokens",
        "most common tokens", "longest documents", "first sequences of a run", f"histograms: {folder / 'inspect.png'}",
    )  # fmt: skip
    assert [text for text in wanted if text not in said.replace("\n", " ")] == []
    picture = imread(folder / "inspect.png")
    assert picture.shape[:2] == (480, 1200)
    assert picture[..., :3].std() > 0.1  # something is drawn
    shard = folder / manifest.train[0].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SystemExit):
        main([*words, f"data.prepared={folder}", "--verify"])
    assert f"{shard} is damaged" in capfd.readouterr().err


def test_shards_of_others_are_written_anew(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    tokens = np.array([256, *b"first", 256, *b"second"] * 50)
    np.save(tmp_path / "theirs" / "fineweb_train_000001.npy", tokens)
    out = tmp_path / "out"
    words = ["data=shards", f"data.path={tmp_path / 'theirs'}", "tokenizer=byte", f"data.prepared={out}"]
    assert main(words) == 0
    manifest = manifests.load(out)
    assert (manifest.tokens("train"), manifest.tokens("val")) == (585, 65)
    assert manifest.documents("train") == 90
    cfg = wordrun.compose([*words, "model.block_size=16", f"data.stage={tmp_path / 'stage'}"])
    found = corpus.obtain(cfg, World())
    assert np.concatenate([found.train[:], found.val[:]]).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data=mix", "data.mix={sample: 1}"], "data=mix is prepared part by part: data=sample"),
        (["data=shards", "data.path=here"], "is read as it is"),
        (["data=text", "data.path=none.txt"], "none.txt cannot be read: No such file"),
        (["data=text"], "needs data.path=FILE"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "tokenizer=byte"])
    assert caught.value.code == 2
    assert says in capfd.readouterr().err


def test_what_a_tokenizer_learns_from_is_not_read_with_all_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("Grüße an alle.\n" * 100_000)
    data = DataConfig("text", path=str(tmp_path / "text.txt"), shard_mb=1)
    parts, read = pieces(data, locate(data)), []

    def decoded(content: bytes, path: str, at: int) -> str:
        read.append(len(content))
        return content.decode()

    monkeypatch.setattr("wordrun.data.documents.decoded", decoded)
    plan = preparing.Plan(data, BPETokenizerConfig(), locate(data), tmp_path, parts, None)
    sample = "".join(preparing._sample(plan, 1000))
    assert len(parts) == 2
    assert 900 < len(sample) <= 1000
    assert len(read) == 2
    assert max(read) < 4 * 1000
