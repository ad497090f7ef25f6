"""Texts in ASCII that go through small buffers become the same shards as in the general way."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wordrun.config import DataConfig
from wordrun.data import piecework, plain, shards
from wordrun.data.documents import Piece
from wordrun.data.manifest import SPLITS
from wordrun.data.tokenizers import CharTokenizer
from wordrun.errors import ConfigError

ASCII = st.text(st.characters(min_codepoint=1, max_codepoint=126), min_size=1, max_size=90)
LINES = st.text(st.sampled_from("ab \n\t.\u00e9"), min_size=1, max_size=90)


def prepared(folder: Path, text: bytes, vocabulary: str, number: int) -> tuple[dict[str, str], bytes]:
    """Return the records of every piece of ``text`` and the bytes of all its files, prepared in ``folder``."""
    folder.mkdir()
    (folder / "work").mkdir()
    source = folder / "text.txt"
    source.write_bytes(text)
    (folder / "tokenizer.json").write_text(CharTokenizer(vocabulary).to_json())
    data = DataConfig("text", path=str(source), val_fraction=0.3, shard_mb=1)
    records = {}
    for i in range(number):
        start, stop = len(text) * i // number, len(text) * (i + 1) // number
        piece = Piece(i, "text", str(source), start, stop, stop - start)  # cut anywhere
        for task in ("characters", "shards"):
            try:
                piecework.run(task, piece, data, folder, lambda *counts: None)
                records[f"{task} {i}"] = piecework.record_of(folder, task, i).read_text()
            except ConfigError as error:
                records[f"{task} {i}"] = str(error).replace(str(folder), "")
    named = [entry["file"] for entry in _entries(records)]
    files = [file for name in sorted(named) for file in (folder / name, (folder / name).with_suffix(".docs"))]
    return records, b"".join(path.name.encode() + path.read_bytes() for path in files)


def _entries(records: dict[str, str]) -> list[dict[str, str]]:
    found = [json.loads(text) for name, text in records.items() if name.startswith("shards") and text.startswith("{")]
    return [entry for record in found for split in SPLITS for entry in record[split]]


@settings(max_examples=80, deadline=None)
@example(text="\x1f", number=1, lacks=False)  # blank as a str, but not as bytes
@given(text=ASCII | LINES, number=st.integers(1, 3), lacks=st.booleans())
def test_the_same_as_in_the_general_way(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: int, lacks: bool
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    vocabulary = "".join(sorted(set(text)))[int(lacks) :]
    content = text.encode()
    with mock.patch.object(plain, "BUFFER", 8):
        ours = prepared(folder / "ours", content, vocabulary, number)
    with (
        mock.patch.object(plain, "write", return_value=None),
        mock.patch.object(plain, "characters", return_value=None),
    ):
        general = prepared(folder / "general", content, vocabulary, number)
    assert ours == general


def test_a_long_text_goes_through_the_buffers(tmp_path: Path) -> None:
    text = ("The quick brown fox.\n" * 10_000).encode()  # three buffers and a bit
    records, _ = prepared(tmp_path / "one", text, "".join(sorted(set(text.decode()))), 1)
    found = json.loads(records["shards 0"])
    assert [sum(entry["tokens"] for entry in found[split]) for split in SPLITS] == [147_000, 63_000]
    tokens = shards.Tokens([shards.examine(tmp_path / "one" / found["train"][0]["file"])])
    tokenizer = CharTokenizer(text.decode()[:21])
    assert tokenizer.decode(tokens[:]) == text.decode()[:147_000]
    with mock.patch.object(piecework, "documents", side_effect=AssertionError("went the general way")):
        prepared(tmp_path / "two", text, tokenizer.characters, 1)
