"""Tokenizers: the same text comes back, from JSON too, and a missing or wrong file is one message."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from wordrun.common.errors import ConfigError, UserError
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.tokenizers import construction as tokenizers, subword, subword as word_cache
from wordrun.data.tokenizers.base import END, Tokenizer
from wordrun.data.tokenizers.char import ByteTokenizer, CharTokenizer, distinct
from wordrun.data.tokenizers.options import BPETokenizerConfig, GPT2TokenizerConfig, HFTokenizerConfig, TokenizerConfig

UNICODE = st.text(alphabet=st.characters(codec="utf-8"))


@cache
def learned(size: int = 400) -> Tokenizer:
    """Byte pairs of the first pages of the sample."""
    return tokenizers.build(BPETokenizerConfig(vocab_size=size), [sample_text()[:100_000]])


def merges(*pairs: str) -> str:
    """Return a vocab.bpe as GPT-2 has it."""
    return "#version: 0.2\n" + "\n".join(pairs) + "\n"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's way with a vocabulary of four merges; its own of 50,000 cannot be had here."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "vocab.bpe").write_text(merges("Ġ t", "h e", "Ġt he", "à ¤"), encoding="utf-8")
    return tokenizers.build(GPT2TokenizerConfig(path=str(folder)))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer.json as a model's folder has it, with its own end-of-text token."""
    folder = tmp_path_factory.mktemp("hf")
    content = json.loads(learned().to_json())["tokenizer"]
    content["added_tokens"] = [
        {
            "id": 400,
            "content": "</s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return tokenizers.build(HFTokenizerConfig(path=str(folder)))


# The same text comes back


@settings(max_examples=150, deadline=None)
@given(text=UNICODE)
def test_bytes_come_back(text: str) -> None:
    words = ByteTokenizer()
    assert words.decode(words.encode(text)) == text
    assert words.encode(text).tolist() == list(text.encode())


@settings(max_examples=150, deadline=None)
@given(text=UNICODE)
def test_byte_pairs_come_back(text: str) -> None:
    assert learned().decode(learned().encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=UNICODE)
def test_gpt2s_tokens_come_back(text: str, gpt2: Tokenizer) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.one_of(UNICODE, st.text(alphabet="the cat\n")), max_size=5))
def test_many_texts_are_encoded_as_one_by_one(texts: list[str], gpt2: Tokenizer, hf: Tokenizer) -> None:
    for words in (ByteTokenizer(), CharTokenizer("".join(texts)), learned(), gpt2, hf):
        batch = [ids.tolist() for ids in words.encode_batch(texts)]
        assert batch == [words.encode(text).tolist() for text in texts]


KNOWN = [chr(code) for block in word_cache.BLOCKS for code in block]
WORDY = st.text(alphabet=st.one_of(st.sampled_from("ab 1'\n\t.s"), st.sampled_from(KNOWN)))


def by_library(words: Tokenizer, text: str) -> list[int]:
    """Return what the library itself makes of ``text``, in one piece."""
    if isinstance(words, subword.GPT2Tokenizer):
        return words._encoding.encode_ordinary(text)
    assert isinstance(words, subword.BPETokenizer | subword.HFTokenizer)
    return words._fast.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(text=WORDY)
def test_word_by_word_is_as_the_library_does_it(text: str, gpt2: Tokenizer, hf: Tokenizer) -> None:
    for words in (learned(), gpt2, hf):
        assert words.encode(text).tolist() == by_library(words, text)


def test_every_character_parts_words_as_it_does_for_the_library(gpt2: Tokenizer, hf: Tokenizer) -> None:
    texts = [f"the{c}he {c}the {c}{c} 1{c}1 .{c}. \n{c}\n{c}{c}  '{c}s" for c in KNOWN]
    known = [text for text in texts if not word_cache._patterns(False)[0].search(text)]
    assert len(known) > 1000
    for words in (learned(), gpt2, hf):
        for text, ids in zip(texts, words.encode_batch(texts), strict=True):
            assert ids.tolist() == by_library(words, text), text
        assert words._cache.encode(known[-1]) is not None  # type: ignore[attr-defined]
    assert hf.encode("the</s>the").tolist() == by_library(hf, "the</s>the")


def test_a_full_cache_of_words_begins_anew() -> None:
    asked: list[list[str]] = []

    def encode(words: list[str]) -> list[list[int]]:
        asked.append(sorted(words))
        return [list(word.encode()) for word in words]

    cache = word_cache.WordCache(encode, max_words=2)
    for text in ("a b", "a c", "a d", "d a"):
        ids = cache.encode(text)
        assert ids is not None
        assert ids.tolist() == list(text.encode())
    assert asked == [[" b", "a"], [" c"], [" d", "a"], [" a", "d"]]


@settings(max_examples=60, deadline=None)
@given(text=UNICODE)
def test_characters_of_ascii_and_of_all_planes_agree(text: str) -> None:
    wide = CharTokenizer(text + "ab\U0010ffff")
    assert wide.decode(wide.encode(text)) == text
    assert distinct(text) == "".join(sorted(set(text)))


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2", "hf"])
def test_a_tokenizer_comes_back_from_json(kind: str, gpt2: Tokenizer, hf: Tokenizer) -> None:
    text = "the theme of the cat"
    words = {"char": CharTokenizer(text), "byte": ByteTokenizer(), "bpe": learned(), "gpt2": gpt2, "hf": hf}[kind]
    again = tokenizers.from_json(words.to_json())
    assert json.loads(words.to_json())["kind"] == words.kind == kind
    assert type(again) is type(words)
    assert again.encode(text).tolist() == words.encode(text).tolist()
    assert (again.vocab_size, again.eot, again.to_json()) == (words.vocab_size, words.eot, words.to_json())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": "pickle"}', '{"kind": "char"}', '{"kind": "gpt2"}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a tokenizer that wordrun saved"):
        tokenizers.from_json(text)


# The end-of-text token


def test_a_text_cannot_pretend_to_be_two(gpt2: Tokenizer, hf: Tokenizer) -> None:
    for words in (ByteTokenizer(), learned(), gpt2):
        tokens = words.encode(f"a{END}b")
        assert words.eot not in tokens
        assert words.decode(tokens) == f"a{END}b"
        assert words.decode(np.array([words.eot, *words.encode("ab")])) == f"{END}ab"
    assert hf.eot == 400
    assert hf.vocab_size == 401
    assert CharTokenizer("ab").eot is None


def test_byte_pairs_have_the_size_that_was_asked_for() -> None:
    assert learned(400).vocab_size == 400
    assert learned(400).eot == 0
    shorter = [len(learned(size).encode(sample_text()[:20_000])) for size in (257, 400, 1000)]
    assert shorter == sorted(shorter, reverse=True)
    assert shorter[0] == 20_000  # without merges a byte each
    assert shorter[2] < 8_000


def test_learning_gives_the_same_every_time() -> None:
    again = tokenizers.build(BPETokenizerConfig(vocab_size=400), [sample_text()[:100_000]])
    assert again.to_json() == learned(400).to_json()


def test_a_learned_tokenizer_can_be_used_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(learned().to_json())["tokenizer"]))
    again = tokenizers.build(BPETokenizerConfig(path=str(path)))
    assert again.encode("the cat").tolist() == learned().encode("the cat").tolist()
    assert again.eot == learned().eot
    path.write_text(learned().to_json())  # as it lies beside prepared shards
    assert tokenizers.build(BPETokenizerConfig(path=str(path))).to_json() == learned().to_json()


# GPT-2's vocabulary


def test_gpt2_numbers_bytes_and_merges_as_openai_does(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 256 + 4 + 1
    assert gpt2.eot == 260
    # Of GPT-2's own vocabulary: "!" is 0, "A" 32, " " 220 and a line break 198.
    assert [gpt2.encode(text).tolist() for text in ("!", "A", " ", "\n")] == [[0], [32], [220], [198]]
    assert gpt2.encode("the the\u0900").tolist()[:3] == [83, 257, 258]


def test_gpt2s_vocabulary_is_found_in_tiktokens_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    lines = "".join(f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in ranks.items())
    url = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_text(lines)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert tokenizers.build(GPT2TokenizerConfig()).encode("abc").tolist() == [256, 99]
    (tmp_path / "my.tiktoken").write_text(lines)
    assert tokenizers.build(GPT2TokenizerConfig(path=str(tmp_path / "my.tiktoken"))).encode("ab").tolist() == [256]


def test_without_a_vocabulary_gpt2_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError) as caught:
        tokenizers.build(GPT2TokenizerConfig())
    wanted = (str(tmp_path), "is not downloaded", "r50k_base.tiktoken", "tokenizer.path=", "tokenizer=bpe")
    assert [text for text in wanted if text not in str(caught.value)] == []


@pytest.mark.parametrize("content", ["", "no merges at all\n", "QQ== 0\n", "!!! 1\n"])
@pytest.mark.parametrize("name", ["my.tiktoken", "vocab.bpe"])
def test_a_wrong_vocabulary_of_gpt2_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"tokenizer\.path=.*{name} is not GPT-2's vocabulary"):
        tokenizers.build(GPT2TokenizerConfig(path=str(tmp_path / name)))


@pytest.mark.parametrize("cfg", [GPT2TokenizerConfig, HFTokenizerConfig, BPETokenizerConfig])
def test_a_missing_tokenizer_is_one_message(cfg: type[TokenizerConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.path="):
        tokenizers.build(cfg(path=str(tmp_path / "none")))  # type: ignore[call-arg]


@pytest.mark.parametrize("content", ["", "{}", "text"])
def test_a_broken_tokenizer_json_is_one_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a valid tokenizer\.json"):
        tokenizers.build(HFTokenizerConfig(path=str(tmp_path)))


def test_the_pattern_of_gpt2_keeps_words_with_their_blanks() -> None:
    words = subword.GPT2Tokenizer({bytes([byte]): byte for byte in range(256)})
    assert words._encoding.encode_ordinary("it's") == list(b"it's")
    assert "".join(words.decode(np.array([token])) for token in words.encode("I'll  do 12 x")) == "I'll  do 12 x"


def test_characters_that_are_lacking_are_named_briefly() -> None:
    tokenizer = CharTokenizer("".join(map(chr, range(0x4E00, 0x6E00))))
    with pytest.raises(ConfigError, match="lacks: 'abc'") as caught:
        tokenizer.encode("abc")
    assert len(str(caught.value)) < 300
