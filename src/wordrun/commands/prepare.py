"""``wordrun prepare [overrides]``: tokenize a data set into shards, on any number of ranks and processes."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from wordrun import dist
from wordrun.common import log
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.log import LOGGER
from wordrun.config.compose import compose
from wordrun.config.schema import Config
from wordrun.data import contents, manifest, manifest as manifests, prepared
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.prepare import fingerprint, lock, run, writer
from wordrun.data.prepare.sources import locate
from wordrun.data.shards import Tokens, examine, plain
from wordrun.data.tokenizers.base import Tokenizer

USAGE = """\
Tokenize a dataset into shards, which any number of ranks can read without loading them into memory.

  wordrun prepare data=text data.path='corpus/*.jsonl.gz' tokenizer=bpe tokenizer.vocab_size=16384
  launch -n 8 wordrun prepare data=fineweb tokenizer=gpt2         in parallel, with the same result
  wordrun prepare data=shards data.path=FOLDER data.prepared=OUT  rewrite shards from other projects
  wordrun prepare data=sample --inspect                           show statistics, documents and sequences
  wordrun prepare data=sample --verify                            compare every shard with its checksum

It accepts the options of a run (wordrun --help); only data.* and tokenizer.* matter. If it is killed, run it again: it
continues with the missing shards. Runs with the same data and tokenizer options find them. See docs/data.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = argparse.ArgumentParser("wordrun prepare", add_help=False, allow_abbrev=False)
    for flag in ("--help", "--inspect", "--verify"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-h", action="store_true", dest="help")
    parser.add_argument("overrides", nargs="*")
    world = dist.discover_or_exit()
    with contextlib.nullcontext() if world.rank == 0 else contextlib.redirect_stderr(io.StringIO()):
        args = parser.parse_args(argv)
    with dist.guard(world):
        if args.help:
            print(USAGE if world.rank == 0 else "", end="")
            return 0
        world = dist.identify()
        handle = log.start(world.rank)
        try:
            prepare(args.overrides, world, handle, inspect=args.inspect, verify=args.verify)
        finally:
            handle.close()
    return 0


def prepare(
    overrides: Sequence[str], world: dist.World, handle: log.LogHandle, *, inspect: bool = False, verify: bool = False
) -> None:
    """Prepare the data set described by ``overrides`` unless it exists; every rank must call this."""
    with contextlib.ExitStack() as stack:
        begun = _begin(overrides, stack) if world.rank == 0 else None
        cfg, folder, preparation = dist.broadcast(begun, world)
        if preparation is not None:
            with _progress_shown(world, handle, cfg.data.name) as show:
                run.execute(preparation, world, show)
    if world.rank == 0:
        found = manifest.load(folder)
        report(folder, found)
        if verify:
            if problems := manifest.verify(folder, found):
                raise ConfigError("\n".join([*problems, f"remove {folder} and prepare the data again"]))
            LOGGER.info("all %d shards match their checksums", len(found.train) + len(found.val))
        if inspect:
            show_statistics(folder, cfg, handle.screen)


def _begin(overrides: Sequence[str], stack: contextlib.ExitStack) -> tuple[Config, Path, run.Preparation | None]:
    """Return the config, the folder, and any remaining work; the folder stays locked until ``stack`` is closed.

    Raises:
        UserError: if another process is preparing the folder or the options are invalid.
    """
    cfg = compose(overrides)
    if not isinstance(cfg.data, TextConfig):
        raise ConfigError(f"data={cfg.data.name} is not text, and needs no preparation: train on it")
    if cfg.data.kind == "mix":
        parts = ", ".join(f"data={name}" for name in cfg.data.mix)
        raise ConfigError(f"data=mix: prepare its parts one by one, with {parts}")
    source = locate(replace(cfg.data, offline="error"))  # never prepare the sample under another name
    folder = fingerprint.folder_of(source, cfg.tokenizer)
    if manifest.is_complete(folder):
        if cfg.data.prepared:
            prepared.compare(folder, manifest.load(folder), cfg.data, cfg.tokenizer)
            fingerprint.warn_of_other_code(folder, manifest.load(folder), cfg.data, cfg.tokenizer)
        if cfg.data.strict:
            found = manifest.load(folder)
            manifest.check_left_out(cfg.data, found.left_out, faults=found.faults)
        return cfg, folder, None
    if source.is_tokens and not cfg.data.prepared:
        raise ConfigError(
            f"data=shards data.path={folder} can be read without preparation: train with it, or name a folder for "
            "shards in wordrun's own format with data.prepared=FOLDER"
        )
    writer.make_folder(folder.parent)
    path = lock.beside(folder)
    if not stack.enter_context(lock.held(path)):
        raise UserError(
            f"data={cfg.data.name} is being prepared in {folder} by {lock.holder(path)}: wait for it, or stop it. If "
            f"there is no such process, remove {path}"
        )
    preparation = run.begin(source, cfg.tokenizer, folder)
    manifest.check_left_out(cfg.data, preparation.left_out, preparation.files_read)
    return cfg, folder, preparation


@contextlib.contextmanager
def _progress_shown(world: dist.World, handle: log.LogHandle, name: str) -> Iterator[run.Show]:
    """Show the progress of all ranks on rank 0: a bar on a terminal, otherwise occasional log lines."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    screen = handle.screen
    hidden = world.rank != 0 or not screen.is_terminal
    logged = time.monotonic()

    def show(now: run.Progress) -> None:
        nonlocal logged
        seconds = time.monotonic() - now.started
        counts = (
            f"{now.done:,}/{now.items:,} work items  {now.documents:,} documents  {now.tokens:,} tokens  "
            f"{now.tokens / max(seconds, 1.0):,.0f} tokens/s"
        )
        bar.update(task, completed=now.fraction, description=f"{now.task} of {name}", counts=counts)
        if hidden and time.monotonic() - logged > lock.LOG_S:
            logged = time.monotonic()
            left = f"{seconds * (1 / now.fraction - 1):,.0f} s left" if now.fraction else "estimating the time left"
            LOGGER.info("%s of %s: %.0f %%  %s  %s", now.task, name, 100 * now.fraction, counts, left)

    with Progress(*columns, console=screen, refresh_per_second=4, expand=True, disable=hidden) as bar:
        task = bar.add_task(name, total=1.0, counts="")
        yield show


def report(folder: Path, found: manifest.Manifest) -> None:
    """Log the contents of ``folder`` according to its manifest."""
    LOGGER.info("%s: %s", found.name, found.origin)
    for split in manifest.SPLITS:
        tokens, documents, count = found.tokens(split), found.documents(split), len(getattr(found, split))
        LOGGER.info("%s: %s tokens, %s documents, %d shards", split, f"{tokens:,}", f"{documents:,}", count)
    if found.left_out:
        LOGGER.info("left out: %s", contents.few(found.left_out))
    if found.faults:
        LOGGER.warning("left out %s", manifest.described(found.faults))
    LOGGER.info("tokenizer %s, vocabulary %s", found.settings["tokenizer"]["name"], f"{found.vocab_size:,}")
    LOGGER.info("in %s", folder)


LONGEST = 5
SEQUENCES = 4
SHOWN = 160
"""Number of characters to show of a document or sequence."""
COMMON = 20
"""Number of most frequent tokens to show."""
COUNTED = 2**26
"""Maximum number of tokens to count, in evenly spaced shards."""


def show_statistics(folder: Path, cfg: Config, screen: Console) -> None:
    """Show statistics of the prepared data set in ``folder`` on ``screen``, and save histograms with it."""
    manifest = manifests.load(folder)
    tokenizer = manifests.tokenizer(folder, manifest)
    found = documents(folder, manifest)
    sizes = np.array([size for size, _, _ in found])
    counts, counted = frequencies(folder, manifest)
    used = int((counts > 0).sum())
    print_ = screen.print
    print_(f"\nvocabulary: {manifest.vocab_size:,} tokens, of which {used:,} occur among the {counted:,} counted")
    print_(_common(counts, counted, tokenizer))
    if found:
        low, middle, high = np.percentile(sizes, [5, 50, 95])
        print_(
            f"training documents: {len(sizes):,}, {sizes.min():,} to {sizes.max():,} tokens, median {middle:,.0f}, "
            f"90 % between {low:,.0f} and {high:,.0f}"
        )
        print_(_longest(folder, found, tokenizer))
    if manifest.settings["kind"] not in ANSWERED:
        print_(_sequences(folder, manifest, cfg, tokenizer))
    picture = (folder if os.access(folder, os.W_OK) else Path.cwd()) / "inspect.png"
    draw_histograms(picture, manifest, counts, sizes)
    print_(f"histograms: {picture}", soft_wrap=True)


def documents(folder: Path, manifest: manifests.Manifest) -> list[tuple[int, manifests.Entry, int]]:
    """Return the length, shard and first token of every training document; one that spans shards counts to the end of
    its first."""
    found = []
    for entry in manifest.train:
        starts = manifests.document_starts(folder, entry).tolist()
        found += [(b - a, entry, a) for a, b in itertools.pairwise([*starts, entry.tokens])]
    return found


def frequencies(folder: Path, manifest: manifests.Manifest) -> tuple[NDArray[np.int64], int]:
    """Return how often each token occurs in a part of the training data, and the size of that part in tokens."""
    step = max(1, -(-manifest.tokens("train") // COUNTED))
    tokens = manifests.split(folder, manifest, "train", examine=False)
    counts, counted = np.zeros(manifest.vocab_size, dtype=np.int64), 0
    for shard in tokens.shards[::step]:
        content = plain(Tokens([shard])[: COUNTED - counted])
        counts += np.bincount(content, minlength=manifest.vocab_size)
        counted += len(content)
        if counted >= COUNTED:
            break
    return counts, counted


def _common(counts: NDArray[np.int64], counted: int, tokenizer: Tokenizer) -> Table:
    table = Table("token", "text", "share", title="most frequent tokens", title_justify="left")
    for token in np.argsort(-counts, kind="stable")[:COMMON].tolist():
        if counts[token]:
            table.add_row(str(token), Text(repr(tokenizer.decode(np.array([token])))), f"{counts[token] / counted:.2%}")
    return table


def _longest(folder: Path, found: list[tuple[int, manifests.Entry, int]], tokenizer: Tokenizer) -> Table:
    table = Table("tokens", "shard", "position", "beginning", title="longest documents", title_justify="left")
    for size, entry, start in sorted(found, key=lambda document: -document[0])[:LONGEST]:
        shard = Tokens([examine(folder / entry.file, entry.tokens)])
        table.add_row(f"{size:,}", entry.file, f"{start:,}", _text(tokenizer, shard[start : start + min(size, SHOWN)]))
    return table


def _sequences(folder: Path, manifest: manifests.Manifest, cfg: Config, tokenizer: Tokenizer) -> Table:
    from wordrun.data.order import Sequences  # imports torch, which preparing data should not wait for

    title = f"first training sequences with model.block_size={cfg.text_model.block_size} train.seed={cfg.train.seed}"
    table = Table("index", "position", "text", title=title, title_justify="left")
    tokens = manifests.split(folder, manifest, "train", examine=False)
    sequences = Sequences(tokens, cfg.text_model.block_size, cfg.train.seed)
    for index in range(min(SEQUENCES, sequences.per_epoch)):
        row = sequences.batch(index, 1).tokens[0].numpy()
        table.add_row(str(index), f"{sequences.starts(index, 1)[0]:,}", _text(tokenizer, row))
    return table


def _text(tokenizer: Tokenizer, tokens: NDArray[np.integer]) -> Text:
    text = tokenizer.decode(plain(tokens))
    return Text(repr(text[:SHOWN])[1:-1] + " ..." * (len(text) > SHOWN))


def draw_histograms(
    path: Path, manifest: manifests.Manifest, counts: NDArray[np.int64], lengths: NDArray[np.integer]
) -> None:
    """Draw histograms of document lengths and token frequencies as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{manifest.name}: {manifest.tokens('train'):,} training tokens, {len(lengths):,} documents")
    if len(lengths) > 1:
        edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, 41).round())
        left.hist(lengths, bins=edges, color="#4477aa")
        left.set_xscale("log")
        left.set(xlabel="tokens in a document", ylabel="documents", title="Document length")
    else:
        left.set_axis_off()
        left.text(0.5, 0.5, "one document", ha="center")
    ranked = np.sort(counts[counts > 0])[::-1]
    right.loglog(np.arange(1, len(ranked) + 1), ranked / ranked.sum(), color="#aa3377")
    right.set(xlabel="rank of the token", ylabel="share of all tokens", title="Token frequency")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
