"""Preparation: the same result for any number of ranks, continued after a kill, one at a time, never incomplete."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
from matplotlib.image import imread

import wordrun
from wordrun.commands.prepare import main
from wordrun.common.errors import ConfigError, PartError, UserError
from wordrun.config.registry import Part, parts
from wordrun.config.schema import Config
from wordrun.data import manifest as manifests, shards
from wordrun.data.corpus import corpus_of_run, open_text
from wordrun.data.foreign import open_foreign
from wordrun.data.options import TextConfig
from wordrun.data.prepare import fingerprint, lock, run, tokenize, workers
from wordrun.data.prepare.sources import locate
from wordrun.data.prepare.sources.base import Source, WorkItem
from wordrun.data.prepare.sources.files import FileSource
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.prepare.writer import SplitWriter
from wordrun.data.prepared import open_prepared
from wordrun.data.tokenizers.char import ByteTokenizer
from wordrun.data.tokenizers.options import (
    BPETokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    HFTokenizerConfig,
    TokenizerConfig,
)
from wordrun.data.tokenizers.subword import HFTokenizer
from wordrun.dist import World

if TYPE_CHECKING:
    from conftest import Command, Start

BYTE = ByteTokenizerConfig()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of documents, two of them one text each, so that there are work items to distribute."""
    folder = tmp_path_factory.mktemp("texts")
    paragraphs = sample_text()[:120_000].split("\n\n")
    for number in range(4):
        lines = (json.dumps({"text": text}) for text in paragraphs[number::4] if text)
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "a.txt").write_text(sample_text()[200_000:220_000])
    (folder / "b.txt").write_text(sample_text()[220_000:230_000])
    return folder


def made(texts: Path, folder: Path, tokenizer: TokenizerConfig = BYTE, ranks: int = 1, **options: Any) -> TextConfig:
    """Prepare ``texts`` as that many ranks, threads here, and return the options."""
    data = TextConfig("mine", path=str(texts), prepared=str(folder), **options)
    preparation = run.begin(locate(data), tokenizer, folder)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def rank(number: int) -> None:
        try:
            run.execute(preparation, World(rank=number, size=ranks, local_rank=number, local_size=ranks))
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    for number in range(ranks):
        threading.Thread(target=rank, args=(number,), daemon=True).start()
    for _ in range(ranks):
        if (failure := ended.get()) is not None:  # the other ranks wait for its work without end
            raise failure
    return data


def content(folder: Path) -> dict[str, str]:
    """Return the hash of every file in ``folder``."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# The same for any number of ranks and processes


@pytest.mark.parametrize("tokenizer", [BYTE, CharTokenizerConfig(), BPETokenizerConfig(vocab_size=300)])
def test_any_number_of_ranks_and_processes_makes_the_same(
    tokenizer: TokenizerConfig, texts: Path, tmp_path: Path
) -> None:
    made(texts, tmp_path / "1", tokenizer, workers=3)
    alone = content(tmp_path / "1")
    assert len([name for name in alone if name.endswith(".bin")]) == 12  # six work items, two splits
    made(texts, tmp_path / "2", tokenizer, ranks=2, workers=1)
    assert content(tmp_path / "2") == alone


def test_nothing_is_lost_and_nothing_twice(texts: Path, tmp_path: Path) -> None:
    data = made(texts, tmp_path / "out")
    source = FileSource.locate(data)  # as it was before it was prepared
    words, train, val, _ = open_prepared(tmp_path / "out", data, BYTE)
    written = sorted(words.decode(split[:]) for split in (train, val))
    whole = [d.text for item in source.items() for d in source.documents(item)]
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


def test_a_text_that_changes_meanwhile_is_prepared_again_by_the_next_run(tmp_path: Path) -> None:
    """The manifest has the state in which the preparation began, as the name of the folder does."""
    (tmp_path / "a.txt").write_text(sample_text()[:5_000])
    source = locate(TextConfig("mine", path=str(tmp_path / "a.txt")))
    folder = tmp_path / "out"
    preparation = run.begin(source, BYTE, folder)
    before = fingerprint.settings(source, BYTE)
    (tmp_path / "a.txt").write_text(sample_text()[:6_000])
    assert fingerprint.settings(source, BYTE) != before
    run.execute(preparation, World())
    assert manifests.load(folder).settings == before


def test_a_text_is_split_as_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(sample_text()[:50_001])
    data = made(tmp_path / "a.txt", tmp_path / "out", CharTokenizerConfig())
    source = FileSource.locate(data)
    text = next(source.documents(source.items()[0])).text
    expected = open_text(text, data.val_fraction, CharTokenizerConfig())
    found = open_prepared(tmp_path / "out", data, CharTokenizerConfig())
    assert found[0].to_json() == expected[0].to_json()
    assert [split[:].tolist() for split in found[1:3]] == [split[:].tolist() for split in expected[1:3]]


def test_long_documents_are_encoded_in_parts_that_no_tokenizer_would_merge(tmp_path: Path) -> None:
    text = sample_text()
    assert len(text) > 3 * 2**18, "is encoded in four parts"
    (tmp_path / "a.txt").write_text(text)
    data = made(tmp_path / "a.txt", tmp_path / "out", cfg := BPETokenizerConfig(vocab_size=500), val_fraction=0.1)
    tokenizer, train, val, _ = open_prepared(tmp_path / "out", data, cfg)
    assert isinstance(tokenizer, HFTokenizer)
    whole = tokenizer.encode_batch([text[: (cut := int(len(text) * 0.9))], text[cut:]])
    assert [train[1:].tolist(), val[:].tolist()] == [ids.tolist() for ids in whole]


def test_shards_end_at_a_document_when_they_are_full(texts: Path, tmp_path: Path) -> None:
    documents = [json.loads(line)["text"] for line in (texts / "0.jsonl").read_text().splitlines()]
    byte = ByteTokenizer()

    def written(folder: Path, **options: int) -> list[manifests.Entry]:
        folder.mkdir()
        split = SplitWriter("train", WorkItem(0, "jsonl"), byte, folder, **options)
        for document in documents:
            split.add(byte.encode(document), begins=True)
        return split.finish()

    some, one = written(tmp_path / "some", shard_tokens=5000), written(tmp_path / "one")
    assert [entry.file for entry in some][:2] == ["train_000000_00.bin", "train_000000_01.bin"]
    assert all(5000 <= entry.tokens < 8000 for entry in some[:-1])
    assert [entry.file for entry in one] == ["train_000000_00.bin"]
    both = [
        shards.Tokens([shards.examine(tmp_path / name / entry.file) for entry in entries])[:].tolist()
        for name, entries in (("some", some), ("one", one))
    ]
    assert both[0] == both[1]


# Restarted, and one at a time


def test_what_was_finished_is_not_done_again(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    work_on = workers.work_on
    done: list[int] = []

    def counted(task: str, source: Source, out: Path, mine: Any, count: int) -> Any:
        done.append(len(mine))
        return work_on(task, source, out, mine, count)

    def broken_off(task: str, source: Source, out: Path, mine: Any, count: int) -> Any:
        yield from counted(task, source, out, mine[:3], count)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "work_on", broken_off)
    with pytest.raises(KeyboardInterrupt):
        made(texts, folder)
    assert not manifests.is_complete(folder)
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
    data = TextConfig("mine", path=str(texts), prepared=str(folder))
    source = locate(data)
    for item in run.begin(source, BYTE, folder).items[:2]:
        tokenize.process("shards", item, source, folder, lambda *counts: None)
    assert run.begin(source, BYTE, folder).todo["shards"] == [2, 3, 4, 5]
    os.truncate(folder / "train_000001_00.bin", 2000)
    assert run.begin(source, BYTE, folder).todo["shards"] == [1, 2, 3, 4, 5]
    assert tokenize.record_of(folder, "shards", 0).exists()
    other = replace(data, val_fraction=0.2)  # what was made with other settings does not count
    assert run.begin(locate(other), BYTE, folder).todo["shards"] == [0, 1, 2, 3, 4, 5]


def test_a_killed_preparation_is_continued(texts: Path, tmp_path: Path, start: Start, command: Command) -> None:
    """The command is killed without warning when some shards are there, and started again."""
    for number in range(20):
        (tmp_path / "in" / f"{number:02d}").mkdir(parents=True)
        (tmp_path / "in" / f"{number:02d}" / "a.txt").write_text(sample_text()[number * 4000 : (number + 1) * 4000])
    words = [
        sys.executable,
        *shlex.split("-m wordrun prepare data=text"),
        f"data.path={tmp_path / 'in'}",
        "tokenizer=byte",
        f"data.prepared={tmp_path / 'out'}",
        "data.workers=1",
    ]
    process = start(*words, stderr=subprocess.STDOUT)
    while len(list((tmp_path / "out").glob("work/*.shards.json"))) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ConfigError, match="did not finish"):
        open_prepared(tmp_path / "out", TextConfig(), BYTE)
    again = command(*words)
    assert again.returncode == 0, again.stderr
    assert main([*words[4:-2], f"data.prepared={tmp_path / 'at once'}"]) == 0
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
    assert len(said.partition("\nmore: docs/")[0].splitlines()) == 1


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
    monkeypatch.setattr("wordrun.dist.broadcast", lambda value, world: value or asked[0])
    calls: list[int] = []
    begin = run.begin

    def counted(*args: Any) -> Any:
        calls.append(1)
        time.sleep(1.0)
        return begin(*args)

    monkeypatch.setattr(run, "begin", counted)
    monkeypatch.setattr(lock, "LOG_S", 0.2)
    source = locate(cfg.data)
    asked = [(source, None, fingerprint.folder_of(source, cfg.tokenizer))]
    found: list[int] = []
    worlds = [World(0, 3, 0, 2, 0, 2), World(1, 3, 1, 2, 0, 2), World(2, 3, 0, 1, 1, 2)]
    threads = [
        threading.Thread(target=lambda world: found.append(len(corpus_of_run(cfg, world).train)), args=(world,))
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
    assert "waiting for data=text to be prepared by process" in caplog.text


def test_a_run_does_not_prepare_a_large_source(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.touch()
    os.truncate(large, 2**30 + 1)
    with pytest.raises(UserError, match=r"not prepared .* and it is large .*launch wordrun prepare data=text"):
        corpus_of_run(config(large), World())


def test_a_run_finds_what_the_command_has_prepared(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["data=text", f"data.path={texts}", "tokenizer=byte"]) == 0
    for more, prepares in (((), False), (("data.val_fraction=0.2", "data.workers=1"), True)):
        caplog.clear()
        with caplog.at_level("INFO", logger="wordrun"):
            assert len(corpus_of_run(config(texts, *more), World()).train) > 100_000
        assert ("preparing data=text in" in caplog.text) == prepares
        assert ("using prepared data in" in caplog.text) != prepares


@pytest.mark.parametrize("where", ["data.prepared", "WORDRUN_DATA_HOME"])
def test_a_folder_that_cannot_be_written_is_one_message(
    where: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("WORDRUN_DATA_HOME", str(tmp_path / ("file" if where == "WORDRUN_DATA_HOME" else "home")))
    words = [f"data.prepared={tmp_path / 'file' / 'out'}"] if where == "data.prepared" else []
    with pytest.raises(
        UserError, match=r"cannot write prepared data to .*file.* Choose another folder with data\.prepared"
    ):
        corpus_of_run(config(texts, *words), World())


def test_too_little_for_both_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 5)
    with pytest.raises(ConfigError, match=r"no text for the split val: use a larger data\.val_fraction than 0\.1"):
        made(tmp_path / "a.jsonl", tmp_path / "out")
    assert not manifests.is_complete(tmp_path / "out")


def test_a_bad_file_among_good_ones_ends_the_preparation(texts: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "abc"}\n' * 20 if number != 1 else "{")
    with pytest.raises(UserError, match=r"1\.jsonl \(line 1\) is not valid JSON"):
        made(tmp_path, tmp_path / "out")
    assert not manifests.is_complete(tmp_path / "out")


# Files that cannot be used


def good_and_bad(folder: Path) -> None:
    """Write two texts, and one file of each kind that cannot be used."""
    folder.mkdir()
    for number in range(2):
        (folder / f"good{number}.txt").write_text(sample_text()[number * 3000 : (number + 1) * 3000])
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_bytes(b" \n\n")
    (folder / "program.txt").write_bytes(b"\x7fELF\x02\x01\0\0\xff\xfe")
    (folder / "a.jsonl.gz").write_bytes(b"no gzip")
    (folder / "a.jsonl.zst").write_bytes(b"no zst, but long enough")
    (folder / "a.parquet").write_bytes(b"no table")


def test_a_file_that_cannot_be_used_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(sample_text()[:3000])
    (folder / "b.txt").write_text("")
    words = ["data=text", f"data.path={folder}", "tokenizer=byte"]
    line = f"WARNING data=text: read 1 file (1 text), left out a file that cannot be used: {folder / 'b.txt'} (empty)"
    assert main(words) == 0
    assert capfd.readouterr().out.count(line) == 1
    cfg = config(folder)
    first = len(corpus_of_run(cfg, World()).train)
    (folder / "b.txt").write_text(sample_text()[:3000])  # now there is something in it
    assert len(corpus_of_run(cfg, World()).train) > 1.8 * first


def test_every_run_names_what_was_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good_and_bad(tmp_path / "in")
    cfg = config(tmp_path / "in")
    for _ in range(2):  # the second time, it is prepared
        caplog.clear()
        assert len(corpus_of_run(cfg, World()).train) == pytest.approx(5400, rel=0.01)
        (found,) = [r.message for r in caplog.records if "left out" in r.message]
        path = tmp_path / "in"
        assert found == (
            "data=text: read 2 files (2 text), left out 6 files that cannot be used: "
            f"{path / 'a.jsonl.gz'} (damaged), {path / 'a.jsonl.zst'} (damaged), {path / 'a.parquet'} (damaged) and 3 "
            "more"
        )
    kept = manifests.load(fingerprint.folder_of(locate(cfg.data), cfg.tokenizer)).left_out
    assert [text.rpartition("/")[2] for text in kept[3:]] == [
        "blank.txt (empty)",
        "empty.txt (empty)",
        "program.txt (a binary file (a zero at byte 6))",
    ]


def test_strict_refuses_what_would_be_left_out(tmp_path: Path) -> None:
    good_and_bad(tmp_path / "in")
    strict = config(tmp_path / "in", "data.strict=true")
    with pytest.raises(ConfigError, match=r"data\.strict=true, but files cannot be used: .*a\.jsonl\.gz \(damaged\)"):
        corpus_of_run(strict, World())
    corpus_of_run(config(tmp_path / "in"), World())
    with pytest.raises(ConfigError, match=r"data\.strict=true"):  # although it is prepared
        corpus_of_run(strict, World())
    with pytest.raises(SystemExit) as caught:
        main(["data=text", f"data.path={tmp_path / 'in'}", "tokenizer=byte", "data.strict=true"])
    assert caught.value.code == 2


def test_a_folder_of_which_nothing_can_be_used_is_refused(tmp_path: Path) -> None:
    good_and_bad(tmp_path / "in")
    for path in (tmp_path / "in").glob("good*"):
        path.write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"has no file that can be used: .*a\.jsonl\.gz \(damaged\).* and 5 more"):
        made(tmp_path / "in", tmp_path / "out")


def test_a_file_that_becomes_readable_changes_the_fingerprint(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate(TextConfig("mine", path=str(texts)))
    readable = source.state()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("a.txt"))
    assert source.state() != readable
    opened = open

    def refuse(path: Any, *args: Any) -> Any:
        if str(path).endswith("a.txt"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args)

    monkeypatch.setattr("builtins.open", refuse)
    assert locate(source.data).left_out() == [f"{texts / 'a.txt'} (cannot be read: Permission denied)"]


def test_a_folder_of_notes_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# A title\n")
    assert [item.path for item in locate(TextConfig("text", path=str(tmp_path))).items()] == [f"{tmp_path}/notes.md"]


def test_a_folder_is_listed_once_and_without_hidden_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing a large folder takes seconds, and each question about the files used to list it again."""
    good_and_bad(tmp_path / "in")
    for name in (".git", ".venv/lib", "deep/er"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "more.txt").write_text(sample_text()[:1000])
    (tmp_path / "in" / "._good0.txt").write_text("hidden")
    walks: list[Any] = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda folder, **options: walks.append(folder) or walk(folder, **options))
    data = TextConfig("text", path=str(tmp_path / "in"), prepared=str(tmp_path / "out"))
    source = locate(data)
    run.execute(run.begin(source, BYTE, tmp_path / "out"), World())
    assert source.single_text() is None
    assert source.size()
    assert [path.name for path in source.files() or []][-4:] == ["empty.txt", "good0.txt", "good1.txt", "program.txt"]
    assert tmp_path / "in" / "deep" / "er" / "more.txt" in (source.files() or [])
    assert walks == [str(tmp_path / "in")]


# The command


def test_the_command_shows_what_is_there(texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["data=text", f"data.path={texts}", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    folder = tmp_path / "out"
    assert main([*words, f"data.prepared={folder}", "--inspect", "--verify"]) == 0
    said = capfd.readouterr().out
    manifest = manifests.load(folder)
    wanted = (
        f"train: {manifest.tokens('train'):,} tokens",
        "12 shards match their checksums",
        "vocabulary: 300 tokens",
        "most frequent tokens",
        "longest documents",
        "first training sequences",
        f"histograms: {folder / 'inspect.png'}",
    )
    assert [text for text in wanted if text not in said.replace("\n", " ")] == []
    picture = imread(folder / "inspect.png")
    assert picture.shape[:2] == (480, 1200)
    assert picture[..., :3].std() > 0.1  # something is drawn
    shard = folder / manifest.train[0].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SystemExit):
        main([*words, f"data.prepared={folder}", "--verify"])
    assert f"{shard} is damaged" in capfd.readouterr().err


def test_foreign_shards_are_rewritten(tmp_path: Path) -> None:
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
    found = corpus_of_run(cfg, World())
    assert np.concatenate([found.train[:], found.val[:]]).tolist() == tokens.tolist()


def test_shards_without_their_vocabulary_are_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    np.save(tmp_path / "train.npy", np.arange(100, dtype=np.uint16))
    with pytest.raises(SystemExit):
        main(["data=shards", f"data.path={tmp_path}", f"data.prepared={tmp_path / 'out'}"])
    assert "GPT-2's vocabulary is not in tiktoken's cache" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data=mix", "data.mix={sample: 1}"], "data=mix: prepare its parts one by one, with data=sample"),
        (["data=shards", "data.path=here"], "can be read without preparation"),
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
    data = TextConfig("text", path=str(tmp_path / "text.txt"), shard_mb=1)
    source = locate(data)
    parts, read = source.items(), []

    def decoded(content: bytes, path: str, at: int) -> str:
        read.append(len(content))
        return content.decode()

    monkeypatch.setattr("wordrun.data.prepare.sources.files.decoded", decoded)
    sample = "".join(run._sample(run.Preparation(source, BPETokenizerConfig(), tmp_path, parts, None), 1000))
    assert len(parts) == 2
    assert 900 < len(sample) <= 1000
    assert len(read) == 2
    assert max(read) < 4 * 1000


# Workers


def by_workers(texts: Path, folder: Path) -> Iterator[list[int]]:
    """Begin to prepare ``texts`` in two worker processes."""
    source = locate(TextConfig("mine", path=str(texts), prepared=str(folder)))
    preparation = run.begin(source, BYTE, folder)
    return workers.work_on("shards", source, folder, preparation.items, 2)


def children() -> set[int]:
    """Return the ids of the worker processes that this process has started."""
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def test_workers_count_what_they_have_done(texts: Path, tmp_path: Path) -> None:
    counts = list(by_workers(texts, tmp_path / "out"))
    made(texts, tmp_path / "alone")
    manifest = manifests.load(tmp_path / "alone")
    items, documents, tokens, read = counts[-1]
    assert items == 6
    assert documents == sum(manifest.documents(split) for split in manifests.SPLITS)
    assert tokens + documents == sum(manifest.tokens(split) for split in manifests.SPLITS)
    assert read == sum(path.stat().st_size for path in texts.iterdir())
    assert all(before <= after for before, after in pairwise(counts))
    assert children() == set()


def test_a_killed_worker_ends_the_preparation_and_is_named(tmp_path: Path) -> None:
    """A worker that reads a pipe, as slow as a file system may be, is killed as if memory had run out."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "abc"}\n' * 20)
    pipe = tmp_path / "c.jsonl.gz"
    pipe.write_bytes(gzip.compress(b'{"text": "abc"}\n'))
    working = by_workers(tmp_path, tmp_path / "out")
    pipe.unlink()
    os.mkfifo(pipe)
    end = None
    while end is None or next(working)[0] < 2:
        with contextlib.suppress(OSError):  # no worker reads it yet
            end = end or os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        next(working)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"a worker process died .*c\.jsonl\.gz \(work item 2\)\. Run the same command"):
        list(working)
    os.close(end)
    assert children() == set()


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text(sample_text()[number * 4000 : (number + 1) * 4000])
    words = ["data=text", f"data.path={tmp_path}", "tokenizer=byte", f"data.prepared={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "wordrun", "prepare", *words, "data.workers=2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while len(list((tmp_path / "out").glob("work/*.shards.json"))) < 3:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        process.kill()
        process.communicate(timeout=90)  # the output ends with the last process that can write to it


@pytest.mark.parametrize("by", ["file", "stdin"])
def test_a_script_without_a_main_guard_can_prepare(by: str, texts: Path, tmp_path: Path) -> None:
    script = f"""
import wordrun
from wordrun.dist import World
from wordrun.data.corpus import corpus_of_run
print("once")
cfg = wordrun.compose(["data=text", "data.path={texts}", "tokenizer=byte", "data.prepared={tmp_path / "out"}"])
corpus_of_run(cfg, World())
"""
    (tmp_path / "script.py").write_text(script)
    command, text = ([str(tmp_path / "script.py")], None) if by == "file" else (["-"], script)
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    made(texts, tmp_path / "alone")
    shards = {name: digest for name, digest in content(tmp_path / "out").items() if name != "manifest.json"}
    assert shards.items() <= content(tmp_path / "alone").items()


def test_ranks_that_are_threads_prepare_their_workers_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one removes a variable that the other has removed, and fails."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main_module, environment, inside = sys.modules["__main__"], dict(os.environ), threading.Semaphore(0)

    def rank() -> bool:
        with workers._as_worker_environment():
            return inside.acquire(timeout=0.2)  # the other is not inside as well

    def other() -> bool:
        with workers._as_worker_environment():
            inside.release()
            return os.environ["OMP_NUM_THREADS"] == "1"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rank)
        while sys.modules["__main__"] is main_module and not first.done():
            time.sleep(0.001)
        second = pool.submit(other)
        assert (first.result(), second.result()) == (False, True)
    assert sys.modules["__main__"] is main_module
    assert dict(os.environ) == environment


# A new kind of source


def test_a_kind_of_source_is_a_class_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the worker processes, and in a module that is not part of wordrun."""
    (tmp_path / "numerals.py").write_text("""
from wordrun.data.prepare.sources.base import Document, Source, WorkItem

class Numerals(Source):
    @classmethod
    def locate(cls, data):
        return cls(data, None, "numerals")

    def size(self):
        return 0

    def state(self):
        return None

    def items(self):
        return [WorkItem(number, "numerals") for number in range(3)]

    def documents(self, item):
        return (Document(f"{item.number}{n}") for n in range(10))

class Broken(Numerals):
    def documents(self, item):
        yield from super().documents(item)
        raise KeyError("the eleventh")
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(parts("data"), "numerals", Part(TextConfig, "numerals:Numerals"))
    words = ["data=text", "data.kind=numerals", "data.workers=2", "tokenizer=byte", "model.block_size=16"]
    corpus = corpus_of_run(wordrun.compose(words), World())
    expected = [f"{item}{n}" for item in range(3) for n in range(9)]
    assert corpus.tokenizer.decode(corpus.train[:]).split("<|endoftext|>")[1:] == expected
    assert corpus.origin == "numerals"
    broken = Part(TextConfig, "numerals:Broken", "data", "broken", "mine/parts.py:3")
    monkeypatch.setitem(parts("data"), "broken", broken)
    message = r"data=broken \(mine/parts.py:3\): Broken failed in line 24: KeyError: 'the eleventh' \(numerals.py\)"
    with pytest.raises(PartError, match=message):  # in a worker
        corpus_of_run(wordrun.compose([*words, "data.kind=broken", "data.workers=1"]), World())
    for kind, counted in (("numerals", []), ("broken", ["data"])):  # the code of a part of wordrun does not count
        assert list(fingerprint.code_of(wordrun.compose([*words, f"data.kind={kind}"]).text, BYTE)) == counted


SEEN = """
from dataclasses import dataclass
from typing import ClassVar
from wordrun.config import TokenizerConfig
from wordrun.data.tokenizers.char import CharTokenizer

@dataclass
class SeenConfig(TokenizerConfig):
    name: str = "seen"
    BUILT_FROM

class Seen(CharTokenizer):
    kind = "seen"
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Part]]:
    """Write and register a tokenizer that is not part of wordrun, whose options have the text ``built_from``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second

    def write(built_from: str, more: str = "") -> Part:
        (tmp_path / "seen.py").write_text(SEEN.replace("BUILT_FROM", built_from) + more)
        sys.modules.pop("seen", None)  # as in another process
        part = Part("seen:SeenConfig", "seen:Seen", "tokenizer", "seen", "mine/parts.py:3")
        monkeypatch.setitem(parts("tokenizer"), "seen", part)
        return part

    yield write
    sys.modules.pop("seen", None)


@pytest.mark.parametrize(
    "built_from",
    [
        "@property\n    def built_from(self):\n        return 'characters'",
        "built_from = 'sample'",
        "built_from: ClassVar[str] = 'characters'",
    ],
    ids=["property", "attribute", "ClassVar"],
)
def test_a_tokenizer_of_another_package_can_be_built_from_the_text(
    built_from: str, seen: Callable[..., Part], texts: Path, tmp_path: Path
) -> None:
    """In a module that is not part of wordrun: its config says what of the text it gets."""
    part = seen(built_from)
    assert list(part.options().problems()) == []
    for path in (texts / "a.txt", texts):
        data = TextConfig("mine", path=str(path), prepared=str(tmp_path / path.name))
        source = locate(data)
        expected = {each for item in source.items() for document in source.documents(item) for each in document.text}
        corpus = corpus_of_run(replace(Config(), data=data, tokenizer=part.options()), World())
        assert set(json.loads(corpus.tokenizer.to_json())["characters"]) == expected
        assert corpus.tokenizer.decode(corpus.train[:20]) == next(source.documents(source.items()[0])).text[:20]


def test_a_tokenizer_that_does_not_say_what_it_is_built_from_is_refused(
    seen: Callable[..., Part], texts: Path, tmp_path: Path
) -> None:
    data = TextConfig("mine", path=str(texts / "a.txt"), prepared=str(tmp_path / "out"))
    message = r"tokenizer=seen \(mine/parts.py:3\): build reads texts, but SeenConfig has no built_from: add built_from"
    with pytest.raises(ConfigError, match=message):
        corpus_of_run(replace(Config(), data=data, tokenizer=seen("").options()), World())
    (problem,) = seen("built_from = 'samples'").options().problems()
    assert problem.startswith("SeenConfig.built_from='samples' should be 'sample' (texts of the data), 'characters'")
    assert problem.endswith("; did you mean 'sample'?")


def test_data_are_prepared_again_when_the_code_of_a_tokenizer_changes(
    seen: Callable[..., Part], texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, named = TextConfig("mine", path=str(texts / "a.txt")), str(tmp_path / "out")

    def logged(part: Part, data: TextConfig) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="wordrun"):
            corpus_of_run(replace(Config(), data=data, tokenizer=part.options()), World())
        return [line for line in caplog.messages if "prepar" in line and not line.startswith("prepared data=")]

    before, after = "built_from = 'sample'", "built_from = 'sample'  # with END"
    (line,) = logged(seen(before), found)
    folder = line.partition("preparing data=mine in ")[2]
    assert logged(seen(before), found) == [f"using prepared data in {folder}"]
    (line,) = logged(seen(after), found)
    assert line.startswith("preparing data=mine in ")
    assert folder not in line
    assert logged(seen(after), replace(found, prepared=named)) == [f"preparing data=mine in {named}"]
    assert logged(seen(before), replace(found, prepared=named)) == [
        f"using prepared data in {named}",
        f"{named} was prepared before the code of tokenizer=seen changed, and is used as it is: remove it to prepare "
        "it again",
    ]


# Prepared shards do not change from version to version


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "xxh3"),
    [
        (BYTE, (990001, 110000), ("1e9f0280e966b95e07e7b73d8e665909", "afb35a15a390724268765d002c88ec5d")),
        (
            CharTokenizerConfig(),
            (990000, 110000),
            ("acd87d64e20407df2c7f9bed865e2035", "6b611ccd3dd700c7ef8be29a7e7c57b2"),
        ),
        (
            BPETokenizerConfig(vocab_size=300),
            (621508, 69291),
            ("9a4a3fbbdec9bafd6a194d850aa2da14", "27a701c105d0db732fff355343b05147"),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, TokenizerConfig) else "",
)
def test_shards_are_the_same_in_every_version(
    tokenizer: TokenizerConfig, tokens: tuple[int, int], xxh3: tuple[str, str], tmp_path: Path
) -> None:
    data = TextConfig("sample", "sample", prepared=str(tmp_path / "out"))
    run.execute(run.begin(locate(data), tokenizer, tmp_path / "out"), World())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    expected = [
        {"file": f"{split}_000000_00.bin", "tokens": count, "documents": int(split == "train"), "xxh3": digest}
        for split, count, digest in zip(manifests.SPLITS, tokens, xxh3, strict=True)
    ]
    made = manifest["train"] + manifest["val"]
    assert [{name: entry[name] for name in expected[0]} for entry in made] == expected
    assert list(manifest)[:7] == ["name", "origin", "revision", "settings", "vocab_size", "eot", "tokenizer_sha256"]


# Bytes of the text


def lossy(path: Path) -> HFTokenizerConfig:
    """Write a tokenizer that lower-cases, drops accents and spaces, and knows three words."""
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "[SEP]": 2}, "[UNK]"))
    fast.normalizer = tokenizers.normalizers.BertNormalizer()
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.add_special_tokens(["[SEP]"])
    fast.save(str(path))
    return HFTokenizerConfig(path=str(path))


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe", "hf"])
def test_bytes_are_those_of_the_original_text_for_every_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    documents = [f"Der Käse, the CHEESE №{number}\n" * (1 + number % 3) for number in range(40)]
    held_out = documents[9::10]
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cfg = {"byte": BYTE, "char": CharTokenizerConfig(), "bpe": BPETokenizerConfig(vocab_size=300)}.get(
        tokenizer
    ) or lossy(tmp_path / "tokenizer.json")
    found = open_prepared(tmp_path / "out", made(tmp_path / "a.jsonl", tmp_path / "out", cfg), cfg)
    bytes_ = sum(len(text.encode()) for text in held_out)
    assert found.bytes_per_token == pytest.approx(bytes_ / len(found.val), rel=1e-12)
    if tokenizer == "hf":
        assert "CHEESE" not in found.tokenizer.decode(found.val[:])
        return
    folder = tmp_path / "elsewhere"  # tokens without a record of their text are decoded
    folder.mkdir()
    for name, tokens in (("train", found.train), ("val", found.val)):
        tokens[:].astype(np.uint16).tofile(folder / f"{name}.bin")
    (folder / "tokenizer.json").write_text(found.tokenizer.to_json())
    again = open_foreign(TextConfig("b", "shards", path=str(folder)), cfg, World())
    assert again.bytes_per_token == found.bytes_per_token
