"""Processes one work item: collects its characters, or writes its tokens as shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, UserError
from wordrun.data import shards
from wordrun.data.foreign import check_range
from wordrun.data.manifest import SPLITS, TOKENIZER
from wordrun.data.prepare import writer
from wordrun.data.prepare.sources.base import Document, Source, WorkItem
from wordrun.data.prepare.writer import SplitWriter
from wordrun.data.tokenizers.base import CUT, Span, Tokenizer
from wordrun.data.tokenizers.char import distinct
from wordrun.data.tokenizers.construction import from_json

CHUNK = 2**18
"""Characters to encode at once; libraries need more than a hundred bytes per token."""
BATCH = 2**20
"""Characters to encode in one call to the library."""

Report = Callable[[int, int, int], None]
"""Called with the work item's documents, tokens and characters so far."""
Faults = dict[str, tuple[int, str]]
"""Rows that are left out: their number for each reason, and a message that names the first."""
BLANK = ("null", "empty")
"""Reasons for which even all rows of a work item may be left out."""
Chunk = tuple[str, bool, str, bool | tuple[Span, ...]]
"""A part of a text, whether it begins a document, its split, and whether it is part of an answer; for a conversation,
where its answers are."""


def record_of(folder: Path, task: str, number: int) -> Path:
    """Return the file that records the completion and result of ``task`` for work item ``number``."""
    return folder / "work" / f"{number:06d}.{task}.json"


def process(task: str, item: WorkItem, source: Source, folder: Path, report: Report) -> None:
    """Do ``task`` (characters or shards) for ``item``, and record its completion.

    Raises:
        UserError: if the source cannot be read or the folder cannot be written to.
    """
    try:
        if task == "characters":
            record: dict[str, Any] = {"characters": _characters(item, source, report)}
        else:
            tokenizer = _tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
            record = write_shards(item, source, tokenizer, folder, report)
        writer.write_text(record_of(folder, task, item.number), json.dumps(record, ensure_ascii=False))
    except OSError as error:
        raise UserError(f"cannot read or write {error.filename or folder}: {error.strerror}") from None


def _characters(item: WorkItem, source: Source, report: Report) -> str:
    found: set[str] = set()
    read = 0
    for document in documents(item, source, {}):
        found |= set(distinct(document.text))
        read += len(document.text)
        report(0, 0, read)
    return "".join(sorted(found))


@lru_cache(maxsize=1)
def _tokenizer(content: str) -> Tokenizer:
    """Return the tokenizer, cached for all work items: loading a large vocabulary takes a third of a second."""
    return from_json(content)


def write_shards(item: WorkItem, source: Source, tokenizer: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    """Write the shards of ``item`` and return their manifest entries by split, and the rows that are left out."""
    faults: Faults = {}
    source = source.with_tokenizer(tokenizer)
    splits = {split: SplitWriter(split, item, tokenizer, folder, source.data.kind) for split in SPLITS}
    if source.is_tokens:
        _rewrite(item, splits[item.kind], tokenizer, report)
    else:
        _encode(_batches(_split(item, source, faults)), tokenizer, splits, report)
    entries = {split: [asdict(entry) for entry in written.finish()] for split, written in splits.items()}
    return {**entries, "faults": faults}


def _encode(
    batches: Iterable[list[Chunk]], tokenizer: Tokenizer, splits: dict[str, SplitWriter], report: Report
) -> None:
    """Write the texts of ``batches`` as tokens."""
    documents = tokens = read = 0
    for batch in batches:
        encoded = iter(tokenizer.encode_batch([text for text, *_, answers in batch if isinstance(answers, bool)]))
        specials = re.compile("|".join(map(re.escape, [*tokenizer.specials(), CUT])))
        for text, begins, split, answers in batch:
            if isinstance(answers, bool):
                ids = next(encoded)
                splits[split].add(ids, begins, answers, text=text)
            else:
                ids, predicted = tokenizer.encode_spans(text, answers)
                said = "".join(text[start:stop] for start, stop in answers)
                splits[split].add(ids, begins, predicted, text=specials.sub("", said))
            documents, tokens, read = documents + begins, tokens + len(ids), read + len(text)
        report(documents, tokens, read)


def _rewrite(item: WorkItem, split: SplitWriter, tokenizer: Tokenizer, report: Report) -> None:
    """Rewrite the tokens of a foreign shard in our format."""
    source = shards.Tokens([shards.examine(item.path)])
    for start in range(item.start, item.stop, writer.SHARD_TOKENS):
        part = source[start : min(item.stop, start + writer.SHARD_TOKENS)]
        check_range(part, tokenizer, f"the tokens of the shard {item.path}")
        split.add_shard(part)
        report(0, start - item.start + len(part), 0)


def documents(item: WorkItem, source: Source, faults: Faults) -> Iterator[Document]:
    """Yield the documents of ``item`` that have text, and count the others in ``faults``.

    Raises:
        ConfigError: one has none, and data.strict is set; or no row has text, and it is not because all are empty.
    """
    any_text = False
    for document in source.documents(item):
        if document.fault is None:
            any_text = True
            yield document
            continue
        reason, message = document.fault
        if source.data.strict:
            raise ConfigError(f"data.strict=true, but {message}")
        count, first = faults.get(reason, (0, message))
        faults[reason] = count + 1, first
    if not any_text:
        for reason, (_, message) in faults.items():
            if reason not in BLANK:
                raise ConfigError(message)


def _split(item: WorkItem, source: Source, faults: Faults) -> Iterator[Chunk]:
    """Yield chunks of text, each assigned to training or validation.

    Without named splits, validation gets the end of each part of a plain text, or every (1 / val_fraction)-th of many
    documents.
    """
    share, number = source.data.val_fraction, -1
    for document in documents(item, source, faults):
        number += document.begins
        if document.spans is not None:
            yield document.text, True, item.split or _held_out(number, share), document.spans
        elif item.split:
            length = len(document.text)
            yield from ((*chunk, item.split, document.answers) for chunk in chunks(document, 0, length))
        elif item.kind == "text":
            cut = int(len(document.text) * (1 - share))
            yield from ((*chunk, "train", False) for chunk in chunks(document, 0, cut))
            yield from ((text, False, "val", False) for text, _ in chunks(document, cut, len(document.text)))
        else:
            split = _held_out(number, share)
            yield from ((*chunk, split, document.answers) for chunk in chunks(document, 0, len(document.text)))


def _held_out(number: int, share: float) -> str:
    """Return the split of a document by its number."""
    return "val" if int((number + 1) * share) > int(number * share) else "train"


def chunks(document: Document, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    """Yield ``document.text[start:stop]`` in chunks that end at line breaks, and whether each begins the document."""
    begins = document.begins and start == 0
    while stop - start > CHUNK:
        cut = _end_of_line(document.text, start + CHUNK // 2, start + CHUNK)
        yield document.text[start:cut], begins
        start, begins = cut, False
    if stop > start:
        yield document.text[start:stop], begins


def _end_of_line(text: str, first: int, last: int) -> int:
    """Return where to cut: before a line that does not start with white space, so that no token spans the cut."""
    cut = last
    while (cut := text.rfind("\n", first, cut)) >= 0:
        if not text[cut + 1].isspace():
            return cut + 1
    return last


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch, size = [], 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
