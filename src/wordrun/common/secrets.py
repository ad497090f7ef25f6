"""Tells which values are secrets, to be hidden in records and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Matches KEY in API_KEY and apikey2, but not TOKEN in tokenizer and TOKENIZERS_PARALLELISM, PAT in PATH, or PWD alone.
SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?<![A-Z])(PAT|PASS|CRED)|(?<=_)(PWD|AUTH|DSN))S?(?![A-Z])",
    re.IGNORECASE,
)
# The part of a URL between SCHEME:// and @ if it has a password. A user alone may be a token under http, not under ssh.
LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]+(?=@)|(?<=http://)[^/\s]+(?=@)|(?<=https://)[^/\s]+(?=@)")
# wordrun's own options that only look like secrets; if they were hidden, the printed command could not be pasted.
OPEN = ("train.sample_tokens", "data.text_key", "data.prompt_key", "data.answer_key")
HIDDEN = "***"


def is_secret(name: str, value: str = "") -> bool:
    """Return whether ``name``, of an environment variable or an option, names a secret, or ``value`` has a login."""
    return (bool(SECRET.search(name)) and not name.endswith(OPEN)) or has_login(value)


def has_login(value: str) -> bool:
    """Return whether there is a URL with a password, such as SCHEME://USER:PASSWORD@HOST, in ``value``."""
    return bool(LOGIN.search(value))


def mask(name: str, value: str) -> str:
    """Return ``value``, or asterisks if ``name`` names a secret, or in place of the login of a URL."""
    return HIDDEN if is_secret(name) else LOGIN.sub(HIDDEN, value)


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the arguments ``words`` with the values of secret NAME=VALUE arguments and the logins of URLs hidden."""
    masked = []
    for word in words:
        name, equals, value = word.partition("=")
        named = equals and re.fullmatch(r"[-+~\w./@]+", name)
        masked.append(f"{name}={mask(name, value)}" if named else LOGIN.sub(HIDDEN, word))
    return masked
