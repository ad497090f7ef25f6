"""From a source to a folder of shards, by any number of ranks and processes, always with the same result.

The ranks speak through files in the folder alone: nothing here is a collective that could time out, and a rank that
comes again finds what was finished before. Rank 0 decides what is to be done; the pieces are dealt out; whoever has
done his share says so in a file; rank 0 writes the manifest, last of all, and everybody waits for that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from wordrun.config import BPETokenizerConfig, DataConfig, TokenizerConfig
from wordrun.data import identity, opening, piecework, shards, tokenizers, workers
from wordrun.data import manifest as manifests
from wordrun.data.documents import Piece, documents, extent, pieces
from wordrun.data.manifest import Entry, Manifest
from wordrun.data.sources import Source
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError
from wordrun.log import LOGGER

LOOK_S = 0.2
"""Seconds between two looks at what others have done."""
SAMPLED = 256
"""Pieces that tokenizer=bpe learns from, at most, evenly spread."""


@dataclass
class Progress:
    """How far all ranks together are."""

    task: str = "shards"
    pieces: int = 0
    done: int = 0
    size: int = 0
    """Bytes of the pieces, as far as they are known."""
    read: int = 0
    documents: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        """What is done, 0 to 1."""
        if self.size:
            return min(1.0, self.read / self.size)
        return self.done / max(1, self.pieces)


Show = Callable[[Progress], None]


@dataclass(frozen=True)
class Plan:
    """What is to be done, as rank 0 sees it; every rank gets the same."""

    data: DataConfig
    tokenizer: TokenizerConfig
    source: Source
    folder: Path
    pieces: list[Piece]
    revision: str | None
    todo: dict[str, list[int]] = field(default_factory=dict)
    """Pieces for which each task is not yet done."""


def plan(data: DataConfig, tokenizer: TokenizerConfig, source: Source, folder: Path) -> Plan:
    """Return what is to be done; make the folder and clear away what a killed preparation left. Rank 0 calls this.

    Raises:
        UserError: the folder cannot be written to, or the source cannot be read.
    """
    parts = pieces(data, source)
    revision = identity.state_of(data, source)
    if data.kind == "hf" and revision is None:
        from wordrun.data import hub

        revision = hub.revision(data)
    work = make(folder / "work")
    for left in [*folder.glob(".*.bin.*"), *folder.glob(".*.docs.*"), *work.glob("rank-*"), *work.glob(".*")]:
        left.unlink(missing_ok=True)
    told = {"settings": identity.settings(data, tokenizer, source), "revision": revision}
    _start_anew_if_changed(folder, work, json.dumps(told, sort_keys=True))
    if data.kind == "shards":
        shards.write_bytes(folder / manifests.TOKENIZER, opening.tokenizer_of(data, tokenizer).to_json().encode())
    elif not (folder / manifests.TOKENIZER).exists() and not tokenizers.needs_text(tokenizer):
        shards.write_bytes(folder / manifests.TOKENIZER, tokenizers.build(tokenizer).to_json().encode())
    todo = {"shards": [piece.number for piece in parts if not _is_done(folder, piece)]}
    if tokenizer.name == "char" and not (folder / manifests.TOKENIZER).exists():
        record = piecework.record_of
        todo["characters"] = [p.number for p in parts if not record(folder, "characters", p.number).exists()]
    return Plan(data, tokenizer, source, folder, parts, revision, todo)


def make(folder: Path) -> Path:
    """Make ``folder``, in which this process can write, and return it.

    Raises:
        UserError: it cannot be had.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write prepared data to {folder}: {error.strerror}. Choose another place by data.prepared=DIR, or "
            "by $WORDRUN_DATA_HOME"
        ) from None
    return folder


def _start_anew_if_changed(folder: Path, work: Path, told: str) -> None:
    """Forget what was begun with other settings, or of another state of the source: data.prepared names one folder."""
    path = work / "settings.json"
    if path.exists() and path.read_text() != told:
        shutil.rmtree(work)
        work.mkdir()
        (folder / manifests.TOKENIZER).unlink(missing_ok=True)
    if not path.exists():
        for old in [*folder.glob("train_*"), *folder.glob("val_*")]:
            old.unlink()
        shards.write_bytes(path, told.encode())


def _is_done(folder: Path, piece: Piece) -> bool:
    """Say whether the shards of ``piece`` are there, as its record says."""
    try:
        record = json.loads(piecework.record_of(folder, "shards", piece.number).read_text(encoding="utf-8"))
        entries = [Entry(**entry) for split in manifests.SPLITS for entry in record[split]]
        return all(shards.examine(folder / entry.file, entry.tokens) for entry in entries)
    except (OSError, ValueError, ConfigError):
        return False


def execute(plan: Plan, world: World, show: Show = lambda progress: None) -> None:
    """Do this rank's share of ``plan``, and return when all of it is done; every rank must call this.

    Args:
        plan: the same on all ranks.
        world: which share is this rank's.
        show: called on rank 0 now and then with how far all are.
    """
    folder = plan.folder
    ready = folder / manifests.TOKENIZER
    if "characters" in plan.todo:
        _share("characters", plan, world, show)
    if world.rank == 0 and not ready.exists():
        LOGGER.info("making tokenizer=%s from the text", plan.tokenizer.name)
        shards.write_bytes(ready, _tokenizer(plan).to_json().encode())
    _wait(ready.exists)
    _share("shards", plan, world, show)
    if world.rank == 0:
        _finish(plan)
    _wait((folder / manifests.NAME).exists)


def _share(task: str, plan: Plan, world: World, show: Show) -> None:
    """Do this rank's part of ``task``; on rank 0 also wait for the other ranks."""
    work = plan.folder / "work"
    open_ = sorted((plan.pieces[number] for number in plan.todo[task]), key=lambda piece: (-piece.size, piece.number))
    mine = open_[world.rank :: world.size]
    progress = Progress(task, len(plan.pieces), size=sum(piece.size for piece in plan.pieces))
    before = len(plan.pieces) - len(open_)
    read_before = progress.size - sum(piece.size for piece in open_)
    looked = 0.0

    def told(counts: list[int]) -> None:
        """Put down how far this rank is, and on rank 0 add up what all have put down."""
        nonlocal looked
        if time.monotonic() - looked < LOOK_S:
            return
        looked = time.monotonic()
        if world.size > 1:
            _put(work / f"rank-{world.rank}.{task}.json", counts)
        if world.rank == 0:
            all_ = [counts, *(_get(work / f"rank-{rank}.{task}.json") for rank in range(1, world.size))]
            done, progress.documents, progress.tokens, read = (sum(column) for column in zip(*all_, strict=True))
            progress.done, progress.read = before + done, read_before + read
            show(progress)

    total = [0, 0, 0, 0]
    processes = workers.number(plan.data, world, len(plan.pieces))
    for total in workers.work_on(task, plan.data, plan.folder, mine, processes):
        told(total)
    _put(work / f"rank-{world.rank}.{task}.done", total)
    if world.rank == 0:
        waiting = [work / f"rank-{rank}.{task}.done" for rank in range(1, world.size)]

        def all_done() -> bool:
            told(total)
            waiting[:] = [path for path in waiting if not path.exists()]
            return not waiting

        _wait(all_done)
        looked = 0.0
        told(total)


def _tokenizer(plan: Plan) -> tokenizers.Tokenizer:
    if plan.tokenizer.name == "char":
        read = piecework.record_of
        records = (json.loads(read(plan.folder, "characters", p.number).read_text("utf-8")) for p in plan.pieces)
        return tokenizers.CharTokenizer("".join({c for record in records for c in record["characters"]}))
    assert isinstance(plan.tokenizer, BPETokenizerConfig)
    return tokenizers.build(plan.tokenizer, _sample(plan, plan.tokenizer.train_mb * 2**20))


def _sample(plan: Plan, size: int) -> Iterator[str]:
    """Yield texts from the beginnings of pieces, evenly spread, ``size`` characters in all."""
    step = -(-len(plan.pieces) // SAMPLED)
    chosen = plan.pieces[::step]
    for piece in chosen:
        left = size // len(chosen)
        if piece.kind == "text":  # which is read as a whole; no character has more than four bytes
            start, stop = extent(piece)
            piece = replace(piece, start=start, stop=min(stop, start + 4 * left))
        for document in documents(piece, plan.data):
            yield from (text for text, _ in piecework.chunks(document, 0, min(left, len(document.text))))
            left -= len(document.text)
            if left <= 0:
                break


def _finish(plan: Plan) -> None:
    """Write the manifest from the records of all pieces."""
    folder = plan.folder
    entries: dict[str, list[Entry]] = {split: [] for split in manifests.SPLITS}
    for piece in plan.pieces:
        record = json.loads(piecework.record_of(folder, "shards", piece.number).read_text(encoding="utf-8"))
        for split in manifests.SPLITS:
            entries[split] += [Entry(**entry) for entry in record[split]]
    for split, remedy in (("train", "more text"), ("val", f"a larger data.val_fraction than {plan.data.val_fraction}")):
        if not entries[split]:
            raise ConfigError(f"data={plan.data.name} has no text for the split {split}: use {remedy}")
    content = (folder / manifests.TOKENIZER).read_bytes()
    tokenizer = tokenizers.from_json(content.decode())
    manifests.save(folder, Manifest(
        plan.data.name, plan.source.origin, plan.revision, identity.settings(plan.data, plan.tokenizer, plan.source),
        tokenizer.vocab_size, tokenizer.eot, hashlib.sha256(content).hexdigest(), **entries,
    ))  # fmt: skip
    shutil.rmtree(folder / "work", ignore_errors=True)


def _put(path: Path, counts: list[int]) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(counts))
    new.replace(path)


def _get(path: Path) -> list[int]:
    try:
        counts: list[int] = json.loads(path.read_text())
        return counts
    except (OSError, ValueError):
        return [0, 0, 0, 0]


def _wait(until: Callable[[], bool]) -> None:
    """Return when ``until`` says so, at most a twentieth of the time later: thousands may ask the same disk."""
    begin = time.monotonic()
    while not until():
        time.sleep(min(1.0, max(0.01, 0.05 * (time.monotonic() - begin))))
