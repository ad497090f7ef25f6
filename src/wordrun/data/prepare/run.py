"""Converts a source to a folder of shards, with the same result for any number of ranks and processes.

Ranks communicate only through files in the folder, so no collective can time out, and a restarted run skips finished
work. Rank 0 lists the remaining work items, which are distributed over the ranks. Each rank writes a file when its
share is done. Rank 0 writes the manifest last, and all ranks wait for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.common.log import LOGGER
from wordrun.data import manifest as manifests, shards
from wordrun.data.prepare import fingerprint, tokenize, workers, writer
from wordrun.data.prepare.sources.base import Source, WorkItem
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig
from wordrun.dist import World

POLL_S = 0.2
"""Seconds between polls of the other ranks' progress."""
SAMPLED = 256
"""Maximum number of evenly spaced work items from which a tokenizer gets its sample."""


@dataclass
class Progress:
    """The combined progress of all ranks."""

    task: str = "shards"
    items: int = 0
    done: int = 0
    size: int = 0
    """Total size of the work items in bytes, as far as it is known."""
    read: int = 0
    documents: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    """Start time according to ``time.monotonic``."""

    def update(self, done: int, documents: int, tokens: int, read: int) -> None:
        """Set the numbers of work items, documents, tokens and bytes so far."""
        self.done, self.documents, self.tokens, self.read = done, documents, tokens, read

    @property
    def fraction(self) -> float:
        """The completed fraction, 0 to 1."""
        if self.size:
            return min(1.0, self.read / self.size)
        return self.done / max(1, self.items)


Show = Callable[[Progress], None]


@dataclass(frozen=True)
class Preparation:
    """The remaining work, determined on rank 0 and identical on every rank."""

    source: Source
    tokenizer: TokenizerConfig
    folder: Path
    items: list[WorkItem]
    revision: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything that affects the shards, when the preparation began."""
    todo: dict[str, list[int]] = field(default_factory=dict)
    """The remaining work items of each task."""
    left_out: list[str] = field(default_factory=list)
    """Files of the source that cannot be used, each with the reason."""
    files_read: str = ""
    """How many files of which types are read."""


def begin(source: Source, tokenizer: TokenizerConfig, folder: Path) -> Preparation:
    """Create the folder, remove temporary files of a killed preparation, and return the remaining work.

    Only rank 0 calls this.

    Raises:
        UserError: if the folder cannot be written to or the source cannot be read.
    """
    items, left_out = source.items(), source.left_out()
    if source.data.strict:
        manifests.check_left_out(source.data, left_out)
    work = writer.make_folder(folder / "work")
    for left in [*folder.glob(".*.bin.*"), *folder.glob(".*.docs.*"), *work.glob("rank-*"), *work.glob(".*")]:
        left.unlink(missing_ok=True)
    revision = source.revision()
    settings = fingerprint.settings(source, tokenizer)
    _restart_if_changed(folder, work, json.dumps({"settings": settings, "revision": revision}, sort_keys=True))
    ready = folder / manifests.TOKENIZER
    if source.is_tokens or not ready.exists():
        made = source.tokenizer(tokenizer)
        if made is not None:
            writer.write_text(ready, made.to_json())
    todo = {"shards": [item.number for item in items if not _is_done(folder, item)]}
    if tokenizer.built_from == "characters" and not ready.exists():
        todo["characters"] = [
            i.number for i in items if not tokenize.record_of(folder, "characters", i.number).exists()
        ]
    return Preparation(source, tokenizer, folder, items, revision, settings, todo, left_out, source.files_read())


def _restart_if_changed(folder: Path, work: Path, settings: str) -> None:
    """Delete partial work done with other settings or another version of the source (possible with data.prepared)."""
    path = work / "settings.json"
    if path.exists() and path.read_text() != settings:
        shutil.rmtree(work)
        work.mkdir()
        (folder / manifests.TOKENIZER).unlink(missing_ok=True)
    if not path.exists():
        for old in [*folder.glob("train_*"), *folder.glob("val_*")]:
            old.unlink()
        writer.write_text(path, settings)


def _is_done(folder: Path, item: WorkItem) -> bool:
    """Return whether the shards listed in the record of ``item`` exist."""
    try:
        entries = chain.from_iterable(_entries(folder, item).values())
        return all(shards.examine(folder / entry.file, entry.tokens) for entry in entries)
    except (OSError, ValueError):
        return False


def execute(preparation: Preparation, world: World, show: Show = lambda progress: None) -> None:
    """Do this rank's share and return when the data set is complete; every rank must call this.

    Args:
        preparation: the same on all ranks.
        world: determines this rank's share.
        show: called on rank 0 from time to time with the progress of all ranks.
    """
    folder, cfg = preparation.folder, preparation.tokenizer
    ready, started = folder / manifests.TOKENIZER, time.monotonic()
    if "characters" in preparation.todo:
        _do_share("characters", preparation, world, show)
    if world.rank == 0 and not ready.exists():
        LOGGER.info("building tokenizer=%s from the text", cfg.name)
        writer.write_text(ready, _tokenizer(preparation).to_json())
    _wait(ready)
    _do_share("shards", preparation, world, show)
    if world.rank == 0:
        _finish(preparation)
        LOGGER.info("prepared data=%s in %.1f s", preparation.source.data.name, time.monotonic() - started)
    _wait(folder / manifests.NAME)


def _do_share(task: str, preparation: Preparation, world: World, show: Show) -> None:
    """Do this rank's share of ``task``; on rank 0 also wait for the other ranks."""
    work, items = preparation.folder / "work", preparation.items
    todo = sorted((items[number] for number in preparation.todo[task]), key=lambda item: (-item.size, item.number))
    progress = Progress(task, len(items), size=sum(item.size for item in items))
    done_before, read_before = len(items) - len(todo), progress.size - sum(item.size for item in todo)
    last = 0.0

    def report(counts: list[int]) -> None:
        """Publish this rank's progress; rank 0 also shows the total."""
        nonlocal last
        if time.monotonic() - last < POLL_S:
            return
        last = time.monotonic()
        if world.size > 1:
            files.replace(work / f"rank-{world.rank}.{task}.json", json.dumps(counts))
        if world.rank == 0:
            others = [_counts(work / f"rank-{rank}.{task}.json") for rank in range(1, world.size)]
            done, documents, tokens, read = map(sum, zip(counts, *others, strict=True))
            progress.update(done_before + done, documents, tokens, read_before + read)
            show(progress)

    counts = [0, 0, 0, 0]
    processes = workers.number(preparation.source.data, world, len(items))
    mine = todo[world.rank :: world.size]
    for counts in workers.work_on(task, preparation.source, preparation.folder, mine, processes):
        report(counts)
    files.replace(work / f"rank-{world.rank}.{task}.done", json.dumps(counts))
    if world.rank == 0:
        for rank in range(1, world.size):
            _wait(work / f"rank-{rank}.{task}.done", lambda: report(counts))
        last = 0.0
        report(counts)


def _tokenizer(preparation: Preparation) -> Tokenizer:
    cfg = preparation.tokenizer
    if cfg.built_from == "characters":
        records = (tokenize.record_of(preparation.folder, "characters", item.number) for item in preparation.items)
        return tokenizers.build(cfg, (json.loads(path.read_text("utf-8"))["characters"] for path in records))
    return tokenizers.build(cfg, _sample(preparation, cfg.sample_mb * 2**20))


def _sample(preparation: Preparation, size: int) -> Iterator[str]:
    """Yield the beginnings of evenly spaced work items, ``size`` characters in total."""
    items = [item for item in preparation.items if item.split != "val"]
    chosen = items[:: -(-len(items) // SAMPLED)]
    for item in chosen:
        left = size // len(chosen)
        for document in preparation.source.documents(preparation.source.beginning(item, left)):
            yield from (text for text, _ in tokenize.chunks(document, 0, min(left, len(document.text))))
            left -= len(document.text)
            if left <= 0:
                break


def _finish(preparation: Preparation) -> None:
    """Write the manifest from the records of all work items."""
    folder, source = preparation.folder, preparation.source
    by_item = [_entries(folder, item) for item in preparation.items]
    faults: tokenize.Faults = {}
    for item in preparation.items:
        for reason, (count, first) in _record(folder, item)["faults"].items():
            faults[reason] = faults.get(reason, (0, first))[0] + count, faults.get(reason, (0, first))[1]
    entries = {split: [entry for found in by_item for entry in found[split]] for split in manifests.SPLITS}
    larger = f"a larger data.val_fraction than {source.data.val_fraction}"
    by_name = any(item.split for item in preparation.items)
    remedies = {"train": "more text", "val": "files with text for this split" if by_name else larger}
    for split, remedy in remedies.items():
        if not entries[split]:
            rows = f" ({manifests.described(faults)} are left out)" if faults else ""
            raise ConfigError(f"data={source.data.name} has no text for the split {split}{rows}: use {remedy}")
    saved = (folder / manifests.TOKENIZER).read_text(encoding="utf-8")
    tokenizer = tokenizers.from_json(saved)
    sha256 = hashlib.sha256(saved.encode()).hexdigest()
    writer.save(
        folder,
        manifests.Manifest(
            source.data.name,
            source.origin,
            preparation.revision,
            preparation.settings,
            tokenizer.vocab_size,
            tokenizer.eot,
            sha256,
            **entries,
            left_out=preparation.left_out,
            files_read=preparation.files_read,
            faults=faults,
        ),
    )
    shutil.rmtree(folder / "work", ignore_errors=True)


def _entries(folder: Path, item: WorkItem) -> dict[str, list[manifests.Entry]]:
    """Return the shards in the record of ``item``, by split."""
    record = _record(folder, item)
    return {split: [manifests.Entry(**entry) for entry in record[split]] for split in manifests.SPLITS}


def _record(folder: Path, item: WorkItem) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(tokenize.record_of(folder, "shards", item.number).read_text(encoding="utf-8"))
    return record


def _counts(path: Path) -> list[int]:
    try:
        counts: list[int] = json.loads(path.read_text())
    except (OSError, ValueError):
        counts = [0, 0, 0, 0]
    return counts


def _wait(path: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Return once ``path`` exists. Pauses are 5 % of the time waited: thousands of ranks may poll the same disk."""
    started = time.monotonic()
    while not path.exists():
        meanwhile()
        time.sleep(min(1.0, max(0.01, 0.05 * (time.monotonic() - started))))
