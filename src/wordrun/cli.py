"""``python -m wordrun [overrides]``: compose once, tell every rank, train.

Rank 0 alone reads the configuration and the others receive the finished Config, so that all ranks agree on every
value and on one run directory, and a mistake is printed once.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import signal
import sys
import textwrap
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

from hydra import main as hydra_main
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from wordrun import dist, log
from wordrun.composer import Tree, compose, register, renamed, to_config
from wordrun.config import SCHEMAS, Config, documentation, parts_in
from wordrun.errors import REQUEUE, ConfigError, UserError, first_line

USAGE = """\
Train a GPT-style language model.

  wordrun data=sample train=smoke                             a few steps, to see that everything works
  launch -n 2 python -m wordrun train.backend=DDP data=shakespeare
  wordrun model=gpt2 model.batch_size=4 train.dtype=bf16      a preset, and two options changed
  wordrun data=text data.path=my.txt train.max_iters=500      your own text
  wordrun -m optimizer.learning_rate=1e-3,3e-4                a sweep, in one process
  wordrun experiment=shakespeare --cfg job                    show the config and do nothing

KEY=VALUE sets an option, GROUP=NAME chooses a file under conf/. Hydra's own flags: --hydra-help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    world = dist.discover_or_exit()
    with contextlib.nullcontext() if world.rank == 0 else contextlib.redirect_stderr(io.StringIO()):
        args = get_args_parser().parse_args(words)
    with dist.guard(world):
        if args.help:
            return _once(world, lambda: _help(args))
        if args.multirun:
            return _sweep(args, words, world)
        if args.cfg and world.rank == 0:
            compose(args.overrides, tree=_tree(args))  # our messages rather than Hydra's
        if args.hydra_help or args.cfg or args.info or args.shell_completion or args.experimental_rerun:
            return _once(world, lambda: _hydra(words, _print_nothing))
        with leave_if_told(world):
            world = dist.identify()
            status, cfg = dist.share(_try_compose(args, world) if world.rank == 0 else None, world)
        if status:
            return int(status)
        return train(cfg, world)


def train(cfg: Config, world: dist.World) -> int:
    """Train as ``cfg`` says, with this process as ``world.rank``; return the exit status."""
    with leave_if_told(world):
        # Not at the top: --help should not wait for torch, and MPI has to start before it.
        from wordrun.train.stop import Interrupted
        from wordrun.train.trainer import Trainer

        handle = log.start(world.rank)
    try:
        with leave_if_told(world):
            trainer = Trainer(cfg, world, handle)
        with trainer:
            trainer.train()
    except Interrupted as error:
        dist.share(None, world)  # rank 0 may still have been drawing plots
        dist.cleanup()
        # One rank's word is enough, and launchers kill the others of a rank that does not end with 0.
        return 0 if error.exit_status == REQUEUE and world.rank else error.exit_status
    finally:
        handle.close()
    return 0


@contextlib.contextmanager
def leave_if_told(world: dist.World) -> Iterator[None]:
    """Until the run itself listens to SIGTERM and SIGUSR1: end this process as one that can be started again.

    It takes a run seconds to minutes to come to its first step, and a scheduler does not know when that is.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if world.rank == 0:
            name = signal.Signals(number).name
            print(f"stopped by {name} before the first step (exit status {REQUEUE})", file=sys.stderr, flush=True)
        raise SystemExit(REQUEUE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _tree(args: Namespace) -> Tree:
    return Tree(args.config_name or "config", args.config_path, args.config_dir)


def _try_compose(args: Namespace, world: dist.World) -> tuple[int, Config | None]:
    try:
        return 0, compose(args.overrides, tree=_tree(args), ranks=world.size, per_node=world.local_size)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_status, None


def _once(world: dist.World, action: Any) -> int:
    """Do what needs no ranks on rank 0 alone."""
    return action() or 0 if world.rank == 0 else 0


def _hydra(words: Sequence[str], task: Any) -> int:
    """Hand the command line to Hydra's own application, which runs ``task`` for every point of a sweep."""
    register()
    old, sys.argv = sys.argv, ["wordrun", *map(renamed, words)]
    try:
        hydra_main(version_base="1.3", config_path="pkg://wordrun.conf", config_name="config")(task)()
    finally:
        sys.argv = old
    return 0


def _print_nothing(composed: DictConfig) -> None:
    """Stand in for the task when Hydra only shows something."""


def _sweep(args: Namespace, words: Sequence[str], world: dist.World) -> int:
    if world.size > 1:
        if world.rank == 0:
            print(
                f"-m runs its points one after another in one process, but here are {world.size} ranks "
                f"({world.launcher}): put launch inside, as in\n"
                "  for s in 1 2 3; do launch -n 2 python -m wordrun train.seed=$s; done",
                file=sys.stderr,
            )
        return ConfigError.exit_status
    for point in _points(args.overrides):
        compose(point, tree=_tree(args))  # a mistake in the last point should not cost the first ones

    def task(composed: DictConfig) -> None:
        with dist.guard(world):
            status = train(to_config(composed, run_dir=str(Path(HydraConfig.get().runtime.output_dir))), world)
            if status:
                raise SystemExit(status)

    return _hydra(words, task)


def _points(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each point of a sweep; of one over a glob, those that all points share."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(first_line(error)) from None
    if any(isinstance(override.value(), Glob) for override in parsed):  # only Hydra knows what it stands for
        return [[o for o, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]]
    batches: list[list[list[str]]] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [point for batch in batches for point in batch]


def _help(args: Namespace) -> None:
    """Print the groups with their choices, and every option with its value and meaning."""
    cfg = compose(args.overrides, tree=_tree(args))
    print(USAGE)
    print("Groups, and the files to choose from (a backend is chosen by train.backend=NAME):")
    for group, options in _groups().items():
        print(textwrap.fill(" ".join(options), 110, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14))
    for section, node in parts_in(cfg).items():
        print(f"\n{section}: {type(node).__doc__}")
        for option in fields(node):
            setting = f"  {section}.{option.name}={_shown(getattr(node, option.name))}"
            meaning = textwrap.wrap(documentation(type(node))[option.name], 76)
            if len(setting) > 36:
                print(setting)
                setting = ""
            print("\n".join(f"{left:<37}{right}" for left, right in zip_longest([setting], meaning, fillvalue="")))
    print(
        "\nThe run writes to hydra.run.dir: outputs/DATA/MODEL-BACKEND/TIME by default; outputs/latest is the newest."
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else value if isinstance(value, str) else str(value)
    text = text.encode("unicode_escape").decode() if isinstance(value, str) else text
    return text if len(text) <= 90 else text[:87] + "..."


def _groups() -> dict[str, list[str]]:
    """Return the config groups and the names of their files."""
    conf = importlib.resources.files("wordrun.conf")
    groups = {}
    for group in (*SCHEMAS, "experiment"):
        files = (file.name for file in (conf / group).iterdir())
        groups[group] = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    return groups
