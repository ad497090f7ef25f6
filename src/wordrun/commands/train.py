"""``wordrun train [overrides]``: compose the config once, share it with every rank, train.

Only rank 0 reads the configuration; the others receive the finished Config. So all ranks agree on every value and on
one run directory, and a mistake is printed once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import math
import os
import re
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice, product
from pathlib import Path

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from wordrun import dist
from wordrun.common import log, sigint, suggestions
from wordrun.common.errors import REQUEUE, ConfigError, UserError, first_line, show
from wordrun.common.run_dir import drop_ids_of_one_run
from wordrun.common.suggestions import nearest
from wordrun.common.version import __version__, versions
from wordrun.config import project
from wordrun.config.compose import Tree, compose, register, renamed, shown, to_config, typed
from wordrun.config.messages import INVALID_OVERRIDE, unparsable
from wordrun.config.schema import SECTIONS, SEVERAL, Config, schemas
from wordrun.dist.hang import watch
from wordrun.train.help import changed_groups, options_of, overview
from wordrun.train.hints import own_command

SWITCHES = ("--help -h", "--hydra-help", "--run -r", "--multirun -m", "--resolve", "--shell-completion -sc")
SETTINGS = (
    "--cfg -c",
    "--package -p",
    "--config-path -cp",
    "--config-name -cn",
    "--config-dir -cd",
    "--experimental-rerun",
)
MOST_POINTS = 100_000
"""Of a sweep."""
FLAGS = ("--version", "--info", *(names.split()[0] for names in (*SWITCHES, *SETTINGS)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = given = list(sys.argv[1:] if argv is None else argv)
    world = dist.discover_or_exit()
    if problems := unknown_flags(arguments):
        if world.rank == 0:
            print("\n".join(problems), file=sys.stderr)
        return ConfigError.exit_status
    with contextlib.nullcontext() if world.rank == 0 else contextlib.redirect_stderr(io.StringIO()):
        args = flags().parse_intermixed_args(arguments)
    # Hydra's own parser accepts overrides only in one contiguous block.
    arguments = [*(word for word in arguments if word not in args.overrides), *args.overrides]
    with dist.guard(world):
        if args.help:
            return _help(args) if world.rank == 0 else 0
        if args.multirun and args.cfg:
            first = _first_point(args.overrides, world)
            kept = (word for word in arguments if word not in {"-m", "--multirun", *args.overrides})
            return main([*kept, *first])
        if args.multirun:
            return _sweep(args, world)
        if args.cfg and world.rank == 0:
            compose(args.overrides, tree=_tree(args))
            if args.cfg == "job":
                print(shown(args.overrides, _tree(args), args.package, resolve=args.resolve), end="")
                return 0
        if args.hydra_help or args.cfg or args.info or args.shell_completion or args.experimental_rerun:
            return _hydra(arguments, lambda composed: None) if world.rank == 0 else 0
        with exit_when_stopped(world), watch.starting(world):
            world = dist.identify()
            if world.rank:
                _load_torch()  # while rank 0 composes
            status, cfg = dist.broadcast(_try_compose(args, world) if world.rank == 0 else None, world)
        if status:
            dist.cleanup()
            return int(status)
        return train(cfg, world, own_command(given))


def _load_torch() -> None:
    """Import torch and what trains with it."""
    if "wordrun.train.trainer" in sys.modules:
        return
    gc.disable()  # garbage collection would take a third of the import time
    importlib.import_module("torch._dynamo")  # torch's optimizers import it anyway
    importlib.import_module("wordrun.train.trainer")
    gc.freeze()  # torch stays loaded until the end, so no garbage collection needs to scan it
    gc.enable()


def train(cfg: Config, world: dist.World, command: Sequence[str] = ()) -> int:
    """Train with ``cfg`` as rank ``world.rank``, started by ``command``; return the exit status."""
    with exit_when_stopped(world), watch.starting(world):
        handle = log.start(world.rank)
        ranks = f" on {world.size} ranks" if world.size > 1 else ""
        log.LOGGER.info("wordrun %s: loading torch%s", __version__, ranks)
        _load_torch()
        # Not at the top: --help should not wait for torch, and MPI has to start before torch.
        from wordrun.train.stop import Interrupted
        from wordrun.train.trainer import Trainer

    status = 0
    try:
        with exit_when_stopped(world):
            trainer = Trainer(cfg, world, handle, command=command)
        with trainer:
            trainer.train()
    except Interrupted as error:
        dist.broadcast(None, world)  # rank 0 may still be drawing plots
        status = error.exit_status
    finally:
        handle.close()
    dist.cleanup()  # after an interruption, which the trainer has not done
    # One rank reports it: launchers kill the other ranks as soon as one exits with another status than 0.
    return 0 if status == REQUEUE and world.rank else status


@contextlib.contextmanager
def exit_when_stopped(world: dist.World) -> Iterator[None]:
    """On SIGTERM or SIGUSR1, exit with the status that permits resubmission.

    This covers the seconds to minutes before the first step, when the run does not yet handle these signals.
    """

    def tell(number: int) -> None:
        if world.rank == 0:
            name = signal.Signals(number).name
            # Not print: the signal may have interrupted one.
            os.write(2, f"stopped by {name} before the first step (exit status {REQUEUE})\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with sigint.exiting((signal.SIGTERM, signal.SIGUSR1), REQUEUE, tell):
        yield


def flags() -> ArgumentParser:
    """Return a parser for the flags of Hydra 1.3.2 to 1.3.8.

    Hydra's own parser is private; a test compares the two.
    """
    parser = ArgumentParser("wordrun", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=versions())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    for names in SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    for names in SETTINGS:
        parser.add_argument(*names.split())
    return parser


def _tree(args: Namespace) -> Tree:
    return Tree(args.config_name or "config", args.config_path, args.config_dir)


def _try_compose(args: Namespace, world: dist.World) -> tuple[int, Config | None]:
    try:
        cfg = compose(args.overrides, tree=_tree(args), ranks=world.size, per_node=world.per_node)
        if cfg.data.kind == "file":
            from wordrun.data.prepare.sources import locate

            locate(cfg.text).files()  # a missing file is reported before torch is loaded
        return 0, cfg
    except UserError as error:
        return show(error), None


def _hydra(arguments: Sequence[str], task: Callable[[DictConfig], None]) -> int:
    """Pass the command line to Hydra's own application, which runs ``task`` for every point of a sweep."""
    register()
    old, sys.argv = sys.argv, ["wordrun", *map(renamed, arguments)]
    try:
        hydra_main(version_base="1.3", config_path="pkg://wordrun.conf", config_name="config")(task)()
    finally:
        sys.argv = old
    return 0


def _sweep(args: Namespace, world: dist.World) -> int:
    if world.size > 1:
        if world.rank == 0:
            print(
                f"-m starts the points of a sweep from one process, but there are {world.size} ranks "
                f"({world.launcher}): run it without launch, and give each point its own ranks, as in\n"
                f"  wordrun -m train.seed=1,2,3 hydra/launcher=wordrun hydra.launcher.np={world.size}",
                file=sys.stderr,
            )
        return ConfigError.exit_status
    drop_ids_of_one_run()
    overrides = [renamed(override) for override in args.overrides]
    with contextlib.suppress(*INVALID_OVERRIDE):  # a mistake is reported below
        overrides = typed(overrides, sweep_points(overrides)[0], _tree(args))
    points = sweep_points(overrides)
    shared = set(points[0]).intersection(*points)
    for number, point in enumerate(points):  # find a mistake in the last point before the first one trains
        try:
            compose(point, tree=_tree(args))
        except ConfigError as error:
            own = [word for word in point if word not in shared]
            if len(own) < 2:  # the message itself names it
                raise
            text = f"{error}\nin point {number} of the sweep ({' '.join(own)}); none has started"
            raise ConfigError(text).with_traceback(error.__traceback__) from None

    def task(composed: DictConfig) -> None:
        with dist.guard(world):
            if status := train(to_config(composed, run_dir=HydraConfig.get().runtime.output_dir), world):
                raise SystemExit(status)

    given = (("--config-path", args.config_path), ("--config-name", args.config_name))
    return _hydra(["--multirun", *(word for pair in given if pair[1] for word in pair), *overrides], task)


def _first_point(overrides: Sequence[str], world: dist.World) -> list[str]:
    """Return the overrides of the first point of a sweep, for ``--cfg``."""
    points = sweep_points([renamed(override) for override in overrides])
    if world.rank == 0:
        print(f"the first of {len(points):,} points:", file=sys.stderr)
    return points[0]


def sweep_points(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each point of a sweep.

    If only the sweeper can enumerate the points (globs, intervals, a sweeper that searches), return a single list, the
    overrides that all points share.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    parser, pairs = OverridesParser.create(), []
    for text in overrides:
        try:
            pairs.append((text, parser.parse_override(text)))
        except HydraException as error:
            raise ConfigError(unparsable(text) if "=" in text else first_line(error)) from None
    parsed = [override for _, override in pairs]
    swept = [override for override in parsed if override.is_sweep_override()]
    other = any(override.get_key_element() == "hydra/sweeper" and override.value() != "basic" for override in parsed)
    if other or any(isinstance(override.value(), Glob) or not override.is_discrete_sweep() for override in swept):
        return [[text for text, override in pairs if not override.is_sweep_override()]]
    values = {}
    for text, override in pairs:
        key = override.get_key_element()
        is_swept = override.is_sweep_override()
        swept_values = islice(override.sweep_string_iterator(), MOST_POINTS + 1) if is_swept else []
        values[key] = [f"{key}={value}" for value in swept_values] or [text]
    if (count := math.prod(map(len, values.values()))) > MOST_POINTS:
        at_least = "at least " if any(len(each) > MOST_POINTS for each in values.values()) else ""
        raise ConfigError(f"this sweep has {at_least}{count:,} points, of which there can be {MOST_POINTS:,}")
    return [list(point) for point in product(*values.values())]


def _help(args: Namespace) -> int:
    """Print an overview, or the options of the groups that are named, or else of those that overrides change."""
    groups = [word for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    folders = [Path(folder) for folder in (project.here().conf, args.config_dir, args.config_path) if folder]
    text = overview(folders)
    if groups or overrides:
        cfg, plain = (compose(some, tree=_tree(args), checked=False) for some in (overrides, []))
        named = bool(groups)
        groups = list(SECTIONS) if "all" in groups else groups or changed_groups(cfg, plain, overrides)
        text = options_of(cfg, groups, folders, names=named)
    disposition = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `wordrun --help | head` ends without a traceback
    print(text, flush=True)
    signal.signal(signal.SIGPIPE, disposition)
    return 0


def unknown_flags(arguments: Sequence[str]) -> list[str]:
    """Return a message for each unknown flag in ``arguments``, with the option that was probably meant."""
    problems = []
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if not re.match(r"--[A-Za-z]", flag) or any(known.startswith(flag) for known in FLAGS):
            continue
        follows = arguments[at + 1 : at + 2]
        if not equals and follows and not follows[0].startswith("-") and "=" not in follows[0]:
            value = follows[0]
        name = flag[2:].replace("-", "_")
        keys = [
            f"{group}.{field.name}"
            for group in SECTIONS
            if group not in SEVERAL
            for part in schemas(group).values()
            if not part.origin
            for field in fields(part.options)
        ]
        same = [key for key in (*keys, *SECTIONS) if name in (key, key.rpartition(".")[2])]
        found = list(dict.fromkeys(filter(None, [suggestions.OPTIONS.get(name), *same])))
        remedy = " or ".join(f"{key}={value or 'VALUE'}" for key in found[:3])
        close = nearest(flag, FLAGS) or nearest(name, {key.rpartition(".")[2] for key in keys})
        near = close or "; wordrun --help lists the options"
        problems.append(f"unknown flag '{flag}': write {remedy}" if found else f"unknown flag '{flag}'{near}")
    return problems
