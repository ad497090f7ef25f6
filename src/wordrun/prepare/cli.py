"""``python -m wordrun.prepare [overrides]``: tokenise a data set into shards, on any number of ranks and processes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from wordrun import dist, log
from wordrun.composer import compose
from wordrun.config import Config
from wordrun.data import identity, lock, manifest, opening, preparing
from wordrun.data.sources import locate
from wordrun.errors import ConfigError, UserError
from wordrun.log import LOGGER

USAGE = """\
Tokenise a data set into shards that any number of ranks read without a copy of their own.

  python -m wordrun.prepare data=text data.path='corpus/*.jsonl.gz' tokenizer=bpe tokenizer.vocab_size=16384
  launch -n 8 python -m wordrun.prepare data=fineweb tokenizer=gpt2        in parallel; the result is the same for any N
  python -m wordrun.prepare data=shards data.path=FOLDER data.prepared=OUT  somebody else's shards, written anew
  python -m wordrun.prepare data=sample --inspect                          counts, documents, sequences, a histogram
  python -m wordrun.prepare data=sample --verify                           compare every shard with its checksum

It takes the overrides of a run (wordrun --help), of which data.* and tokenizer.* matter. Started again after it was
killed, it goes on with the shards that are missing. A run with the same options for data and tokenizer finds what was
made here. docs/data.md says more.
"""
LINE_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = argparse.ArgumentParser("python -m wordrun.prepare", add_help=False, allow_abbrev=False)
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
    """Prepare what ``overrides`` describe, unless it is there; every rank must call this."""
    with contextlib.ExitStack() as stack:
        told = _decide(overrides, world, stack) if world.rank == 0 else None
        cfg, folder, plan = dist.share(told, world)
        if plan is not None:
            begin = time.monotonic()
            with _shown(world, handle, cfg.data.name) as show:
                preparing.execute(plan, world, show)
            if world.rank == 0:
                LOGGER.info("prepared data=%s in %.1f s", cfg.data.name, time.monotonic() - begin)
    if world.rank == 0:
        report(folder)
        if verify:
            _verify(folder)
        if inspect:
            from wordrun.prepare.inspect import inspect as look

            look(folder, cfg, handle.screen)


def _decide(
    overrides: Sequence[str], world: dist.World, stack: contextlib.ExitStack
) -> tuple[Config, Path, preparing.Plan | None]:
    """Return the config, the folder, and what is to be done; the folder is locked until ``stack`` ends.

    Raises:
        UserError: another process prepares it, or the options are no good.
    """
    cfg = compose(overrides)
    if cfg.data.kind == "mix":
        raise ConfigError(f"data=mix is prepared part by part: {', '.join(f'data={name}' for name in cfg.data.mix)}")
    if cfg.data.kind == "shards" and not cfg.data.prepared:
        folder = Path(os.path.expanduser(str(cfg.data.path))).absolute()
        if not opening.is_whole(folder):
            raise ConfigError(
                f"data=shards data.path={folder} is read as it is: train with it, or name a folder for shards in "
                "wordrun's own form by data.prepared=FOLDER"
            )
        return cfg, folder, None
    data = replace(cfg.data, offline="error")  # the sample must not be prepared in another's name
    if data.prepared and opening.is_whole(Path(os.path.expanduser(data.prepared))):
        folder = Path(os.path.expanduser(data.prepared)).absolute()
        opening.compare(folder, manifest.load(folder), data, cfg.tokenizer)
        return cfg, folder, None
    source = locate(data)
    folder = identity.folder_of(data, cfg.tokenizer, source)
    if opening.is_whole(folder):
        return cfg, folder, None
    preparing.make(folder.parent)
    hold = folder.with_name(f".{folder.name}.lock")
    if not stack.enter_context(lock.held(hold)):
        raise UserError(
            f"data={data.name} is being prepared in {folder} by {lock.holder(hold)}: wait for it, or end it. If no "
            f"such process lives, remove {hold}"
        )
    return cfg, folder, preparing.plan(data, cfg.tokenizer, source, folder)


@contextlib.contextmanager
def _shown(world: dist.World, handle: log.LogHandle, name: str) -> Iterator[preparing.Show]:
    """Show how far all ranks are, on rank 0: a bar on a terminal, else a line now and then."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[counts]}"), TimeRemainingColumn(),
    )  # fmt: skip
    screen = handle.screen
    hidden = world.rank != 0 or not screen.is_terminal
    begin = said = time.monotonic()
    last = ""

    def show(now: preparing.Progress) -> None:
        nonlocal begin, said, last
        if now.task != last:
            begin, last = time.monotonic(), now.task
        seconds = time.monotonic() - begin
        counts = (
            f"{now.done:,}/{now.pieces:,} pieces  {now.documents:,} documents  {now.tokens:,} tokens  "
            f"{now.tokens / max(seconds, 1.0):,.0f} tokens/s"
        )
        bar.update(task, completed=now.share, description=f"{now.task} of {name}", counts=counts)
        if hidden and time.monotonic() - said > LINE_S:
            said = time.monotonic()
            left = f"{seconds * (1 / now.share - 1):,.0f} s left" if now.share else "no end in sight yet"
            LOGGER.info("%s of %s: %.0f %%  %s  %s", now.task, name, 100 * now.share, counts, left)

    with Progress(*columns, console=screen, refresh_per_second=4, expand=True, disable=hidden) as bar:
        task = bar.add_task(name, total=1.0, counts="")
        yield show


def report(folder: Path) -> None:
    """Say what is in ``folder``."""
    whole = manifest.load(folder)
    LOGGER.info("%s: %s", whole.name, whole.origin)
    for split in manifest.SPLITS:
        LOGGER.info(
            "%s: %s tokens, %s documents, %d shards", split, f"{whole.tokens(split):,}", f"{whole.documents(split):,}",
            len(getattr(whole, split)),
        )  # fmt: skip
    LOGGER.info("tokenizer %s, vocabulary %s", whole.settings["tokenizer"]["name"], f"{whole.vocab_size:,}")
    LOGGER.info("in %s", folder)


def _verify(folder: Path) -> None:
    whole = manifest.load(folder)
    problems = manifest.verify(folder, whole)
    if problems:
        raise ConfigError("\n".join([*problems, f"remove {folder} and prepare the data again"]))
    LOGGER.info("all %d shards are as they were written", len(whole.train) + len(whole.val))
