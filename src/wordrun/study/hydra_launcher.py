"""Connects Hydra's plugins to wordrun's sweeps and searches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from wordrun.commands.train import flags
from wordrun.common.errors import ConfigError, UserError, first_line, show
from wordrun.config.strings import as_typed
from wordrun.launch.sweeps_and_studies import unquoted
from wordrun.study import sweep
from wordrun.study.options import LauncherOptions, SweeperOptions


def prepare(config: DictConfig, *options: LauncherOptions | SweeperOptions) -> None:
    """Create hydra.sweep.dir; if that fails or an option is invalid, print the problems and exit."""
    problems = [problem for each in options for problem in each.problems()]
    try:
        if not problems:
            folder(config).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(f"hydra.sweep.dir={folder(config)} cannot be created: {error.strerror}; choose another folder")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        raise SystemExit(ConfigError.exit_status)


def launch(context: HydraContext, config: DictConfig, options: LauncherOptions, batch: Sequence[Sequence[str]]) -> int:
    """Run or submit the points; print a user error, and return the exit status."""
    try:
        written = [[as_written(override, config) for override in overrides] for overrides in batch]
        return sweep.launch(folder(config), command(), options, written, subdirs(context, config))
    except UserError as error:
        return show(error)


def search(context: HydraContext, config: DictConfig, options: SweeperOptions, arguments: Sequence[str]) -> int:
    """Let Optuna search; print a user error, and return the exit status."""
    try:
        try:
            from wordrun.study import search
        except ImportError as error:
            raise ConfigError(
                f"hydra/sweeper=wordrun_optuna needs Optuna ({first_line(error)}): pip install 'wordrun[optuna]'"
            ) from None
        given = as_typed([f"{key}={value}" for key, value in options.params.items()], config)
        space, fixed = search.parse([*given, *arguments])
        return search.run(
            folder(config), command(), launcher_options(config), options, space, fixed, subdirs(context, config)
        )
    except UserError as error:
        return show(error)


def as_written(override: str, config: DictConfig) -> str:
    """Return ``override`` as it was typed: without quotes that it needs only until its option's type is known."""
    key, _, value = override.partition("=")
    plain = f"{key}={unquoted(value)}"
    return plain if plain != override and as_typed([plain], config) == [override] else override


def launcher_options(config: DictConfig) -> LauncherOptions:
    """Return the options of hydra/launcher=wordrun, the defaults if another one is chosen."""
    given = OmegaConf.to_object(config.hydra.launcher)
    return given if isinstance(given, LauncherOptions) else LauncherOptions()


def folder(config: DictConfig) -> Path:
    """Return hydra.sweep.dir."""
    return Path(str(config.hydra.sweep.dir))


def command() -> list[str]:
    """Return the command of a point, without its overrides: this process's own, with its flags and search path."""
    args = flags().parse_args(sys.argv[1:])
    given = (
        ("--config-path", args.config_path),
        ("--config-name", args.config_name),
        ("--config-dir", args.config_dir),
    )
    words = [word for flag, value in given if value for word in (flag, value)]
    path = [word for word in args.overrides if word.lstrip("+").startswith("hydra.searchpath")]
    return [sys.executable, "-m", "wordrun", *words, *path]


def subdirs(context: HydraContext, config: DictConfig) -> Callable[[Sequence[str], int], str]:
    """Return a function that returns hydra.sweep.subdir for a point's overrides and number."""

    def subdir(overrides: Sequence[str], number: int) -> str:
        point = context.config_loader.load_sweep_config(config, list(overrides))
        for key in ("hydra.job.id", "hydra.job.num"):
            OmegaConf.update(point, key, number, force_add=True)
        return str(point.hydra.sweep.subdir)

    return subdir
