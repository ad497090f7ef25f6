"""Tokens on disk: formats that others write, one index space, and what is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from wordrun.common.errors import ConfigError
from wordrun.data import manifest as manifests, shards
from wordrun.data.foreign import open_foreign
from wordrun.data.manifest import Entry, Manifest
from wordrun.data.options import TextConfig
from wordrun.data.prepare import writer
from wordrun.data.prepared import open_prepared
from wordrun.data.shards import Shard, Tokens, examine
from wordrun.data.tokenizers import from_json
from wordrun.data.tokenizers.char import ByteTokenizer
from wordrun.data.tokenizers.options import (
    ByteTokenizerConfig,
    CharTokenizerConfig,
    GPT2TokenizerConfig,
    TokenizerConfig,
)
from wordrun.dist import World


def llm_c(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """Write a shard byte by byte as llm.c's documentation has it, without our own writer."""
    header = b"".join(n.to_bytes(4, "little", signed=True) for n in [magic, version, len(tokens), *[0] * 253])
    path.write_bytes(header + np.array(tokens, dtype=dtype).tobytes())
    return path


# Formats


def test_published_shards_are_read(tmp_path: Path) -> None:
    shard = examine(llm_c(tmp_path / "fineweb_train_000001.bin", [50256, 1, 65535]))
    assert (shard.count, shard.dtype, Tokens([shard])[:].tolist()) == (3, "<u2", [50256, 1, 65535])
    large = examine(llm_c(tmp_path / "train.bin", [128255, 7], 20240801, 7, "<u4"))  # llm.c's for Llama 3
    assert (large.dtype, Tokens([large])[:].tolist()) == ("<u4", [128255, 7])


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_what_is_written_is_llm_cs_format(vocabulary: int, dtype: str, tmp_path: Path) -> None:
    tokens = [vocabulary - 1, 0, 3]
    assert shards.dtype_for(vocabulary) == dtype
    writer.write_shard(tmp_path / "ours.bin", [np.array(tokens)], dtype)
    kind = {"<u2": (20240520, 1), "<u4": (20240801, 7)}[dtype]
    assert (tmp_path / "ours.bin").read_bytes() == llm_c(tmp_path / "theirs", tokens, *kind, dtype).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ours.bin", "ours.docs", "theirs"]


def test_nanogpts_files_are_read_as_they_are(tmp_path: Path) -> None:
    np.array([4, 5, 50256], dtype=np.uint16).tofile(tmp_path / "train.bin")
    assert Tokens([examine(tmp_path / "train.bin")])[:].tolist() == [4, 5, 50256]


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", ">i4"])
def test_npy_shards_are_read_as_they_are(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "fineweb_train_000001.npy", np.array([9, 0, 30_000], dtype=dtype))
    assert Tokens([examine(tmp_path / "fineweb_train_000001.npy")])[:].tolist() == [9, 0, 30_000]


# One index space


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), data=st.data())
def test_shards_are_one_array(sizes: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    whole = np.arange(sum(sizes)) * 7 % 60_000
    cuts = np.cumsum([0, *sizes])
    paths = [llm_c(folder / f"{i}.bin", whole[a:b].tolist()) for i, (a, b) in enumerate(pairwise(cuts))]
    tokens = Tokens([examine(path) for path in paths])
    with mock.patch.object(resource, "getrlimit", return_value=(2, 2)):
        assert len(tokens) == len(whole)
        for _ in range(5):
            a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
            assert tokens[a:b].tolist() == whole[a:b].tolist()
        assert tokens[:].tolist() == whole.tolist()
        width = data.draw(st.integers(0, len(whole)))
        starts = data.draw(st.lists(st.integers(0, len(whole) - width), max_size=5)) if width else []
        assert tokens.rows(np.array(starts, dtype=np.int64), width).tolist() == [
            whole[s : s + width].tolist() for s in starts
        ]
    at = data.draw(st.integers(0, len(whole)))
    before, after = tokens.split(at)
    assert (before[:].tolist(), after[:].tolist()) == (whole[:at].tolist(), whole[at:].tolist())


def test_shards_of_different_types_are_one_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3]))
    llm_c(tmp_path / "b.bin", [4, 5])
    tokens = Tokens([examine(tmp_path / "a.npy"), examine(tmp_path / "b.bin")])
    assert tokens.rows(np.array([0, 1, 3]), 2).tolist() == [[1, 2], [2, 3], [4, 5]]


def test_no_more_files_are_open_than_the_process_may_have(tmp_path: Path) -> None:
    """500 shards with a limit of 100 open files, read in an order that never stays in one."""
    for number in range(500):
        llm_c(tmp_path / f"{number}.bin", [number, number + 1, number + 2])
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
import numpy as np
from wordrun.data.shards import Tokens, examine
# As of a mix of data: two sets, each of them with too many files.
sets = [Tokens([examine(f"{tmp_path}/{{n}}.bin") for n in range(500)]) for _ in range(2)]
starts = np.arange(0, 1494, 3)[::-1] * 7 % 1494 // 3 * 3
for tokens in sets * 2:
    assert (tokens.rows(starts, 2)[:, 1] == starts // 3 + 1).all()
    assert (tokens.rows(starts + 2, 5)[:, 4] == starts // 3 + 2).all()  # over the ends of shards
    assert all(tokens[s : s + 1][0] == s // 3 for s in starts.tolist())
print("well")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("well\n", "")


def test_the_limit_of_open_files_is_raised_for_those_that_are_there(tmp_path: Path) -> None:
    for number in range(500):
        llm_c(tmp_path / f"{number}.bin", [number, number + 1, number + 2])
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
import numpy as np
from wordrun.data.shards import Tokens, examine
tokens = Tokens([examine(f"{tmp_path}/{{n}}.bin") for n in range(500)])
tokens.rows(np.arange(0, 1500, 3), 2)
print(len(tokens._files), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("500 1000\n", "")


def test_the_resident_memory_stays_small_however_much_is_read(tmp_path: Path) -> None:
    """256 MB of shards read twice, as rows and as slices, in a process that has no torch."""
    for number in range(4):
        path = llm_c(tmp_path / f"{number}.bin", [])
        with open(path, "r+b") as file:
            file.seek(8)
            file.write((2**25).to_bytes(4, "little"))
            file.truncate(1024 + 2**26)
    script = f"""
import numpy as np
from wordrun.data.shards import Tokens, examine
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
tokens = Tokens([examine(f"{tmp_path}/{{n}}.bin") for n in range(4)])
starts = np.random.default_rng(1).integers(0, len(tokens) - 1025, 20_000)
before, most = resident(), 0
for part in np.split(starts, 100):
    tokens.rows(part, 1025)
    for start in part.tolist():
        tokens[start : start + 1025].sum()
    most = max(most, resident())
print(most - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert float(done.stdout) < 30


# What is refused


def refusal(path: Path, expected: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        examine(path, expected)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("left", [1030, 1023, 8])
def test_a_shard_that_was_cut_short_is_refused(left: int, tmp_path: Path) -> None:
    path = llm_c(tmp_path / "train_0.bin", list(range(100)))
    os.truncate(path, left)
    assert "truncated" in refusal(path)


def test_a_shard_with_too_much_is_refused(tmp_path: Path) -> None:
    path = llm_c(tmp_path / "train_0.bin", [1, 2])
    path.write_bytes(path.read_bytes() + b"xx")
    assert "1,030 bytes, but its header says 2 tokens, which take 1,028" in refusal(path)


def test_a_shard_that_the_manifest_does_not_know_is_refused(tmp_path: Path) -> None:
    assert "2 tokens, but the manifest says 3" in refusal(llm_c(tmp_path / "a.bin", [1, 2]), expected=3)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train_1.bin", b"no shard at all, but a text", "is not a shard"),
        ("train_1.bin", b"", "is not a shard"),
        ("train.bin", b"odd", "nanoGPT's tokens take 2 bytes each"),
        ("train.npy", b"no numpy", "is not a valid .npy file"),
    ],
)
def test_what_is_no_shard_is_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert says in refusal(path)


@pytest.mark.parametrize("array", [np.zeros((2, 2), int), np.zeros(3)])
def test_arrays_that_are_no_tokens_are_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    assert "tokens should be integers in one dimension" in refusal(tmp_path / "a.npy")


def test_a_shard_that_is_cut_short_during_a_run_is_refused(tmp_path: Path) -> None:
    paths = [llm_c(tmp_path / f"{i}.bin", list(range(3000))) for i in range(2)]
    tokens = Tokens([examine(path) for path in paths])
    tokens.rows(np.array([0]), 10)
    for path in paths:
        os.truncate(path, 2000)
    with pytest.raises(ConfigError, match=r"0\.bin has been truncated"):
        tokens.rows(np.array([2900]), 10)  # open already
    with pytest.raises(ConfigError, match=r"1\.bin has been truncated"):
        tokens[5000:5010]  # opened now: touching what is not there would be a SIGBUS


# Folders of others


def foreign(folder: Path, **options: object) -> tuple[list[int], list[int]]:
    data = TextConfig("theirs", "shards", path=str(folder), **options)  # type: ignore[arg-type]
    _, train, val, _ = open_foreign(data, ByteTokenizerConfig(), World())
    return train[:].tolist(), val[:].tolist()


def test_splits_go_by_the_files_names(tmp_path: Path) -> None:
    llm_c(tmp_path / "fineweb_train_000002.bin", [3, 4])
    llm_c(tmp_path / "fineweb_train_000001.bin", [1, 2])
    llm_c(tmp_path / "fineweb_val_000000.bin", [5])
    (tmp_path / "readme.md").write_text("shards")
    assert foreign(tmp_path) == ([1, 2, 3, 4], [5])


def test_without_a_split_for_validation_the_end_is(tmp_path: Path) -> None:
    for number in range(2):  # as the Practical MPI course writes them
        np.save(tmp_path / f"fineweb_train_{number:06d}.npy", np.arange(10) + 10 * number)
    assert foreign(tmp_path, val_fraction=0.25) == (list(range(15)), list(range(15, 20)))


@pytest.mark.parametrize("cfg", [CharTokenizerConfig(), GPT2TokenizerConfig(), ByteTokenizerConfig()])
@pytest.mark.parametrize("characters", ["".join(sorted({*"hello there"})), "thelo r"])
def test_nanogpts_characters_are_read_from_meta_pkl(characters: str, cfg: TokenizerConfig, tmp_path: Path) -> None:
    """Whatever tokenizer is the default, and in the order that the file has."""
    for name in ("train", "val"):
        np.array([characters.index(c) for c in "hello there"], dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    itos = dict(enumerate(characters))
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": {c: n for n, c in itos.items()}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    words, train, *_ = open_foreign(TextConfig("theirs", "shards", path=str(tmp_path)), cfg, World())
    assert words.decode(train[:]) == "hello there"
    assert words.vocab_size == len(itos)
    assert from_json(words.to_json()).decode(train[:]) == "hello there"


@pytest.mark.parametrize(
    "meta",
    [b"no pickle", *map(pickle.dumps, ({"vocab_size": 3}, {"itos": {0: "word"}}, {"itos": "aa"}, {"itos": Path("a")}))],
)
def test_a_meta_pkl_without_characters_is_refused(meta: bytes, tmp_path: Path) -> None:
    llm_c(tmp_path / "train_0.bin", [1])
    (tmp_path / "meta.pkl").write_bytes(meta)
    with pytest.raises(ConfigError, match=r"meta\.pkl is not the vocabulary of characters that nanoGPT saves"):
        foreign(tmp_path)


def test_nanogpts_text_is_found_beside_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("hello there")
    llm_c(tmp_path / "train_0.bin", [1, 2, 3])
    data = TextConfig("theirs", "shards", path=str(tmp_path))
    words, train, *_ = open_foreign(data, CharTokenizerConfig(), World())
    assert words.decode(train[:]) == "eh"  # of " ehlort"; the last token is for validation
    (tmp_path / "input.txt").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer=char is built from text.*meta\.pkl or the text as input"):
        open_foreign(data, CharTokenizerConfig(), World())


@pytest.mark.parametrize("vocabulary", [2, 65, 50_257, 128_000])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_the_width_of_nanogpts_tokens_is_recognized(dtype: str, vocabulary: int, tmp_path: Path) -> None:
    tokens = np.random.default_rng(vocabulary).integers(0, min(vocabulary, np.iinfo(dtype).max), 1000)
    for name in ("train.bin", "VAL.BIN"):
        tokens.astype(dtype).tofile(tmp_path / name)
        assert shards.Tokens([shards.examine(tmp_path / name)])[:].tolist() == tokens.tolist()


@pytest.mark.parametrize("content", [b"A river, a bridge, and nobody on it.\n" * 50, bytes(range(65)) * 40])
def test_bytes_are_no_tokens_of_nanogpt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(content[: len(content) // 2 * 2])
    assert "holds text or 8-bit tokens" in refusal(tmp_path / "train.bin")


def test_megatrons_tokens_have_the_type_of_their_index(tmp_path: Path) -> None:
    np.array([70_000, 1, 2], "<i4").tofile(tmp_path / "pile_train_text_document.bin")
    index = tmp_path / "pile_train_text_document.idx"
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 1))
    assert shards.Tokens([shards.examine(index.with_suffix(".bin"))])[:].tolist() == [70_000, 1, 2]
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 6, 1, 1))  # float64
    assert "is not Megatron-LM's index of integer tokens" in refusal(index.with_suffix(".bin"))


def test_what_is_beside_shards_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name in ("interval_Train_0.bin", "validation.bin", "test_0.bin", "more.bin"):
        llm_c(tmp_path / name, [1, 2])
    for name in ("a.tar", "data.arrow", "shard.00000.mds", "val.npy.gz", "prepare.py"):
        (tmp_path / name).write_bytes(b"x")
    assert foreign(tmp_path) == ([1, 2], [1, 2])
    assert caplog.messages[-1].startswith(
        "data=theirs: read 2 files (2 of uint16 tokens), left out 6 files that cannot be used: a.tar (an archive: "
        "unpack it), data.arrow (an Arrow table: data=hf data.dataset=FOLDER reads it), more.bin (neither train"
    )
    (tmp_path / "interval_Train_0.bin").unlink()
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(ConfigError, match=r"train\.bin is a named pipe"):
        foreign(tmp_path)


def test_a_tokenizer_that_cannot_have_made_the_shards_is_refused(tmp_path: Path) -> None:
    llm_c(tmp_path / "train_0.bin", [1, 2, 257])
    llm_c(tmp_path / "val_0.bin", [1])
    with pytest.raises(ConfigError, match=r"tokenizer=byte has 257 tokens, but the train shards .* have token 257"):
        foreign(tmp_path)


@pytest.mark.parametrize(("names", "says"), [([], "found: none"), (["a.bin"], "found: a.bin")])
def test_a_folder_without_training_shards_is_refused(names: list[str], says: str, tmp_path: Path) -> None:
    for name in names:
        llm_c(tmp_path / name, [1])
    with pytest.raises(ConfigError, match=says):
        foreign(tmp_path)


# Manifests


def made(folder: Path, count: int = 2) -> Manifest:
    """Write shards of bytes with their manifest."""
    words = ByteTokenizer()
    writer.write_text(folder / "tokenizer.json", words.to_json())
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    entries = []
    for number in range(count):
        name = f"train_{number:06d}_00.bin"
        entries.append(writer.write_shard(folder / name, [np.array([256, number % 256, 7])], "<u2", [0]))
    settings = {
        "kind": "file",
        "val_fraction": 0.1,
        "tokenizer": {"name": "byte"},
        "text_key": "text",
        "split": "train",
    }
    manifest = Manifest("bytes", "here", None, settings, 257, 256, digest, entries, [entries[0]])
    writer.save(folder, manifest)
    return manifest


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = made(tmp_path)
    assert manifests.load(tmp_path) == manifest
    assert (manifest.tokens("train"), manifest.documents("train"), manifest.tokens("val")) == (6, 2, 3)
    assert manifests.verify(tmp_path, manifest) == []
    assert manifests.document_starts(tmp_path, manifest.train[1]).tolist() == [0]


def test_a_damaged_shard_is_found_by_its_checksum(tmp_path: Path) -> None:
    manifest = made(tmp_path)
    path = tmp_path / manifest.train[1].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (problem,) = manifests.verify(tmp_path, manifest)
    assert f"{path} is damaged" in problem


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("manifest.json", None, "did not finish"),
        ("manifest.json", b"{", "cannot be read"),
        ("manifest.json", b"{}", "cannot be read"),
        ("tokenizer.json", b'{"kind": "char", "characters": "ab"}', "is not the tokenizer of the shards beside it"),
        ("tokenizer.json", None, "cannot be read"),
        ("train_000001_00.bin", b"", "is not a shard"),
        ("train_000001_00.bin", None, "cannot be read"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_prepared(tmp_path, TextConfig(path="x"), ByteTokenizerConfig())
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_a_folder_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_prepared(tmp_path, TextConfig(val_fraction=0.2), CharTokenizerConfig())
    first, second = str(caught.value).splitlines()
    assert "was prepared with data.val_fraction=0.1, not 0.2" in first
    assert 'was prepared with tokenizer="byte", not "char"' in second


def test_ranks_that_do_not_examine_open_ten_thousand_shards_within_a_second(tmp_path: Path) -> None:
    """Ranks other than the first of a node open no file at the start: the files need not even be there."""
    manifest = made(tmp_path)
    entries = [Entry(f"train_{n:06d}_00.bin", 10**8, 1, "0" * 64) for n in range(10_000)]
    whole = Manifest(**{**manifest.__dict__, "train": entries})
    writer.save(tmp_path, whole)
    tokens = manifests.split(tmp_path, manifests.load(tmp_path), "train", examine=False)
    assert len(tokens) == 10**12
    assert json.loads((tmp_path / "manifest.json").read_text())["train"][-1]["file"] == "train_009999_00.bin"
    with pytest.raises(ConfigError, match=r"train_009999_00\.bin cannot be read"):
        tokens.rows(np.array([10**12 - 5]), 5)


def test_an_empty_shard_is_left_out() -> None:
    assert len(Tokens([Shard("nowhere", "<u2", 0, 0)])) == 0
