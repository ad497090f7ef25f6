"""``wordrun prepare [overrides]``: tokenize a data set into shards, on any number of ranks and processes."""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from wordrun import dist
from wordrun.common import log
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.log import LOGGER
from wordrun.config.compose import compose
from wordrun.config.schema import Config
from wordrun.data import contents, manifest, prepared
from wordrun.data.options import TextConfig
from wordrun.data.prepare import fingerprint, lock, run, writer
from wordrun.data.prepare.sources import locate

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
            from wordrun.data.prepare.inspect import inspect as show_statistics

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
