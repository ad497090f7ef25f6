"""Tells which values are secrets, to be hidden in records and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Matches KEY in API_KEY and apikey2, but not TOKEN in tokenizer and TOKENIZERS_PARALLELISM.
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
# wordrun's own options that only look like secrets; if they were hidden, the printed command could not be pasted.
OPEN = ("train.sample_tokens", "data.text_key")
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Return whether ``name``, of an environment variable or an option, names a secret."""
    return bool(SECRET.search(name)) and not name.endswith(OPEN)


def mask(name: str, value: str) -> str:
    """Return ``value``, or asterisks if ``name`` names a secret."""
    return HIDDEN if is_secret(name) else value


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the arguments ``words`` with the values of secret NAME=VALUE arguments hidden."""
    masked = []
    for word in words:
        name, equals, value = word.partition("=")
        named = equals and re.fullmatch(r"[-+~\w./@]+", name)
        masked.append(f"{name}={mask(name, value)}" if named else word)
    return masked
