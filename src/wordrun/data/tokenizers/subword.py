"""Subword tokenizers: GPT-2's from tiktoken, and ones from the ``tokenizers`` library, trained here or loaded."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.files import read_json
from wordrun.data.contents import reject_special_file
from wordrun.data.tokenizers.base import CUT, END, Ids, Span, Tokenizer
from wordrun.data.tokenizers.huggingface import letters
from wordrun.data.tokenizers.options import BPETokenizerConfig, GPT2TokenizerConfig, HFTokenizerConfig

GPT2_URLS = {
    "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken": "tiktoken",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe": "merges",
}
"""URLs of the vocabulary, both with the same content; tiktoken derives the file names in its cache from them."""
EOT_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names of the end-of-text token in various models."""
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in chat templates."""
# Before merging, GPT-2 splits text into contractions, words, numbers and symbols, each with the preceding space.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding, using tiktoken."""

    kind = "gpt2"
    eot: int

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken

        self._ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = self.eot + 1
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END: self.eot}
        )
        self._cache = WordCache(lambda words: [self._encoding.encode_ordinary(word) for word in words])

    @classmethod
    def build(cls, cfg: GPT2TokenizerConfig, texts: Iterable[str] = ()) -> GPT2Tokenizer:
        """Return GPT-2's tokenizer with the vocabulary from ``cfg.path`` or tiktoken's cache.

        Raises:
            UserError: if neither exists; nothing is downloaded.
        """
        path = _gpt2_file(cfg.path)
        try:
            content = path.read_bytes()
            kind = next((kind for url, kind in GPT2_URLS.items() if path.name == _cached_name(url)), path.suffix)
            ranks = _ranks_of_tiktoken(content) if kind in ("tiktoken", ".tiktoken") else _ranks_of_merges(content)
        except (OSError, ValueError, KeyError) as error:
            reason = first_line(error)
            raise ConfigError(f"tokenizer.path={path} is not GPT-2's vocabulary ({reason}): {_recipe()}") from None
        return cls(ranks)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        cached = ((text, self._cache.encode(text)) for text in texts)
        return [
            self._encoding.encode_to_numpy(text, disallowed_special=()) if ids is None else ids for text, ids in cached
        ]

    def decode(self, tokens: Ids) -> str:
        """Return the text; ids beyond the vocabulary are dropped."""
        tokens = np.asarray(tokens)
        return self._encoding.decode(tokens[tokens <= self.eot].tolist())

    def to_json(self) -> str:
        """Return the tokenizer as JSON, with its complete vocabulary."""
        words = [base64.b64encode(word).decode() for word in sorted(self._ranks, key=self._ranks.__getitem__)]
        return json.dumps({"kind": "gpt2", "ranks": " ".join(words)})

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        words = json.loads(text)["ranks"]
        if words is None:
            return MissingGPT2Tokenizer()
        return cls({base64.b64decode(word): rank for rank, word in enumerate(words.split())})


class MissingGPT2Tokenizer(Tokenizer):
    """Stands in for GPT-2's tokenizer where its vocabulary is missing: training needs only the number of tokens."""

    kind = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        self.missing = (
            f"GPT-2's vocabulary is not in tiktoken's cache ({gpt2_cache()}). On a machine with network access, run "
            "TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")', then set "
            "TIKTOKEN_CACHE_DIR=DIR here"
        )

    @classmethod
    def build(cls, cfg: GPT2TokenizerConfig, texts: Iterable[str] = ()) -> MissingGPT2Tokenizer:
        """Return the tokenizer without its vocabulary."""
        return cls()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Raise UserError."""
        self._fail()

    def decode(self, tokens: Ids) -> str:
        """Raise UserError."""
        self._fail()

    def _fail(self) -> NoReturn:
        raise UserError(self.missing)

    def to_json(self) -> str:
        """Return JSON without a vocabulary, for ``GPT2Tokenizer.from_json``."""
        return json.dumps({"kind": self.kind, "ranks": None})

    @classmethod
    def from_json(cls, text: str) -> MissingGPT2Tokenizer:
        """Return the tokenizer without its vocabulary."""
        return cls()


def gpt2_if_present(cfg: GPT2TokenizerConfig) -> Tokenizer:
    """Return GPT-2's tokenizer; without ``cfg.path`` and a vocabulary in tiktoken's cache, its stand-in."""
    try:
        return GPT2Tokenizer.build(cfg)
    except UserError:
        if cfg.path is not None:
            raise
        return MissingGPT2Tokenizer()


def _gpt2_file(path: str | None) -> Path:
    if path is not None:
        given = Path(os.path.expanduser(path))
        candidates = [given, *sorted(given.glob("*.tiktoken")), given / "vocab.bpe", given / "merges.txt"]
        absent: UserError = ConfigError(
            f"tokenizer.path={path} is neither a file nor a folder with a .tiktoken file, vocab.bpe or merges.txt: "
            f"{_recipe()}"
        )
    else:
        cache = gpt2_cache()
        candidates = [cache / _cached_name(url) for url in GPT2_URLS]
        absent = UserError(
            f"tokenizer=gpt2 needs its vocabulary, which is not in tiktoken's cache ({cache}) and is not downloaded: "
            f"{_recipe()} Or use tokenizer=bpe, which is trained on the text."
        )
    for file in candidates:
        if file.is_file():
            return file
    raise absent


def gpt2_cache() -> Path:
    """Return the folder in which tiktoken keeps downloaded vocabularies."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")  # same order as tiktoken
    return Path(folder or os.path.join(tempfile.gettempdir(), "data-gym-cache"))


def _cached_name(url: str) -> str:
    return hashlib.sha1(url.encode()).hexdigest()


def _recipe() -> str:
    url = next(iter(GPT2_URLS))
    return f"on a machine with network access (a login node), curl -O {url}; then tokenizer.path={Path(url).name}."


def _ranks_of_tiktoken(content: bytes) -> dict[bytes, int]:
    """Parse a vocabulary file with a base64 word and its rank on each line."""
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in pairs}
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(f"{len(ranks)} words whose ranks are not 0 to {len(ranks) - 1}")
    return ranks


def _ranks_of_merges(content: bytes) -> dict[bytes, int]:
    """Build the vocabulary from the 256 bytes by merging the two words on each line."""
    bytes_of = {letter: byte for byte, letter in enumerate(letters())}
    ranks = {bytes([bytes_of[letter]]): rank for rank, letter in enumerate(sorted(bytes_of))}
    for line in content.decode().split("\n"):
        if not line or line.startswith("#version"):
            continue
        left, right = (bytes(bytes_of[letter] for letter in part) for part in line.rstrip("\r").split(" "))
        if left not in ranks or right not in ranks:
            raise ValueError(f"the line {line!r} merges words that no earlier line made")
        ranks[left + right] = len(ranks)
    if len(ranks) == 256:
        raise ValueError("it has no merges")
    return ranks


class HFTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library, loaded from a Hugging Face model's tokenizer.json."""

    kind = "hf"

    def __init__(self, content: str, eot: int | None, chat: Mapping[str, Any] | None = None) -> None:
        from tokenizers import Tokenizer

        self.chat = chat or {}
        self._content = content
        self._fast = Tokenizer.from_str(content)
        self._cache = WordCache(self._ids) if _splits_like_gpt2(content) else None
        self._added = [token["content"] for token in json.loads(content).get("added_tokens", [])]
        self.eot = eot
        # The largest id, not the number of tokens: some ids may be unused.
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def build(cls, cfg: BPETokenizerConfig | HFTokenizerConfig, texts: Iterable[str] = ()) -> HFTokenizer:
        """Return the tokenizer in the folder ``cfg.path``."""
        content, chat = _read(str(cfg.path))
        return cls(content, _eot(content), chat)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        found = [self._by_word(text) for text in texts]
        # array.array converts a list three times as fast as NumPy.
        others = self._ids([text for text, ids in zip(texts, found, strict=True) if ids is None])
        rest = (np.frombuffer(array("I", ids), dtype=np.uintc) for ids in others)
        return [next(rest) if ids is None else ids for ids in found]

    def _by_word(self, text: str) -> Ids | None:
        """Return the token ids of ``text``, or None if the word cache does not apply to it."""
        if self._cache is None or any(added in text for added in self._added):
            return None
        return self._cache.encode(text)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, using only the library."""
        # encode_batch_fast measured slower.
        return [encoding.ids for encoding in self._fast.encode_batch(texts, add_special_tokens=False)]

    @property
    def eot_text(self) -> str:
        return END if self.eot is None else str(self._fast.id_to_token(self.eot))

    def specials(self) -> list[str]:
        added = json.loads(self._content).get("added_tokens", [])
        return list(dict.fromkeys([*super().specials(), *(each["content"] for each in added if each["special"])]))

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if not self._added:  # no text is a special token for the library
            return super().encode_spans(text, spans)
        # As one text, like transformers; the tokens of a span are those with characters of it, and all between them.
        ids, starts, stops, at = [], [], [], 0
        for piece in text.split(CUT):
            encoding = self._fast.encode(piece, add_special_tokens=False)
            ids += encoding.ids
            starts += [at + start for start, _ in encoding.offsets]
            stops += [at + stop for _, stop in encoding.offsets]
            at += len(piece) + len(CUT)
        begins, ends, inside = np.array(starts), np.array(stops), np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            found = np.flatnonzero((begins < stop) & (ends > start) & (begins < ends))
            if len(found):
                inside[found[0] : found[-1] + 1] = True
        return np.array(ids, dtype=np.int64), inside

    def decode(self, tokens: Ids) -> str:
        return str(self._fast.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))

    def to_json(self) -> str:
        """Return the tokenizer as JSON that embeds the library's JSON."""
        chat = {"chat": self.chat} if self.chat else {}
        return json.dumps({"kind": self.kind, "eot": self.eot, **chat, "tokenizer": json.loads(self._content)})

    @classmethod
    def from_json(cls, text: str) -> Any:
        content = json.loads(text)
        return cls(json.dumps(content["tokenizer"]), content["eot"], content.get("chat"))


class BPETokenizer(HFTokenizer):
    """Byte-level byte pair encoding trained on a text; it can encode any text."""

    kind = "bpe"

    @classmethod
    def build(cls, cfg: BPETokenizerConfig, texts: Iterable[str] = ()) -> HFTokenizer:  # type: ignore[override]
        """Return the tokenizer at ``cfg.path``, or one trained on ``texts``; the same texts give the same tokenizer."""
        if cfg.path is not None:
            return super().build(cfg)
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=cfg.vocab_size,
            special_tokens=[END],
            show_progress=False,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        fast.train_from_iterator(texts, trainer)
        # With END as an added token, a text that contains END would become two documents.
        content = json.loads(fast.to_str())
        content["added_tokens"] = []
        return cls(json.dumps(content), 0)


def _splits_like_gpt2(content: str) -> bool:
    """Return whether a tokenizer.json splits texts into words like GPT-2 and encodes each word independently."""
    saved = json.loads(content)
    before = {"add_prefix_space": False, "use_regex": True, **(saved.get("pre_tokenizer") or {})}
    return bool(
        before.get("type") == "ByteLevel"
        and before["use_regex"]
        and not before["add_prefix_space"]
        and not saved.get("normalizer")
        and not saved.get("truncation")
        and not saved.get("padding")
        and not saved["model"].get("dropout")
    )


def _read(path: str) -> tuple[str, dict[str, Any]]:
    """Return the tokenizer.json at ``path``, a file or its folder, and what is beside it for conversations."""
    given = Path(os.path.expanduser(path))
    file = given / "tokenizer.json" if given.is_dir() else given
    try:
        reject_special_file(file)
        content = file.read_text(encoding="utf-8")
        saved = json.loads(content)
        if "tokenizer" in saved:  # wordrun's own file, saved with shards
            content = json.dumps(saved["tokenizer"])
        chat = saved["chat"] if "chat" in saved else _chat(file.parent) if given.is_dir() else {}
        from tokenizers import Tokenizer

        Tokenizer.from_str(content)
    except OSError as error:
        raise ConfigError(
            f"tokenizer.path={path}: {file} cannot be read: {error.strerror}. It should be the tokenizer.json of a "
            "Hugging Face model; transformers makes one: AutoTokenizer.from_pretrained(A).save_pretrained(B)"
        ) from None
    except Exception as error:  # the library raises plain Exception
        reason = first_line(error, 120)
        raise ConfigError(f"tokenizer.path={path}: {file} is not a valid tokenizer.json ({reason})") from None
    return content, chat


def _chat(folder: Path) -> dict[str, Any]:
    """Return what a model's folder has for conversations, as ``Tokenizer.chat``."""
    named, generation = read_json(folder / "tokenizer_config.json"), read_json(folder / "generation_config.json")
    named = read_json(folder / "special_tokens_map.json") | named
    names = {
        name: str(value["content"] if isinstance(value, dict) else value)
        for name, value in named.items()
        if name in TOKEN_NAMES and value
    }
    template = named.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    with contextlib.suppress(OSError):
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(template, str):
        return {}
    stop = generation.get("eos_token_id", [])
    return {"template": template, "names": names, "stop": stop if isinstance(stop, list) else [stop]}


def _eot(content: str) -> int | None:
    """Return the end-of-text token of a tokenizer.json, found by its usual names."""
    saved = json.loads(content)
    added = {token["content"]: token["id"] for token in saved.get("added_tokens", [])}
    vocabulary = saved.get("model", {}).get("vocab", {})
    for known in (added, vocabulary if isinstance(vocabulary, dict) else {}):
        for name in EOT_NAMES:
            if name in known:
                return int(known[name])
    return None


BLOCKS = (range(0x250), range(0x370, 0x530), range(0x2000, 0x2070))
"""Latin, Greek, Cyrillic and punctuation: characters that all Unicode versions in use classify the same way."""
DISPUTED = {*range(0x1C, 0x20), 0x85}
"""White space in some regular expression libraries but not in others."""
MAX_WORDS = 2**18
"""Maximum number of words in the cache: about 40 MB."""


def _class(codes: Iterable[int]) -> str:
    """Return the character class of ``codes``, without its brackets."""
    return re.escape("".join(map(chr, codes)))


@lru_cache(maxsize=2)
def _patterns(ascii_only: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of an unsupported character and the pattern of a word.

    GPT-2's words are contractions, and runs of letters, digits or symbols with one preceding space, or of white space.
    """
    codes = [code for block in BLOCKS for code in block if code < 0x80 or not ascii_only]
    known = [code for code in codes if code not in DISPUTED and unicodedata.category(chr(code)) != "Cn"]
    letters = _class(code for code in known if unicodedata.category(chr(code)).startswith("L"))
    numbers = _class(code for code in known if unicodedata.category(chr(code)).startswith("N"))
    spaces = _class(code for code in known if chr(code).isspace())
    words = (
        rf"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{numbers}]+| ?[^{spaces}{letters}{numbers}]+"
        rf"|[{spaces}]+(?![^{spaces}])|[{spaces}]+"
    )
    return re.compile(f"[^{_class(known)}]"), re.compile(words)


class WordCache:
    """Encodes texts word by word.

    Args:
        encode: the tokenizer's own function, which returns the token ids of each of several words.
        max_words: once the cache has more words, it is emptied before the next text.
    """

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]], max_words: int = MAX_WORDS) -> None:
        self._encode, self._max_words = encode, max_words
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the token ids of ``text``, or None if it has unsupported characters."""
        unsupported, pattern = _patterns(text.isascii())
        if unsupported.search(text):
            return None
        words = pattern.findall(text)
        if len(self._known) > self._max_words:
            self._known.clear()
        new = list(set(words).difference(self._known))
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._known[word] = np.array(tokens, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), dtype=np.uint32)
