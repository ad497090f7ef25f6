"""Text to tokens to batches: nothing lost, nothing twice, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import http.server
import logging
import math
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from wordrun.common.errors import ConfigError, UserError
from wordrun.config.schema import Config
from wordrun.data.corpus import corpus_of_run
from wordrun.data.options import TextConfig
from wordrun.data.order import Permutation, Sequences
from wordrun.data.prepare.sources import locate
from wordrun.data.prepare.sources.base import Source
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.prepared import Opened
from wordrun.data.tokenizers.char import CharTokenizer
from wordrun.data.validation_set import ValidationSequences, ValidationTokens
from wordrun.dist import World

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n"


# Tokenizer


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1))
def test_what_is_encoded_can_be_decoded(text: str) -> None:
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.vocab_size == len(set(text))
    assert CharTokenizer.from_json(tokenizer.to_json()).encode(text).tolist() == tokens.tolist()


def test_tokens_are_numbered_by_code_point() -> None:
    assert CharTokenizer("cab").encode("abc").tolist() == [0, 1, 2]


@pytest.mark.parametrize(("text", "absent"), [("Grüße", "üß"), ("z", "z"), ("\x00a", "\\x00"), ("😀", "😀")])
def test_unknown_characters_are_named(text: str, absent: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CharTokenizer("Graeh").encode(text)
    assert absent in str(caught.value)
    assert "vocabulary" in str(caught.value)


def test_numbers_beyond_the_vocabulary_are_shown_as_unknown() -> None:
    assert CharTokenizer("ab").decode(np.array([0, 7, 1])) == "a\ufffdb"


# The order of the sequences


@given(n=st.integers(1, 3000), key=st.text(max_size=20))
def test_the_shuffle_is_a_bijection(n: int, key: str) -> None:
    assert sorted(Permutation(n, key)(np.arange(n))) == list(range(n))


def test_the_shuffle_reaches_far_numbers() -> None:
    n = 10**12 + 39
    images = Permutation(n, "key")(np.arange(n - 1000, n))
    assert len(set(images.tolist())) == 1000
    assert 0 <= images.min() < images.max() < n


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    assert Permutation(10, "1337/0")(np.arange(10)).tolist() == [3, 0, 8, 2, 7, 9, 5, 4, 1, 6]


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(20, 900), block=st.integers(1, 10), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_has_each_sequence_once(tokens: int, block: int, seed: int, epoch: int) -> None:
    sequences = Sequences(np.arange(tokens), block, seed)
    n = sequences.per_epoch
    batch = sequences.batch(epoch * n, n)
    assert batch.tokens.shape == batch.targets.shape == (n, block)
    assert torch.equal(batch.targets, batch.tokens + 1)  # the token that follows, as the tokens are 0, 1, 2, ...
    visits = Counter(batch.tokens.flatten().tolist())
    assert set(visits.values()) == {1}
    assert max(visits) - min(visits) == n * block - 1  # without a gap
    assert tokens - n * block <= 2 * block  # what is left out at both ends together


def test_epochs_differ_in_order_and_in_offset() -> None:
    sequences = Sequences(np.arange(10_000), 50, seed=1)
    epochs = [tuple(sequences.starts(e * sequences.per_epoch, sequences.per_epoch)) for e in range(4)]
    assert len(set(epochs)) == 4
    assert len({epoch[0] % 50 for epoch in epochs}) > 1
    assert all(epoch != tuple(sorted(epoch)) for epoch in epochs)


def test_seeds_differ_and_repeat() -> None:
    def order(seed: int) -> list[int]:
        return Sequences(np.arange(2_000), 10, seed).starts(0, 100).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize(("ranks", "gas", "size"), [(1, 8, 3), (2, 4, 3), (4, 2, 3), (8, 1, 3), (2, 1, 12), (3, 8, 1)])
@pytest.mark.parametrize("step", [0, 3, 41])  # of 40 steps an epoch, so that the last begins in the second
def test_a_step_takes_the_same_sequences_on_any_number_of_ranks(ranks: int, gas: int, size: int, step: int) -> None:
    tokens = np.arange(24 * 40 * 5 + 5)
    alone = Sequences(tokens, 5, seed=7).starts(step * 24, 24).tolist()
    dealt = []
    for rank in range(ranks):
        mine = Sequences(tokens, 5, seed=7)  # each rank has its own, and asks for its parts alone
        for micro in range(gas):
            dealt += mine.starts(step * 24 + (micro * ranks + rank) * size, size).tolist()
    assert sorted(dealt) == sorted(alone)
    assert len(set(dealt)) == 24


def test_any_step_can_be_had_without_the_ones_before() -> None:
    one_by_one = Sequences(np.arange(30_000), 3, seed=5)
    starts = [start for i in range(0, 12_000, 30) for start in one_by_one.starts(i, 30).tolist()]
    assert Sequences(np.arange(30_000), 3, seed=5).starts(11_000, 1_000).tolist() == starts[11_000:]


@pytest.mark.parametrize(("tokens", "block"), [(99, 50), (1, 1), (0, 4)])
def test_a_block_longer_than_the_text_is_refused(tokens: int, block: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Sequences(np.arange(tokens), block, seed=1)
    assert f"model.block_size={block}" in str(caught.value)
    assert f"has {tokens}" in str(caught.value)


def test_the_block_size_that_the_message_offers_works() -> None:
    with pytest.raises(ConfigError, match=r"use model\.block_size=49 or less"):
        Sequences(np.arange(99), 50, seed=1)
    assert Sequences(np.arange(99), 49, seed=1).batch(0, 1).tokens.shape == (1, 49)


# Validation


@given(
    tokens=st.integers(11, 500),
    size=st.integers(1, 5),
    batch=st.integers(1, 7),
    batches=st.one_of(st.none(), st.integers(1, 9)),
)
def test_the_validation_set_is_the_same_on_any_number_of_ranks(
    tokens: int, size: int, batch: int, batches: int | None
) -> None:
    def chosen(ranks: int) -> list[Counter[int]]:
        sets = [
            ValidationSequences(ValidationTokens(np.arange(tokens), 5), batch, batches and batches * batch, rank, ranks)
            for rank in range(ranks)
        ]
        assert len({len(part) for part in sets}) == 1  # so that evaluation may contain collectives
        return [
            Counter(int(first) for i in range(len(part)) for first in part[i][0].tokens[part[i][1] > 0][:, 0])
            for part in sets
        ]

    (alone,) = chosen(1)
    assert sum(chosen(size), Counter()) == alone
    assert set(alone.values()) == {1}
    whole = (tokens - 1) // 5
    assert len(alone) == (whole if batches is None else min(whole, batches * batch))


def test_the_validation_set_is_spread_over_the_whole_text() -> None:
    fixed = ValidationSequences(ValidationTokens(np.arange(10_001), 10), batch_size=5, count=10)
    firsts = sorted(int(first) for i in range(2) for first in fixed[i][0].tokens[:, 0])
    assert firsts == list(range(0, 10_000, 1_000))


@pytest.mark.parametrize("count", [None, 12])
def test_of_a_mix_each_part_counts_as_its_share(count: int | None) -> None:
    """However long it is."""
    parts = [(31, 0.75), (301, 0.25)]
    data = ValidationTokens(np.arange(332), 5, parts=parts)
    sets = [ValidationSequences(data, 4, count, rank, 2) for rank in range(2)]
    found: list[tuple[int, float]] = []
    for fixed in sets:
        for i in range(len(fixed)):
            batch, weights = fixed[i]
            found += [(int(f), float(w)) for f, w in zip(batch.tokens[:, 0], weights, strict=True) if w]
    first = [weight for start, weight in found if start < 31]
    second = [weight for start, weight in found if start >= 31]
    assert (len(first), len(second)) == ((6, 60) if count is None else (6, 3))  # of the first there are no nine
    assert sum(first) == pytest.approx(3 * sum(second))
    assert sum(first + second) == pytest.approx(len(found))
    with pytest.raises(ConfigError, match="validation text of 5 tokens"):
        ValidationSequences(ValidationTokens(np.arange(105), 5, parts=[(100, 0.5), (5, 0.5)]), 4, None)


def test_a_block_longer_than_the_validation_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.block_size=64 .* validation text of 64 tokens.*data.val_fraction"):
        ValidationSequences(ValidationTokens(np.arange(64), 64), 1, None)


# Where the text comes from


def read(source: Source) -> str:
    """Return the text of a source that is one."""
    item = source.single_text()
    assert item is not None
    return "".join(document.text for document in source.documents(item))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the current directory without a word."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Return the address of a file with TEXT on a web server of this machine."""
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "input.txt").write_text(TEXT)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Quiet(*args, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/input.txt"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def nowhere() -> str:
    """Return an address at which nobody answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}/input.txt"


def download(url: str, path: Path, *, sha256: str = "", offline: str = "error") -> TextConfig:
    right = hashlib.sha256(TEXT.encode()).hexdigest()
    return TextConfig("play", kind="download", path=str(path), url=url, sha256=sha256 or right, offline=offline)


def test_a_download_is_kept(served: str, tmp_path: Path) -> None:
    data = download(served, tmp_path / "new" / "input.txt")
    source = locate(data)
    assert read(source) == TEXT
    assert source.origin == served
    assert source.banner is None
    (tmp_path / "www" / "input.txt").unlink()
    assert read(locate(data)) == TEXT
    assert not [name for name in os.listdir(tmp_path / "new") if name != "input.txt"]


def test_a_download_with_another_hash_is_refused(served: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "input.txt"
    with pytest.raises(UserError, match="does not match the known hash"):
        locate(download(served, path, sha256="0" * 64))
    assert not path.exists()


def test_a_download_with_another_hash_is_not_used_where_the_sample_may_take_over(served: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "input.txt"
    source = locate(download(served, path, sha256="0" * 64, offline="sample"))
    assert read(source) == sample_text()
    assert "does not match the known hash" in str(source.banner)
    assert not path.exists()


def test_a_damaged_file_is_refused(nowhere: str, tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text(TEXT + "!")
    with pytest.raises(ConfigError) as caught:
        locate(download(nowhere, path, offline="sample"))
    assert hashlib.sha256((TEXT + "!").encode()).hexdigest() in str(caught.value)
    assert f"data=text data.path={path}" in str(caught.value)


def test_without_a_network_the_sample_takes_over_and_says_so(nowhere: str, tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    source = locate(download(nowhere, path, offline="sample"))
    assert read(source) == sample_text()
    assert source.banner is not None
    assert [
        text for text in ("NOT TRAINING ON PLAY", nowhere, str(path), "offline=error") if text not in source.banner
    ] == []
    assert "could not be downloaded (no connection to 127.0.0.1), so" in source.banner
    assert not path.exists()


def test_without_a_network_offline_error_names_the_remedy(nowhere: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "input.txt"
    with pytest.raises(UserError) as caught:
        locate(download(nowhere, path))
    message = str(caught.value)
    assert [text for text in (f"curl -o {path} --create-dirs {nowhere}", "data=sample") if text not in message] == []


def test_a_missing_page_is_no_text(served: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="404"):
        locate(download(served + "x", tmp_path / "input.txt"))


def test_downloading_leaves_the_root_logger_alone(served: str, tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    locate(download(served, tmp_path / "new" / "input.txt"))
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"caf\xe9 au lait", "not UTF-8 text (byte 3)"),
        (bytes(range(1, 256)), "not UTF-8 text (byte 127)"),
        (bytes(range(256)), "is a binary file"),
        (None, "No such file"),
        ("folder", "has no .txt"),
    ],
)
def test_a_bad_text_file_is_one_clear_message(content: bytes | str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    with pytest.raises(ConfigError) as caught:
        read(locate(TextConfig("text", path=str(path))))
    assert says in str(caught.value)
    assert f"data.path={path}" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_text_file_is_one_clear_message(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text(TEXT)
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        read(locate(TextConfig("text", path=str(path))))


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text(TEXT)
    assert read(locate(TextConfig("text", path="~/mine.txt"))) == TEXT


# Splits and the sample


def in_memory(path: Path) -> Opened:
    """Return what a run reads of a small text in characters."""
    corpus = corpus_of_run(Config(data=TextConfig("text", path=str(path))), World())
    return Opened(corpus.tokenizer, corpus.train, corpus.val, corpus.bytes_per_token)


def test_the_last_tenth_is_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text(TEXT * 10)
    tokenizer, train, val, _ = in_memory(path)
    assert tokenizer.decode(np.concatenate((train[:], val[:]))) == TEXT * 10
    assert len(train) == int(0.9 * len(TEXT) * 10)
    assert train.dtype == np.uint16


def test_line_breaks_of_windows_are_one_character(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode() * 10)
    tokenizer, train, val, _ = in_memory(path)
    assert tokenizer.decode(np.concatenate((train[:], val[:]))) == TEXT * 10


def test_a_vocabulary_beyond_16_bits_is_kept_whole(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    path = tmp_path / "input.txt"
    path.write_text(text, encoding="utf-8")
    tokenizer, _, val, _ = in_memory(path)
    assert tokenizer.vocab_size == 70_000
    assert tokenizer.decode(val[:]) == text[-7_000:]


def test_the_sample_is_the_same_on_every_machine() -> None:
    text = sample_text()
    assert hashlib.sha256(text.encode()).hexdigest().startswith("f8379e95fb10558e")
    assert 1_000_000 < len(text.encode()) < 1_200_000


def test_the_sample_has_something_to_learn() -> None:
    """The text has far less entropy given two characters before than given none."""
    text = sample_text()

    def entropy(counts: Counter[str]) -> float:
        total = counts.total()
        return -sum(n / total * math.log(n / total) for n in counts.values())

    singles = entropy(Counter(text))
    trigrams = entropy(Counter(text[i : i + 3] for i in range(len(text) - 2)))
    pairs = entropy(Counter(text[i : i + 2] for i in range(len(text) - 1)))
    assert 2.5 < singles < 3.5
    assert trigrams - pairs < 0.6 * singles


def test_a_directory_in_place_of_the_file_is_one_message(nowhere: str, tmp_path: Path) -> None:
    (tmp_path / "input.txt").mkdir()
    with pytest.raises(ConfigError, match=r"input\.txt cannot be read: a folder, not a file"):
        locate(download(nowhere, tmp_path / "input.txt", offline="sample"))
