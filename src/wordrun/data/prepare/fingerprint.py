"""The fingerprint of a text and every setting that affects its shards; it names the prepared folder."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wordrun.common import files
from wordrun.common.log import LOGGER
from wordrun.config.compose import data_home
from wordrun.config.registry import Part, part_of
from wordrun.data.chat_template import template_source
from wordrun.data.manifest import Manifest
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.prepare.sources.base import Source
from wordrun.data.tokenizers.construction import build
from wordrun.data.tokenizers.options import TokenizerConfig

FORMAT = 3
"""Version of the prepared data format. Each version gets a different folder name, unless data.prepared sets it."""
SETTINGS = ("kind", "text_key", "dataset", "subset", "split", "revision", "val_fraction", "shard_mb")
"""The options of TextConfig that affect the shards."""
PAIR_SETTINGS = ("prompt_key", "answer_key", "template")
"""Further such options of pairs."""


def folder_of(source: Source, tokenizer: TokenizerConfig) -> Path:
    """Return the folder for the shards of ``source``; it differs for every text and setting."""
    data = source.data
    if data.prepared or source.is_tokens:
        return files.absolute(str(data.prepared or data.path))
    content = json.dumps({**settings(source, tokenizer), "format": FORMAT}, sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=5).hexdigest()
    return Path(data_home()).absolute() / "prepared" / f"{data.name}-{tokenizer.name}-{digest}"


def settings(source: Source, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """Return all settings that affect the shards."""
    found: dict[str, Any] = {name: getattr(source.data, name) for name in SETTINGS}
    if source.data.kind in ANSWERED:
        found |= {name: getattr(source.data, name) for name in PAIR_SETTINGS}
    if source.data.kind == "chat":
        found["chat_template"] = hashlib.sha256(template_source(source.data).encode()).hexdigest()
    elif source.data.kind == "pairs":
        found["fields"] = source.data.other_fields()
    if source.data.format:
        found["format"] = source.data.format
    found["tokenizer"] = asdict(tokenizer)
    found["state"] = source.state()
    if found["tokenizer"].get("path"):  # the content matters, not the name
        found["tokenizer"]["path"] = hashlib.sha256(build(tokenizer).to_json().encode()).hexdigest()
    if code := code_of(source.data, tokenizer):
        found["code"] = code
    return found


def warn_of_other_code(folder: Path, manifest: Manifest, data: TextConfig, tokenizer: TokenizerConfig) -> None:
    """Warn if the code of the source or the tokenizer has changed since the shards in ``folder`` were made."""
    names = {"data": data.kind, "tokenizer": tokenizer.name}
    made = manifest.settings.get("code", {})
    for kind, code in code_of(data, tokenizer).items():
        if code != made.get(kind, code):
            LOGGER.warning(
                "%s was prepared before the code of %s=%s changed, and is used as it is: remove it to prepare it again",
                folder,
                kind,
                names[kind],
            )


def code_of(data: TextConfig, tokenizer: TokenizerConfig) -> dict[str, str]:
    """Return hashes of the code of the source ("data") and of the tokenizer, except for wordrun's own."""
    parts = {kind: part_of(kind, options) for kind, options in (("data", data), ("tokenizer", tokenizer))}
    return {kind: _code(part) for kind, part in parts.items() if part.origin}


def _code(part: Part) -> str:
    """Return a hash of the files that define a part's class, its options, and their base classes outside wordrun."""
    own = {"wordrun", *sys.stdlib_module_names}
    classes = [each for cls in (part.load(), part.options) for each in getattr(cls, "__mro__", ())]
    outside = {
        f"{each.__module__}.{each.__qualname__}": each
        for each in classes
        if each.__module__.partition(".")[0] not in own
    }
    contents = dict[str, bytes]()
    for name, cls in sorted(outside.items()):
        with contextlib.suppress(OSError, TypeError):  # Python may not know the source of a class in a notebook
            if cls.__module__ == "__main__":  # a script: only the class matters, not the rest of the file
                contents[name] = inspect.getsource(cls).encode()
            else:
                contents[cls.__module__] = Path(inspect.getfile(cls)).read_bytes()
    # The names of the files are left out, because a job may run a copy of them.
    return hashlib.sha256(b"\0".join(contents.values())).hexdigest()
