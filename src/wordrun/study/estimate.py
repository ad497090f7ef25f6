"""What the plan says about a point before it runs: the time of a step, memory, and communication."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from wordrun.config import Config
from wordrun.errors import ConfigError, UserError
from wordrun.launch.request import Ranks
from wordrun.layouts import layout
from wordrun.log import LOGGER
from wordrun.plan.cli import vocabulary
from wordrun.plan.comparison import least_dtype
from wordrun.plan.memory import memory
from wordrun.plan.shapes import shapes_of
from wordrun.plan.strategy import Strategy
from wordrun.plan.time import Speeds, load_bandwidth, load_speeds, step_time
from wordrun.study.runner import launch_command, look

GIB = 2**30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of estimates."""
    parser.add_argument("--bandwidth", type=Path, metavar="FILE", help="bandwidth.json of test_dist --bench, for the "
                        "estimates (default: measured before the first point)")  # fmt: skip
    parser.add_argument("--no-calibrate", action="store_true", help="do not measure the device: no estimate of times")


class Estimates:
    """The plan's estimates for points of a study.

    Args:
        folder: the study's folder, for the measured speeds.
        args: the command line.

    Raises:
        ConfigError: --bandwidth is not a bandwidth.json.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.results = load_bandwidth(args.bandwidth) if args.bandwidth else None

    def speeds(self, words: tuple[str, ...], measure: bool) -> Speeds | None:
        """Return the speeds of ranks that the options ``words`` of launch choose; None if they are unknown.

        Args:
            words: such as -n 2.
            measure: whether to measure them if that has not been done yet.
        """
        file = self.folder / f"speeds{''.join(words)}.json"
        if not file.exists() and measure and not (self.args.no_calibrate or self.args.submit):
            LOGGER.info("measuring how fast %d rank(s) compute and communicate", look(self.args, words)[1].np)
            command = [sys.executable, "-m", "wordrun.study.calibrate", str(file), *self.args.overrides]
            output = self.folder / "logs" / f"{file.stem}.txt"
            whole = [*launch_command([*self.args.launch, *words]), *command]
            try:
                output.parent.mkdir(exist_ok=True)
                with output.open("wb") as stream:
                    done = subprocess.run(whole, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
            except OSError as error:
                raise UserError(f"cannot write {output}: {error.strerror}") from None
            if done.returncode:
                LOGGER.warning("no estimate of times: cannot measure the device, see %s", output)
        if not file.exists():
            return None
        found = load_speeds(file)
        return found if self.results is None else replace(found, bandwidth=self.results)

    def of(self, cfg: Config, ranks: Ranks, on_cpu: bool, speeds: Speeds | None) -> dict[str, Any]:
        """Return the planned columns of a run with the options ``cfg``; empty if the plan does not cover it."""
        asked = cfg.train.dtype
        dtype = least_dtype(asked) if on_cpu else "bf16" if asked == "auto" else asked
        dtype = speeds.dtype if speeds else dtype
        cfg = replace(cfg, train=replace(cfg.train, dtype=dtype))
        strategy = Strategy("point", cfg, layout(cfg.backend, ranks.np, ranks.ppn), (), on_cpu)
        kind, found = cfg.train.activation_checkpointing, {}
        with contextlib.suppress(ConfigError):  # no estimate for this model or backend, or no measured bandwidth
            model = shapes_of(cfg.model, vocabulary(cfg)[0])
            need = memory(model, strategy, kind)
            found = {"planned_memory_gib": need.total / GIB, "planned_sent_gib": need.sent / GIB}
            if speeds:
                found["planned_step_s"] = step_time(model, strategy, kind, speeds).total
        return found
