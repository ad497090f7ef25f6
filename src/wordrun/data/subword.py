"""Tokenizers of parts of words: GPT-2's by tiktoken, and those of the ``tokenizers`` library, learned or found."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wordrun.config import BPETokenizerConfig, GPT2TokenizerConfig, HFTokenizerConfig
from wordrun.data.splitting import Words
from wordrun.data.tokenizers import END, Ids
from wordrun.errors import ConfigError, UserError

GPT2_URLS = {
    "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken": "tiktoken",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe": "merges",
}
"""Where tiktoken gets the vocabulary, by which it names the files of its cache; both hold the same."""
MARKS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""What models call the end of a text."""
# GPT-2 cuts a text into contractions, words, numbers and signs, each with the blank before it, before it merges.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class GPT2Tokenizer:
    """Byte pair encoding by tiktoken, as GPT-2 has it."""

    kind = "gpt2"

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken

        self._ranks = ranks
        self.eot = len(ranks)
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END: self.eot}
        )
        self._words = Words(lambda words: [self._encoding.encode_ordinary(word) for word in words])

    @classmethod
    def build(cls, cfg: GPT2TokenizerConfig) -> GPT2Tokenizer:
        """Return GPT-2's tokenizer with the vocabulary at ``cfg.path``, or in tiktoken's cache.

        Raises:
            UserError: there is none; the network is not asked.
        """
        path = _gpt2_file(cfg.path)
        try:
            content = path.read_bytes()
            kind = next((kind for url, kind in GPT2_URLS.items() if path.name == _cached_name(url)), path.suffix)
            ranks = _ranks_of_tiktoken(content) if kind in ("tiktoken", ".tiktoken") else _ranks_of_merges(content)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"tokenizer.path={path} is no vocabulary of GPT-2 ({error}): {_recipe()}") from None
        return cls(ranks)

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        return self.eot + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token numbers of ``text``; what looks like a mark between documents is text."""
        return self.encode_batch([text])[0].astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token numbers of each text."""
        found = (self._words.encode(text) for text in texts)
        return [self._whole(text) if ids is None else ids for text, ids in zip(texts, found, strict=True)]

    def _whole(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Ids) -> str:
        """Return the text; numbers beyond the vocabulary become nothing."""
        tokens = np.asarray(tokens)
        return self._encoding.decode(tokens[tokens <= self.eot].tolist())

    def to_json(self) -> str:
        """Return the tokenizer as JSON, its whole vocabulary in it."""
        words = [base64.b64encode(word).decode() for word in sorted(self._ranks, key=self._ranks.__getitem__)]
        return json.dumps({"kind": "gpt2", "ranks": " ".join(words)})

    @classmethod
    def from_json(cls, text: str) -> GPT2Tokenizer:
        """Return the tokenizer that ``to_json`` wrote."""
        words = json.loads(text)["ranks"].split()
        return cls({base64.b64decode(word): rank for rank, word in enumerate(words)})


def _gpt2_file(path: str | None) -> Path:
    if path is not None:
        given = Path(os.path.expanduser(path))
        inside = [*sorted(given.glob("*.tiktoken")), given / "vocab.bpe", given / "merges.txt"]
        found = [file for file in ([given] if not given.is_dir() else inside) if file.is_file()]
        if not found:
            raise ConfigError(
                f"tokenizer.path={path} is neither a file nor a folder with a .tiktoken file, vocab.bpe or merges.txt: "
                f"{_recipe()}"
            )
        return found[0]
    # In tiktoken's own order.
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(folder or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    names = [cache / _cached_name(url) for url in GPT2_URLS]
    for file in names:
        if file.is_file():
            return file
    raise UserError(
        f"tokenizer=gpt2 needs its vocabulary, which is not in tiktoken's cache ({cache}), and the network is not "
        f"asked for it: {_recipe()} Or use tokenizer=bpe, which learns from the text."
    )


def _cached_name(url: str) -> str:
    return hashlib.sha1(url.encode()).hexdigest()


def _recipe() -> str:
    url = next(iter(GPT2_URLS))
    return f"on a machine with a network (a login node), curl -O {url}, then tokenizer.path={url.rpartition('/')[2]}."


def _ranks_of_tiktoken(content: bytes) -> dict[bytes, int]:
    """Return a vocabulary from lines of base64 and rank."""
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in pairs}
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(f"{len(ranks)} words whose ranks are not 0 to {len(ranks) - 1}")
    return ranks


def _ranks_of_merges(content: bytes) -> dict[bytes, int]:
    """Return the vocabulary that lines of two words to be merged build from the 256 bytes."""
    # GPT-2 writes bytes that cannot be seen as the characters from U+0100 on; those that can come first.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = [*visible, *(byte for byte in range(256) if byte not in visible)]
    of_character = {chr(byte): byte for byte in visible}
    of_character |= {chr(256 + number): byte for number, byte in enumerate(order[len(visible) :])}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    for line in content.decode().split("\n"):
        if not line or line.startswith("#version"):
            continue
        left, right = (bytes(of_character[c] for c in part) for part in line.rstrip("\r").split(" "))
        if left not in ranks or right not in ranks:
            raise ValueError(f"the line {line!r} merges what no line before it made")
        ranks[left + right] = len(ranks)
    if len(ranks) == 256:
        raise ValueError("it has no merges")
    return ranks


class _Fast:
    """A tokenizer of the ``tokenizers`` library."""

    kind = ""

    def __init__(self, content: str, eot: int | None) -> None:
        from tokenizers import Tokenizer

        self._content = content
        self._fast = Tokenizer.from_str(content)
        self._words = Words(self._lists) if _is_gpt2s_kind(content) else None
        self._added = [token["content"] for token in json.loads(content).get("added_tokens", [])]
        self.eot = eot
        # The numbers that no token has, between others, count.
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token numbers of ``text``."""
        return self.encode_batch([text])[0].astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token numbers of each text."""
        found = [self._by_words(text) for text in texts]
        # An array from a list is made three times as fast by Python as by NumPy.
        others = self._lists([text for text, ids in zip(texts, found, strict=True) if ids is None])
        rest = (np.frombuffer(array("I", ids), dtype=np.uintc) for ids in others)
        return [next(rest) if ids is None else ids for ids in found]

    def _by_words(self, text: str) -> Ids | None:
        """Return the token numbers of ``text`` if it falls into words, and none of the added tokens is in it."""
        if self._words is None or any(added in text for added in self._added):
            return None
        return self._words.encode(text)

    def _lists(self, texts: list[str]) -> list[list[int]]:
        """Return the token numbers of each text, by the library alone."""
        # encode_batch_fast was the slower one
        return [encoding.ids for encoding in self._fast.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Ids) -> str:
        """Return the text."""
        return str(self._fast.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))

    def to_json(self) -> str:
        """Return the tokenizer as JSON, the library's own in it."""
        return json.dumps({"kind": self.kind, "eot": self.eot, "tokenizer": json.loads(self._content)})

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Return the tokenizer that ``to_json`` wrote."""
        content = json.loads(text)
        return cls(json.dumps(content["tokenizer"]), content["eot"])


class BPETokenizer(_Fast):
    """Byte pair encoding of bytes, which knows every text, learned from a text."""

    kind = "bpe"

    @classmethod
    def build(cls, cfg: BPETokenizerConfig, texts: Iterable[str] = ()) -> BPETokenizer:
        """Return the tokenizer at ``cfg.path``, or one that is learned from ``texts``: the same ones give the same."""
        if cfg.path is not None:
            content = _read(cfg.path)
            return cls(content, _mark(content))
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=cfg.vocab_size, special_tokens=[END], show_progress=False, min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        fast.train_from_iterator(texts, trainer)
        # Matching the mark in texts would let a text pretend to be two.
        content = json.loads(fast.to_str())
        content["added_tokens"] = []
        return cls(json.dumps(content), 0)


class HFTokenizer(_Fast):
    """The tokenizer of a Hugging Face model."""

    kind = "hf"

    @classmethod
    def build(cls, cfg: HFTokenizerConfig) -> HFTokenizer:
        """Return the tokenizer in the folder ``cfg.path``."""
        assert cfg.path is not None  # config.check
        content = _read(cfg.path)
        return cls(content, _mark(content))


def _is_gpt2s_kind(content: str) -> bool:
    """Say whether a tokenizer.json cuts texts into words as GPT-2 does, and encodes each by itself."""
    whole = json.loads(content)
    before = {"add_prefix_space": False, "use_regex": True, **(whole.get("pre_tokenizer") or {})}
    return bool(
        before.get("type") == "ByteLevel" and before["use_regex"] and not before["add_prefix_space"]
        and not whole.get("normalizer") and not whole.get("truncation") and not whole.get("padding")
        and not whole["model"].get("dropout")
    )  # fmt: skip


def _read(path: str) -> str:
    """Return the tokenizer.json at ``path``, a file or its folder."""
    given = Path(os.path.expanduser(path))
    file = given / "tokenizer.json" if given.is_dir() else given
    try:
        content = file.read_text(encoding="utf-8")
        saved = json.loads(content)
        if "tokenizer" in saved:  # as wordrun leaves it beside shards
            content = json.dumps(saved["tokenizer"])
        from tokenizers import Tokenizer

        Tokenizer.from_str(content)
    except OSError as error:
        raise ConfigError(
            f"tokenizer.path={path}: {file} cannot be read: {error.strerror}. It should be the tokenizer.json of a "
            "Hugging Face model; transformers makes one: AutoTokenizer.from_pretrained(A).save_pretrained(B)"
        ) from None
    except Exception as error:  # the library raises Exception itself
        reason = str(error).splitlines()[0][:120]
        raise ConfigError(f"tokenizer.path={path}: {file} is no tokenizer.json ({reason})") from None
    return content


def _mark(content: str) -> int | None:
    """Return the number of the token that parts documents, by the names that models give it."""
    whole = json.loads(content)
    added = {token["content"]: token["id"] for token in whole.get("added_tokens", [])}
    vocabulary = whole.get("model", {}).get("vocab", {})
    for known in (added, vocabulary if isinstance(vocabulary, dict) else {}):
        for name in MARKS:
            if name in known:
                return int(known[name])
    return None
