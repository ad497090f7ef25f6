"""Converts wordrun's tokenizers and templates to Hugging Face's formats, without its libraries."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from wordrun.common.errors import UserError
from wordrun.data.tokenizers.base import END

Json = dict[str, Any]


def is_convertible(ours: Mapping[str, Any]) -> bool:
    """Return whether ``tokenizer_json`` can convert a tokenizer, given the JSON that wordrun saved."""
    return "tokenizer" in ours or ours["kind"] in ("char", "byte", "gpt2")


def require_convertible(ours: Mapping[str, Any]) -> None:
    """Raise a UserError if ``tokenizer_json`` cannot convert a tokenizer, given the JSON that wordrun saved."""
    if not is_convertible(ours):
        raise UserError(
            f"a tokenizer of the kind {ours['kind']} cannot be converted to a format that transformers reads: "
            "wordrun export form=checkpoint writes weights and tokenizer in wordrun's own format"
        )


def tokenizer_json(ours: Mapping[str, Any]) -> tuple[Json, int | None]:
    """Return a tokenizer's tokenizer.json and end-of-text token.

    Args:
        ours: the JSON that wordrun saved.

    Raises:
        UserError: if it cannot be converted.
    """
    kind = ours["kind"]
    require_convertible(ours)
    if "tokenizer" in ours:  # already in the library's format
        return dict(ours["tokenizer"]), ours.get("eot")
    if kind == "char":
        vocabulary = {character: token for token, character in enumerate(ours["characters"])}
        # There is no token for unknown characters, so they are an error there too.
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": ""}
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        return _tokenizer(model, split, {"type": "Fuse"}), None
    if kind == "byte":
        words = [bytes([byte]) for byte in range(256)]
    else:
        words = [base64.b64decode(word) for word in ours["ranks"].split()]
    return _of_bytes(words), len(words)


def chat_template(parts: Sequence[tuple[str, str]], end: str) -> str:
    """Return a Jinja chat template, with which transformers formats messages like the pairs in ``data.template``.

    Args:
        parts: of data.template: texts, each with the name of the field after it. A user's message may have fields
            besides its content; those that are missing are empty.
        end: the text of the end-of-text token, which precedes each pair; empty: it has none.
    """
    user, assistant = [json.dumps(end, ensure_ascii=False)], ["message['content']"]
    side = user
    for text, name in parts:
        side.append(json.dumps(text, ensure_ascii=False))  # a JSON string is a Jinja string, too
        if name == "answer":
            side = assistant
        elif name:
            side.append("message['content']" if name == "prompt" else f"message.get({json.dumps(name)}, '')")
    return (
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ " + " ~ ".join(user) + " }}"
        "{% elif message['role'] == 'assistant' %}{{ " + " ~ ".join(assistant) + " }}"
        "{% else %}{{ raise_exception('the model supports only user and assistant messages') }}{% endif %}"
        "{% endfor %}"
    )


def _tokenizer(model: Json, pre_tokenizer: Json, decoder: Json) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _of_bytes(words: Sequence[bytes]) -> Json:
    """Return a byte pair encoding with ``words`` in GPT-2's merge order, followed by END."""
    table = letters()
    shown = ["".join(table[byte] for byte in word) for word in words]
    ranks = {word: rank for rank, word in enumerate(words)}
    pairs = [_parts(word, ranks) for word in words if len(word) > 1]
    merges = [["".join(table[byte] for byte in part) for part in pair] for pair in pairs]
    model = {"type": "BPE", "vocab": {word: rank for rank, word in enumerate([*shown, END])}, "merges": merges}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return _tokenizer(model, level, level)


def letters() -> list[str]:
    """Return the visible character GPT-2 uses for each byte: its Latin-1 character, or one from U+0100 up."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def _parts(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the two words that merge into ``word``: its parts after all earlier merges."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
