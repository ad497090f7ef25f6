"""What a folder or a file holds is read, or named with the reason and the remedy."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from wordrun.common.errors import ConfigError
from wordrun.data import contents, manifest as manifests
from wordrun.data.options import TextConfig
from wordrun.data.prepare import run
from wordrun.data.prepare.sources import files, locate
from wordrun.data.tokenizers.options import ByteTokenizerConfig, HFTokenizerConfig
from wordrun.data.tokenizers.subword import HFTokenizer
from wordrun.dist import World

ROWS = [{"text": f'line number {n}, "quoted"\nand more', "id": n} for n in range(40)]
TEXTS = [row["text"] for row in ROWS]
LINES = "\n".join(map(json.dumps, ROWS)).encode()
PLAIN = b"A river, a bridge, and nobody on it.\n" * 50


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts(path: str = "in", **options: Any) -> list[str]:
    """Return the texts of all documents at ``path``."""
    source = locate(TextConfig("text", path=path, **options))
    return [document.text for item in source.items() for document in source.documents(item)]


def left_out(path: str = "in") -> dict[str, str]:
    """Return the reason for each file that is left out, by its name."""
    found = locate(TextConfig("text", path=path)).left_out()
    return {Path(each.partition(" (")[0]).name: each.partition(" (")[2][:-1] for each in found}


def as_csv(separator: str) -> bytes:
    quoted = ('"' + text.replace('"', '""') + '"' for text in TEXTS)
    return "\r\n".join([f"text{separator}id", *(f"{text}{separator}1" for text in quoted)]).encode()


def as_parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=7)
    return bytes(sink.getvalue())


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ndjson", LINES),
        ("a.JSONL", BOM + LINES.replace(b"\n", b"\r\n")),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", BOM + json.dumps(ROWS, indent=2).encode()),
        ("a.json", LINES),  # JSON Lines under another name
        ("a.json", b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS)),
        ("a.jsonl", json.dumps(ROWS).encode()),  # an array under another name
        ("a.txt", LINES),
        ("a", LINES),
        ("a.csv", BOM + as_csv(",")),
        ("a.CSV", as_csv(";")),
        ("a.tsv", as_csv("\t")),
        ("a.PARQUET", as_parquet()),
        ("a.txt", as_parquet()),
        ("a.JSONL.GZ", gzip.compress(LINES)),
        ("a.ndjson.zstd", bytes(pyarrow.compress(LINES, "zstd", asbytes=True))),
        ("a.csv.bz2", bz2.compress(as_csv(","))),
        ("a.json.xz", lzma.compress(json.dumps(ROWS).encode())),
        ("a.jsonl", gzip.compress(LINES)),  # compressed under another name
    ],
)
def test_rows_are_read_by_their_field_whatever_the_file_is_called(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    assert texts(name) == TEXTS


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt", bytes),
        ("B.TXT", bytes),
        ("c.Txt.GZ", gzip.compress),
        ("d.txt", gzip.compress),
        ("e", bytes),
        ("f.md.bz2", bz2.compress),
        ("g.rst", bytes),
    ],
)
def test_plain_text_is_read_whatever_the_file_is_called(name: str, pack: Callable[[bytes], bytes]) -> None:
    Path(name).write_bytes(pack(BOM + PLAIN.replace(b"\n", b"\r\n") + BOM + PLAIN))  # two files joined
    assert "".join(texts(name)) == 2 * PLAIN.decode()


def test_a_compressed_text_is_read_in_parts_that_never_divide_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 3)
    text = "Grüße, 世界 " * 150_000
    Path("a.txt.gz").write_bytes(gzip.compress(text.encode()))
    parts = texts("a.txt.gz", shard_mb=1)
    assert "".join(parts) == text
    assert len(parts) == 3


def test_a_folder_is_read_or_named() -> None:
    folder, elsewhere = Path("in"), Path("elsewhere/deep")
    (folder / "__MACOSX").mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    for name in ("a.txt", "B.TXT", ".hidden.txt", "__MACOSX/b.txt", "page.html", "x.py", "LICENSE", "t.png", "t.bin"):
        (folder / name).write_bytes(PLAIN)
    (elsewhere / "x.txt").write_bytes(PLAIN.upper())
    (folder / "more").symlink_to("../elsewhere")
    (folder / "loop").symlink_to(".")
    (folder / "again.txt").symlink_to("a.txt")
    (folder / "lost.txt").symlink_to("nowhere")
    (folder / "u16.txt").write_bytes("text".encode("utf-16"))
    (folder / "twice.txt.gz").write_bytes(gzip.compress(gzip.compress(PLAIN)))
    with tarfile.open(folder / "lie.txt", "w") as tar:
        tar.add(folder / "a.txt")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("in/socket.txt")
    source = locate(TextConfig("text", path="in"))
    assert sorted(text[:7] for text in texts()) == ["A RIVER", "A river", "A river"]
    assert source.files_read() == "3 files (3 text)"
    assert left_out() == {
        "LICENSE": "without a suffix",
        "again.txt": "a link to a file that is read already",
        "lie.txt": "an archive: unpack it",
        "loop": "a link to a folder that is read already",
        "lost.txt": "cannot be read: No such file or directory",
        "page.html": "of unknown type",
        "pipe.txt": "a named pipe, which can be read only once: save its content as a file",
        "socket.txt": "a socket, not a file",
        "t.bin": "tokens: data=shards data.path=FOLDER reads them",
        "t.png": "an image: see data=imagefolder",
        "twice.txt.gz": "compressed twice: decompress it once",
        "u16.txt": "text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
        "x.py": "of unknown type",
    }
    everything = locate(TextConfig("text", path="in", format="text"))
    assert everything.files_read() == "6 files (6 text)"  # with the page, the program and the license


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.html", PLAIN, r"a\.html is of unknown type: set data\.format=text to read it as text, or"),
        ("data.arrow", b"ARROW1\0\0", r"is an Arrow table: data=hf data\.dataset=FOLDER reads it"),
        ("a.idx", b"MMIDIDX\0\0", "is an index of Megatron-LM's tokens: data=shards"),
        ("shard.00000.mds", b"\1\0", "MosaicML's MDS format, which is not supported: convert it"),
        ("a.csv", b"label;body\n1;x\n", r"\(line 2\) has no text in the field data\.text_key=text, only the"),
        ("a.json", b'{"data": [{"text": "x"}]}', r"no text in the field data\.text_key=text, only the fields data"),
        ("a.json", b'[{"text": "x"}, {"text" 1}]', r"a\.json \(row 2\) is not valid JSON: Expecting ':'"),
        ("a.json", b"[" * 100_000, r"a\.json \(row 1\) is JSON that is nested too deeply"),
        ("a.json", b'[{"text": "caf\xe9"}]', r"a\.json is not UTF-8"),
        ("pipe", None, "is a named pipe"),
        ("/dev/zero", None, "/dev/zero is a device, not a file"),
    ],
)
def test_a_single_file_that_cannot_be_read_is_refused_with_the_remedy(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    elif not Path(name).exists():
        os.mkfifo(name)
    with pytest.raises(ConfigError, match=says):
        prepared(name)


def prepared(path: str, **options: Any) -> manifests.Manifest:
    """Prepare the text at ``path`` and return the manifest."""
    data = TextConfig("text", path=path, prepared="out", **options)
    run.execute(run.begin(locate(data), ByteTokenizerConfig(), Path("out")), World())
    return manifests.load(Path("out"))


# Rows without text


BAD = [b'{"text": null}', b'{"text": ""}', b"{", b'{"text": 3}', b'["text"]', b'{"text": "caf\xe9"}', b"[" * 100_000]


def test_bad_lines_are_left_out_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    Path("a.jsonl").write_bytes(b"\n".join([LINES, *BAD, *BAD]))
    with pytest.raises(ConfigError, match=r"data\.strict=true, but .*a\.jsonl \(line 41\) has null as text"):
        prepared("a.jsonl", strict=True)
    found = prepared("a.jsonl")
    assert sum(found.documents(split) for split in manifests.SPLITS) == len(ROWS)
    assert {reason: count for reason, (count, _) in found.faults.items()} == {
        "null": 2,
        "empty": 2,
        "not JSON": 2,
        "without text": 2,
        "without fields": 2,
        "not UTF-8": 2,
        "nested too deeply": 2,
    }
    assert found.faults["not JSON"][1].startswith(f"{Path.cwd()}/a.jsonl (line 43) is not valid JSON: Expecting")
    with pytest.raises(ConfigError, match=r"data\.strict=true, but rows have no text: 14 rows \(2 null: "):
        manifests.check_left_out(TextConfig("text", strict=True), [], faults=found.faults)
    manifests.check_left_out(TextConfig("text"), [], found.files_read, found.faults)
    assert "data=text: read 1 file (1 jsonl), left out 14 rows (2 null: " in caplog.messages[-1]


def documents_of(manifest: manifests.Manifest) -> tuple[int, int]:
    return manifest.documents("train"), manifest.documents("val")


@pytest.mark.parametrize(
    ("files", "documents"),
    [
        ({"train.jsonl": 5, "valid.jsonl": 2, "test.jsonl": 3}, (5, 2)),
        ({"x_TRAIN-00.JSONL": 5, "x_train-01.jsonl": 4, "dev.json": 2}, (9, 2)),
        ({"train.csv": 5, "test.csv": 3}, (5, 3)),
        ({"train/val_of_a.jsonl": 5, "train/b.jsonl": 4, "de/validation/a.jsonl": 2}, (9, 2)),
        ({"train.jsonl": 5, "more.jsonl": 4, "val.jsonl": 1}, (9, 1)),
        ({"a.jsonl": 25, "test.jsonl": 15}, (37, 3)),  # no split for training is named
        ({"train.jsonl": 25, "b.jsonl": 15}, (37, 3)),
    ],
)
def test_files_whose_names_have_splits_are_not_mixed(files: dict[str, int], documents: tuple[int, int]) -> None:
    for name, count in files.items():
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        is_csv = name.endswith("csv")
        lines = [f"{name} {n}" if is_csv else json.dumps({"text": f"{name} {n}"}) for n in range(count)]
        Path("in", name).write_text("\n".join(["text"] * is_csv + lines))
    found = prepared("in")
    assert documents_of(found) == documents
    assert ("divided by their names" in found.files_read) == (documents != (37, 3))


def test_named_splits_are_listed_also_for_plain_text_and_take_no_fraction() -> None:
    Path("in").mkdir()
    for name, text in {"train.txt": "a" * 900, "valid.txt": "b" * 90, "test.txt": "c" * 80}.items():
        Path("in", name).write_text(text)
    found = prepared("in")
    assert (found.tokens("train"), found.tokens("val")) == (901, 91)  # with an end-of-text token for each file
    assert found.files_read == (
        "2 files (2 text), divided by their names: for training 1 (train.txt), for validation 1 (valid.txt), and not "
        "the test split 1 (test.txt)"
    )
    with pytest.raises(
        ConfigError, match=r"data\.val_fraction=0\.2 has no effect, because .*\(test\.txt, valid\.txt\)"
    ):
        locate(TextConfig("text", path="in", val_fraction=0.2)).items()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_rows_without_text_are_counted_alike_in_all_formats(name: str) -> None:
    rows = [*ROWS, {"text": None, "id": 0}, {"text": "", "id": 1}, {"text": "", "id": 2}]
    if name == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    elif name == "a.csv":
        Path(name).write_bytes(as_csv(",") + b'\r\n,0\r\n"",1\r\n,2\r\none,two,three\r\n')
    else:
        Path(name).write_text("\n".join(map(json.dumps, rows)))
    counts = {reason: count for reason, (count, _) in prepared(name).faults.items()}
    assert counts == {"empty": 3, "with other columns": 1} if name == "a.csv" else {"null": 1, "empty": 2}


def test_a_line_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW", 2000)
    Path("a.jsonl").write_bytes(LINES + b'\n{"text": "' + b"x" * 9000 + b'"}\n' + LINES)
    found = prepared("a.jsonl")
    assert sum(found.documents(split) for split in manifests.SPLITS) == 2 * len(ROWS)
    assert found.faults["too long"][0] == 1


# Files that decompress to more than any memory


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.csv.zst", "a.json.xz"])
def test_what_decompresses_without_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SMALL", 2**21)
    content = LINES + b" " * 2**23
    packed = {"gz": gzip.compress, "xz": lzma.compress}.get(name[-2:])
    Path(name).write_bytes(packed(content) if packed else bytes(pyarrow.compress(content, "zstd", asbytes=True)))
    with pytest.raises(
        ConfigError, match=rf"{name} has [\d,]+ bytes and decompresses to [\d,]+ times as many .*if that"
    ):
        prepared(name)


def test_a_named_pipe_in_place_of_a_single_file_is_refused() -> None:
    os.mkfifo("pipe")
    why = "pipe cannot be read: a named pipe, which can be read only once: save its content as a file"
    with pytest.raises(ConfigError, match=why):
        HFTokenizer.build(HFTokenizerConfig(path="pipe"))
    with pytest.raises(ConfigError, match=why):
        locate(TextConfig("shakespeare", kind="download", path="pipe", url="https://example.org/a", sha256="0"))


def test_a_folder_that_datasets_reads_is_read_or_named(tmp_path: Path) -> None:
    """``datasets`` takes the most frequent type of file, and drops the others without a word."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "train.csv", "notes.xyz", "README.md", ".git/head"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "one two"}\n' if name.endswith("jsonl") else "text\none\n")
    source = locate(TextConfig("mine", "hf", dataset=str(folder)))
    assert [document.text for item in source.items() for document in source.documents(item)] == ["one two"] * 2
    assert source.files_read() == "2 files (2 jsonl) of the split train, and not the files of the splits test (1)"
    reason = "(datasets reads the json files of this folder)"
    assert source.left_out() == [f"{folder}/notes.xyz {reason}", f"{folder}/train.csv {reason}"]
