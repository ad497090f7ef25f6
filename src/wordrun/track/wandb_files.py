"""What W&B has written of a run: its files are logs in LevelDB's format, of messages that wandb defines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
"""Bytes: a record does not begin in the last bytes of a block if its header does not fit."""
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
# The last step is looked for in this many blocks at the end of a file, and only then in all of it.
TAIL_BLOCKS = 32


def last_step(folder: Path, run_id: str) -> int:
    """Return the last step of the run's metrics in W&B's files below ``folder``, or -1."""
    return max(map(_last_step, folder.glob(f"*run-*/run-{run_id}.wandb")), default=-1)


def _last_step(file: Path) -> int:
    blocks = -(-file.stat().st_size // BLOCK)
    for first in dict.fromkeys([max(0, blocks - TAIL_BLOCKS), 0]):
        with file.open("rb") as opened:
            opened.seek(first * BLOCK)
            if steps := [step for data in _records(opened.read(), first == 0) if (step := _step(data)) is not None]:
                return max(steps)
    return -1


def _records(content: bytes, begins: bool) -> Iterator[bytes]:
    """Yield the records in some blocks; stop where the file is incomplete, as a killed process leaves it."""
    at, parts = HEADER if begins else 0, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part = content[at + HEADER : at + HEADER + length]
        if len(part) < length or kind not in (WHOLE, FIRST, MIDDLE, LAST):
            return
        at += HEADER + length
        if kind in (WHOLE, FIRST):
            parts = part
        elif parts:  # else its beginning is before these blocks
            parts += part
        if kind in (WHOLE, LAST) and parts:
            yield parts
            parts = b""


def _step(data: bytes) -> int | None:
    """Return the step of a record if it has metrics."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    try:
        record: Any = wandb_internal_pb2.Record.FromString(data)
    except DecodeError:
        return None
    if record.WhichOneof("record_type") != "history":
        return None
    found = [item.value_json for item in record.history.item if "_step" in (item.key, *item.nested_key)]
    return int(json.loads(found[0])) if found else None
