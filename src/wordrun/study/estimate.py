"""What the plan says about a point before it runs: the time of a step, memory, and communication."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wordrun.composer import compose
from wordrun.config import Config, TransformerConfig
from wordrun.errors import ConfigError, UserError
from wordrun.launch.request import Ranks
from wordrun.layouts import layout
from wordrun.log import LOGGER
from wordrun.plan.cli import vocabulary
from wordrun.plan.comparison import least_dtype
from wordrun.plan.memory import memory
from wordrun.plan.shapes import ModelShapes, shapes_of
from wordrun.plan.strategy import Strategy
from wordrun.plan.time import Speeds, load_bandwidth, load_speeds, step_time
from wordrun.runs import metrics
from wordrun.runs.record import load
from wordrun.study.runner import launch_command, look

GIB = 2**30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of estimates."""
    parser.add_argument("--bandwidth", type=Path, metavar="FILE", help="bandwidth.json of test_dist --bench, for the "
                        "estimates (default: measured before the first point)")  # fmt: skip
    parser.add_argument("--no-calibrate", action="store_true", help="measure nothing before the points: no estimates "
                        "of times or, on CPUs, of memory")  # fmt: skip


class Estimates:
    """The plan's estimates for points of a study.

    Args:
        folder: the study's folder, for what is measured.
        args: the command line.

    Raises:
        ConfigError: --bandwidth is not a bandwidth.json.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.results = load_bandwidth(args.bandwidth) if args.bandwidth else None
        self.measures = not (args.no_calibrate or args.submit)
        self.processes: dict[str, float | None] = {}
        """Memory of processes besides the model [bytes], by the backend's name in file names; None: unknown."""

    def speeds(self, launch_options: tuple[str, ...], measure: bool) -> Speeds | None:
        """Return the speeds of ranks that ``launch_options`` choose; None if they are unknown.

        Args:
            launch_options: such as -n 2.
            measure: whether to measure them if that has not been done yet.
        """
        file = self.folder / f"speeds{''.join(launch_options)}.json"
        if not file.exists() and measure and self.measures:
            LOGGER.info("measuring how fast %d rank(s) compute and communicate", look(self.args, launch_options)[1].np)
            command = ["wordrun.study.calibrate", str(file), *["--no-bandwidth"] * (self.results is not None)]
            command += self.args.overrides
            if output := self._failed(file.stem, launch_options, command):
                LOGGER.warning("no estimate of times: cannot measure the device, see %s", output)
        if not file.exists():
            return None
        found = load_speeds(file)
        return found if self.results is None else replace(found, bandwidth=self.results)

    def process(
        self, backend: str, overrides: Sequence[str], launch_options: tuple[str, ...], measure: bool
    ) -> float | None:
        """Return what a rank's process has in host memory besides its share of the model [bytes]; None: unknown.

        Libraries, their code and buffers, and connections: the peak of a run of one block (in pipelines: one for each
        stage) without what the plan counts. It is taken as the same for any number of ranks.

        Args:
            backend: its name in file names.
            overrides: options of a run with it.
            launch_options: those of that run, such as -n 2.
            measure: whether to measure it if that has not been done yet.
        """
        if backend not in self.processes:
            self.processes[backend] = self._process(backend, overrides, launch_options, measure and self.measures)
        return self.processes[backend]

    def _process(
        self, backend: str, overrides: Sequence[str], launch_options: tuple[str, ...], measure: bool
    ) -> float | None:
        folder, ranks = (self.folder / "runs" / f"process-{backend}").absolute(), look(self.args, launch_options)[1]
        cfg = compose(overrides)
        blocks = cfg.backend.stages(layout(cfg.backend, ranks.np, ranks.ppn).pp)
        more = [f"model.n_layer={blocks}", "train.max_iters=2", "train.log_interval=2", "train.check_memory=false"]
        if isinstance(cfg.model, TransformerConfig) and measure and not _is_finished(folder):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed or was stopped
            LOGGER.info("measuring how much memory a process takes besides the model under %s", backend)
            if output := self._failed(
                folder.name, launch_options, ["wordrun", *overrides, *more, f"hydra.run.dir={folder}"]
            ):
                LOGGER.warning("no estimate of memory: cannot measure what a process takes, see %s", output)
        if not _is_finished(folder):
            return None
        with contextlib.suppress(ConfigError):  # the plan does not cover it
            cfg = compose([*overrides, *more])
            need = memory(*_planned(cfg, ranks, None, on_cpu=True), cfg.train.activation_checkpointing)
            return GIB * (metrics.read(folder).training.last("memory_peak") or 0.0) - need.total
        return None

    def _failed(self, name: str, launch_options: tuple[str, ...], command: Sequence[str]) -> Path | None:
        """Run a module with ``launch``; return the file with its output if it fails, or None.

        Raises:
            UserError: its output cannot be written.
        """
        output = self.folder / "logs" / f"{name}.txt"
        command_line = [*launch_command([*self.args.launch, *launch_options]), sys.executable, "-m", *command]
        try:
            output.parent.mkdir(exist_ok=True)
            with output.open("wb") as stream:
                done = subprocess.run(command_line, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror}") from None
        return output if done.returncode else None

    def of(
        self, cfg: Config, ranks: Ranks, speeds: Speeds | None, process: float | None, *, on_cpu: bool
    ) -> dict[str, Any]:
        """Return the planned columns of a run with the options ``cfg``; empty if the plan does not cover it.

        Args:
            cfg: the run's options.
            ranks: its ranks.
            speeds: theirs; None: no estimate of the time.
            process: what ``process`` returned; on a CPU, there is no estimate of the memory without it.
            on_cpu: whether the run uses CPUs.
        """
        found = {}
        with contextlib.suppress(ConfigError):  # no estimate for this model or backend, or no measured bandwidth
            model, strategy = _planned(cfg, ranks, speeds, on_cpu=on_cpu)
            kind = cfg.train.activation_checkpointing
            need = memory(model, strategy, kind)
            found = {"planned_sent_gib": need.sent / GIB}
            if not on_cpu or process is not None:
                found["planned_memory_gib"] = (need.total + (process or 0.0)) / GIB
            if speeds:
                found["planned_step_s"] = step_time(model, strategy, kind, speeds).total
        return found


def _is_finished(folder: Path) -> bool:
    try:
        return load(folder).state() == "finished"
    except UserError:  # there is no run
        return False


def _planned(cfg: Config, ranks: Ranks, speeds: Speeds | None, *, on_cpu: bool) -> tuple[ModelShapes, Strategy]:
    """Return the model and the strategy of a run with the options ``cfg``."""
    asked = cfg.train.dtype
    dtype = least_dtype(asked) if on_cpu else "bf16" if asked == "auto" else asked
    cfg = replace(cfg, train=replace(cfg.train, dtype=speeds.dtype if speeds else dtype))
    strategy = Strategy("point", cfg, layout(cfg.backend, ranks.np, ranks.ppn), (), on_cpu)
    return shapes_of(cfg.model, vocabulary(cfg)[0]), strategy
