"""What a run reports: facts for run.json and the first lines of its log at the start, and how it ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from wordrun.common.log import FIRST_RANK, LOG_FILE, LOGGER
from wordrun.train import resume
from wordrun.train.hints import relative, resume_command, spread_context, unused
from wordrun.train.hooks.base import Training
from wordrun.train.metrics import device_name
from wordrun.train.options import accumulation
from wordrun.train.schedule import unfinished_warmup


def start_facts(trainer: Training) -> dict[str, Any]:
    """Return the description of a run besides its config."""
    seed = trainer.cfg.train.seed
    return {
        **trainer.task.facts(),
        "device_name": device_name(trainer.backend.device),
        "dtype": str(trainer.backend.dtype).removeprefix("torch."),
        "global_batch_size": trainer.examples_per_step,
        "gradient_accumulation_steps": accumulation(trainer.cfg, trainer.layout.dp),
        "seeds": {"weights": seed, "data": seed, "rank_0": resume.rank_seed(trainer.cfg, 0)},
    }


def announce(trainer: Training, facts: dict[str, Any]) -> None:
    """Log where and what the run trains; on rank 0."""
    cfg, world, dp = trainer.cfg, trainer.world, trainer.layout.dp
    on = world.host + (f", {world.nodes} nodes" if world.nodes > 1 else "")
    by = f"; launcher {world.launcher} ({world.source})" if world.launcher != "none" else ""
    LOGGER.info("rank 0 of %d on %s%s", world.size, on, by)
    alone = world.size == 1 and world.launcher == "none" and trainer.command
    if alone and (hint := unused(trainer.command, torch.accelerator.device_count(), os.environ)):
        LOGGER.info(hint)
    LOGGER.info(
        "model %s: %s parameters%s, %s, %s on %s",
        cfg.model.name,
        f"{facts['parameters']:,}",
        f", {facts['active_parameters']:,} active" if "active_parameters" in facts else "",
        cfg.train.backend,
        facts["dtype"],
        facts["device_name"],
    )
    ranks = f"{dp} {'data-parallel ' * (dp < world.size)}rank{'s' * (dp > 1)}"
    LOGGER.info(
        "batch: %d %s = %s x %d x %d accumulation%s",
        trainer.examples_per_step,
        trainer.task.unit,
        ranks,
        cfg.model.batch_size,
        accumulation(cfg, dp),
        "".join(f"; {size} until step {step}" for step, size in cfg.train.ramp()),
    )
    if warning := spread_context(cfg, trainer.layout, world.per_node, trainer.memory.shapes):
        LOGGER.warning(warning)
    if "lr_range" not in cfg.hooks and (hint := unfinished_warmup(cfg.optimizer, cfg.train.max_iters)):
        LOGGER.info(hint)  # not a warning: such runs are mostly trials
    ends = [min(step, cfg.train.max_iters) for step, _ in (*cfg.train.ramp(), (cfg.train.max_iters, 0))]
    micro_steps = sum((end - begin) * accumulation(cfg, dp, begin) for begin, end in pairwise([0, *ends]))
    trainer.task.announce(trainer.examples_of(micro_steps))
    LOGGER.info("run directory: %s", relative(trainer.run.path))
    if trainer.start.source is None and (found := resume.unfinished(trainer)):
        again = resume_command(found.path.parents[1], trainer.run.path, trainer.command, world.size)
        LOGGER.info("an unfinished run with these options is at step %d; to continue it:\n  %s", found.step, again)


def announce_end(trainer: Training, error: str, drawn: Sequence[Path], *, failed: bool) -> None:
    """Log how the run ended, with the files ``drawn``.

    Args:
        trainer: the run's trainer.
        error: why it ended early; empty: it did not.
        drawn: plots and report.
        failed: whether that was an exception rather than a signal.
    """
    if error or trainer.stop_reason:
        level, extra = (logging.ERROR, LOG_FILE) if failed else (logging.INFO, FIRST_RANK)
        page = "; more: docs/jobs.md#what-happens-when" if error and not failed else ""
        LOGGER.log(level, "%s (at step %d)%s", error or trainer.stop_reason, trainer.step, page, extra=extra)
    if (loss := trainer.metrics.get("val_loss")) is not None:
        found = {name[4:]: v for name, v in trainer.metrics.items() if name[:4] == "val_" and name != "val_loss"}
        others = ", ".join(f"{name} {value:.{2 if value > 1 else 4}f}" for name, value in found.items())
        LOGGER.info("validation loss %.4f%s", loss, f" ({others})" if others else "")
    for file in drawn:
        LOGGER.info("%s: %s", "report" if file.suffix == ".html" else "plot", relative(file))
    LOGGER.info("run directory: %s", relative(trainer.run.path))
