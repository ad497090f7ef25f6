"""Sources in every format, work items that add up to the complete source, and one message for a file that is wrong."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from wordrun.common.errors import ConfigError, UserError
from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources import hub, locate
from wordrun.data.prepare.sources.base import WorkItem
from wordrun.data.prepare.sources.files import FileSource

TEXTS = [f"document {number}: " + "grün " * (number % 7) for number in range(60)]


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    """Write ``texts`` in the format that the name of ``path`` says."""
    lines = "".join(json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts))
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), key: texts})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    else:
        path.write_text(lines if path.suffix == ".jsonl" else "".join(texts), encoding="utf-8")
    return path


def read(path: Path | str, **options: Any) -> list[str]:
    """Return the texts of a source, as all its work items together have them, without rows that have none."""
    source = locate(TextConfig("mine", path=str(path), **options))
    return [each.text for item in source.items() for each in source.documents(item) if not each.fault]


# Formats


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_format_gives_the_same_documents(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / name, TEXTS)) == TEXTS
    assert read(write(tmp_path / name, TEXTS, key="content"), text_key="content") == TEXTS


def test_a_folder_and_a_glob_are_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.txt", ["second"])
    write(tmp_path / "a.jsonl", ["first"])
    write(tmp_path / "deep" / "c.parquet", ["third"])
    (tmp_path / "notes.rst").write_text("fourth")
    (tmp_path / "notes.log").write_text("no text of the corpus")
    assert read(tmp_path) == ["first", "second", "third", "fourth"]
    assert read(f"{tmp_path}/*.txt") == ["second"]
    assert read(f"{tmp_path}/**/*.parquet") == ["third"]
    assert read(tmp_path / "notes.log", format="text") == ["no text of the corpus"]


def test_halves_of_characters_and_empty_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n\n{"text": ""}\n{"text": "c"}\n')
    assert read(tmp_path / "a.jsonl") == ["a?b", "c"]


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="aé😀 \n", max_size=12), min_size=1, max_size=12),
    count=st.integers(1, 9),
    data=st.data(),
)
def test_work_items_of_a_file_add_up_to_it(
    lines: list[str], count: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "a"
    source = FileSource.locate(TextConfig(path=str(path)))
    for kind in ("text", "jsonl"):
        content = "".join(lines) if kind == "text" else "".join(json.dumps({"text": line}) + "\n" for line in lines)
        path.write_text("x" + content if kind == "text" else content, encoding="utf-8", newline="")
        size = path.stat().st_size
        cuts = [size * i // count for i in range(count + 1)]
        found = [
            document
            for i in range(count)
            for document in source.documents(WorkItem(i, kind, str(path), cuts[i], cuts[i + 1]))
        ]
        if kind == "jsonl":
            assert [document.text for document in found if not document.fault] == [line for line in lines if line]
        else:
            blank = len("".join(c for c in "x" + content if not c.isspace()))
            assert len("".join(d.text for d in found).replace(" ", "").replace("\n", "")) == blank
            assert sum(document.begins for document in found) == 1


def test_a_text_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    text = "é" * 3 * 2**20
    path = write(tmp_path / "a.txt", [text])
    cuts = [0, 2**21, 2**22 + 1, 3 * 2**21]
    source = FileSource.locate(TextConfig(path=str(path)))
    found = [
        document.text
        for i in range(3)
        for document in source.documents(WorkItem(i, "text", str(path), cuts[i], cuts[i + 1]))
    ]
    assert "".join(found) == text
    assert len(found) == 3


def test_large_files_are_divided_by_size_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["x" * 1000] * 3000)
    data = TextConfig(path=str(path), shard_mb=1)
    assert [item.number for item in locate(data).items()] == [0, 1, 2]
    assert len(read(path, shard_mb=1)) == 3000
    write(tmp_path / "a.parquet", [f"{i}" * 300 for i in range(9000)])
    data = TextConfig(path=str(tmp_path / "a.parquet"), shard_mb=1)
    assert len(locate(data).items()) > 1
    assert len(read(tmp_path / "a.parquet", shard_mb=1)) == 9000


# Hugging Face data sets, in the hub's formats on this machine


@pytest.mark.parametrize("form", ["files", "table", "splits"])
def test_a_local_hugging_face_data_set_is_read(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder, texts = tmp_path / "set", TEXTS
    if form == "files":
        folder.mkdir()
        for number in range(3):
            write(folder / f"train-{number:05d}-of-00003.parquet", TEXTS[20 * number : 20 * number + 20])
    else:  # so many rows that they are divided
        texts = [TEXTS[number % 60] for number in range(100_001)]
        table = datasets.Dataset.from_dict({"text": texts})
        (datasets.DatasetDict({"train": table}) if form == "splits" else table).save_to_disk(str(folder))
    source = locate(TextConfig("mine", "hf", dataset=str(folder)))
    items = source.items()
    assert len(items) == 3
    assert [document.text for item in items for document in source.documents(item)] == texts
    with pytest.raises(ConfigError, match=r"no column data\.text_key=content, only"):
        locate(TextConfig("mine", "hf", dataset=str(folder), text_key="content")).items()


def test_without_a_network_a_hub_data_set_comes_with_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.reachable.cache_clear()
    # At a port at which nobody listens, so that the test has no network wherever it runs.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    begin = time.monotonic()
    data = TextConfig("fineweb", "hf", dataset="HuggingFaceFW/fineweb", subset="sample-10BT")
    with pytest.raises(UserError) as caught:
        locate(data).items()
    wanted = (
        "data=fineweb",
        "HuggingFaceFW/fineweb",
        "login node",
        "wordrun prepare data=fineweb",
        "hf download",
        "data.workers=4",
        "launch --submit -N 1 --walltime 1:00:00 ",
    )
    assert [text for text in wanted if text not in str(caught.value)] == []
    assert time.monotonic() - begin < 20  # the hub's client alone would try for half a minute


# What is wrong


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n \n", "is empty"),
        ("a.txt", b"\x7fELF\x02\x01\0\0\xff\xfe", "is a binary file"),
        ("a.txt", b"abc\0def", "a zero at byte 3"),
        ("a.txt", "Grüße".encode("latin1"), "is not UTF-8 text (byte 2)"),
        ("a.txt", "Grüße".encode("utf-16"), "is text in UTF-16"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl.gz", b"no gzip", "is damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 999, mtime=0)[:-20], "is damaged"),
        ("a.jsonl.zst", b"no zst, but long enough", "is damaged"),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(b'{"text": "abc"}\n' * 999)[:-9], "is damaged"),
        ("a.parquet", b"PAR1 and no more", "is a damaged .parquet"),
        ("a.txt", None, "No such file"),
    ],
)
def test_a_bad_file_is_one_clear_message(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n{"text": ', "(line 2) is not valid JSON"),
        (b'{"text": "a"}\n{"content": "b"}\n', "(line 2) has no text in the field data.text_key=text"),
        (b'{"content": "b", "id": 1}\n', "only the fields content, id"),
        (b'{"text": "a"}\n["a"]\n', "only a list"),
        (b'{"text": 3}\n', "has no text in the field"),
        (b'{"text": "Gr\xfc\xdfe"}\n', "(line 1) is not UTF-8"),
    ],
)
def test_a_bad_row_is_one_clear_message(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    source = locate(TextConfig("mine", path=str(path)))
    found = [document.fault for item in source.items() for document in source.documents(item) if document.fault]
    assert len(found) == 1
    _, message = found[0]
    assert says in message
    assert str(path) in message
    assert len(message.splitlines()) == 1


def test_a_parquet_without_the_column_names_those_that_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(ConfigError, match=r"no text column data\.text_key=id, only id \(int64\), text \(string\)"):
        read(path, text_key="id")


def test_a_damaged_parquet_is_one_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [text * 50 for text in TEXTS])
    content = bytearray(path.read_bytes())
    content[40:400] = b"\xff" * 360
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.parquet is a damaged \.parquet"):
        read(path)


@pytest.mark.parametrize(("path", "says"), [("", "has no .txt, .md, .jsonl"), ("*.txt", "matches no file")])
def test_no_files_are_one_message(path: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        FileSource.locate(TextConfig(path=f"{tmp_path}/{path}")).files()
