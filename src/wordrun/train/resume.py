"""Finds the checkpoint from which a run resumes, and loads it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from wordrun import dist
from wordrun.backend.mixed_precision import fast_dtype
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import DamagedError, Folder, LostError
from wordrun.common import slurm
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.common.run_dir import has_run, in_use
from wordrun.common.section import value_text
from wordrun.config.schema import Config, to_plain
from wordrun.dist.collectives import first_text
from wordrun.dist.setup import seed_everything
from wordrun.track.run_json import read as read_record
from wordrun.train import rng
from wordrun.train.hooks.base import CheckpointHook, Training
from wordrun.train.run import Elsewhere, Start, recorded

FREE = {
    "model": {"name", "batch_size", "path", "pretrained", "trust_remote_code"},
    "data": {"path", "url", "offline", "strict", "prepared", "workers", "stage", "prefetch"},
    "tokenizer": {"path", "train_mb"},
    "optimizer": {"gas", "decay_lr"},
    "train": {
        "backend",
        "max_iters",
        "global_batch_size",
        "accumulation",
        "eval_interval",
        "eval_iters",
        "log_interval",
        "sample_interval",
        "sample_tokens",
        "sample_prompt",
        "temperature",
        "top_k",
        "compile",
        "compile_scope",
        "activation_checkpointing",
        "activation_offload",
        "memory_budget_gb",
        "device",
        "check_memory",
        "timeout_s",
        "hang_s",
        "checkpoint_interval",
        "keep_checkpoints",
        "memory_checkpoint_interval",
        "save_best",
        "best_metric",
        "best_mode",
        "async_save",
        "on_save_error",
        "on_nonfinite",
        "resume",
        "init_from",
        "deterministic",
    },
    "backend": None,
    "tracker": None,
    "profiler": None,
    "hooks": None,
    "metrics": None,
}
"""Options that may change when a run is resumed (None: the whole section): steps, intervals, layout, outputs."""

# A new run looks at this many of the newest others for one that could be continued instead.
NEWEST = 5


STATE = {
    "fixed": dict,
    "facts": dict,
    "metrics": dict,
    "seconds": float,
    "position": int,
    "backend_name": str,
    "layout": list,
}
"""What the manifest of a checkpoint must contain for a run to resume from it."""


def find(cfg: Config, world: dist.World, hooks: Sequence[CheckpointHook] = ()) -> Start:
    """Return where the run starts, according to train.resume or the scheduler.

    Every rank must call this; the ranks share the work of verifying files.

    Args:
        cfg: the config.
        world: the ranks.
        hooks: those that may have kept a checkpoint that is at least as new as those on disk.
    """
    run_dir, checkpoints = dist.broadcast(candidates(cfg, restarted()) if world.rank == 0 else None, world)
    newest, why = checkpoints[-1] if checkpoints else None, ""
    on_disk = newest.step if newest else -1
    for hook in hooks if run_dir is not None and continues(cfg, run_dir) else ():
        start = replace(hook.find_start(cfg, world, run_dir, on_disk), source=run_dir, newest=on_disk)
        if start.folder is not None:
            return start
        why = start.why
    if newest is None:
        return Start(run_dir, why=why)
    folder, manifest = open_newest(checkpoints, world)
    if manifest["backend"]["kind"] == "weights":
        raise ConfigError(f"{newest.path} contains only weights: use train.init_from={newest.path}")
    folder.require(manifest, STATE)
    return Start(run_dir, folder, manifest, on_disk, why=why)


def check_source(cfg: Config, world: dist.World, check: Callable[[Config, str], None]) -> None:
    """On rank 0 of a run that starts anew, call ``check`` with the config and train.init_from, if it is set."""
    source = cfg.train.init_from
    if world.rank == 0 and source and candidates(cfg, restarted())[0] is None:
        check(cfg, source)


def restarted() -> bool:
    """Return whether a scheduler or ``launch`` has restarted this run."""
    return bool(os.environ.get("WORDRUN_RESUME")) or slurm.is_restarted(os.environ)


def continues(cfg: Config, run_dir: Path) -> bool:
    """Return whether the run continues the one in ``run_dir`` from its newest checkpoint, rather than a named one."""
    here, named = Path(cfg.run_dir).resolve(), cfg.train.resume or "auto"
    return run_dir == here and (named == "auto" or here not in Path(os.path.expanduser(named)).resolve().parents)


def candidates(cfg: Config, requested: bool) -> tuple[Path | None, list[Folder]]:
    """Return the run to resume (None: a new run) and its eligible checkpoints, oldest first.

    Args:
        cfg: the config.
        requested: whether a scheduler or ``launch`` has restarted this run, which makes train.resume=auto the default.

    Raises:
        UserError: train.resume names no checkpoint, or an older one of the run that it would continue.
    """
    wanted = cfg.train.resume or ("auto" if requested else None)
    if wanted is None:
        return None, []
    here = Path(cfg.run_dir).resolve()
    begun = bool(cfg.run_dir) and has_run(here)
    run_dir, found = (here, []) if wanted == "auto" else folders.locate(Path(wanted))
    named = str(found[-1].path) if found else ""
    restarts = requested and run_dir == here
    if wanted == "auto" or restarts or (begun and recorded(here).get("resumed_from", {}).get("named") == named):
        return (here, folders.all_in(here)) if begun else (None, [])
    if run_dir != here and begun:
        raise ConfigError(
            f"hydra.run.dir={here} already contains a run, which train.resume={wanted} would overwrite: choose another "
            "directory, or resume that run with train.resume=auto",
            page="checkpoints.md#resuming",
        )
    newest = folders.all_in(run_dir)[-1:]
    if run_dir == here and newest and newest[0].step > found[-1].step:
        raise ConfigError(
            f"train.resume={wanted} is step {found[-1].step}, but the run has a checkpoint of step {newest[0].step}: "
            "add hydra.run.dir=DIR to branch off there, or remove the later checkpoints"
        )
    return run_dir, found


def unfinished(trainer: Training) -> Folder | None:
    """Return the last checkpoint of an unfinished run that ``trainer`` could have resumed; of several, the furthest.

    The run must be in the same data's folder in outputs/, not in use, and have the same fixed options, data and batch.
    """
    outputs, here = Path("outputs").absolute(), Path(trainer.cfg.run_dir).absolute()
    if outputs not in here.parents or here.parent == outputs:
        return None
    furthest: Folder | None = None
    runs = outputs.joinpath(here.relative_to(outputs).parts[0]).glob("*/*/")
    for run_dir in sorted(runs, key=lambda path: path.name, reverse=True)[:NEWEST]:
        record, found = read_record(run_dir), folders.all_in(run_dir)[-1:]
        if run_dir == here or not found or record.get("exit_reason") == "finished" or in_use(run_dir):
            continue
        with contextlib.suppress(UserError):
            manifest = found[0].manifest()
            found[0].require(manifest, STATE)
            check_options(trainer, manifest, found[0].path)
            if (furthest.step if furthest else 0) < found[0].step < trainer.cfg.train.max_iters:
                furthest = found[0]
    return furthest


def open_newest(found: list[Folder], world: dist.World) -> tuple[Folder, dict[str, Any]]:
    """Return the newest intact checkpoint in ``found`` and its manifest; all ranks verify the files together.

    Raises:
        DamagedError: none is intact.
    """
    problem = ""
    for folder in reversed(found):
        manifest: dict[str, Any] = {}
        try:
            manifest, mine = folder.check(world.rank, world.size), ""
        except DamagedError as error:
            mine = str(error)
        _, problem = first_text(mine, world.device)
        if not problem:
            return folder, manifest
        if folder is not found[0]:
            LOGGER.warning("%s; trying the previous one", problem, extra=FIRST_RANK)
    raise DamagedError(f"{problem}: this run has no intact checkpoint; start a new run in another hydra.run.dir=DIR")


def resume(trainer: Training, start: Start) -> Start:
    """Seed this rank, and load the checkpoint of ``start``, the result of ``find``, if it has one.

    Returns:
        ``start``, or one of a checkpoint on disk if another one turns out to be incomplete.

    Raises:
        LostError: the other one is incomplete, and there is no checkpoint on disk.
    """
    seed_everything(rank_seed(trainer.cfg, trainer.world.rank))
    if start.folder is None:
        if start.source:
            why = f", and {start.why}" if start.why else ""
            LOGGER.info("starting over at step 0, because no checkpoint is on disk%s", why)
        return start
    path = start.folder.path
    check_options(trainer, start.manifest, path)
    kept = start.elsewhere
    try:
        load(trainer, path, start.manifest, kept)
    except LostError as error:
        other = replace(find(trainer.cfg, trainer.world), why=str(error))
        if other.folder is None:
            remedy = f"the checkpoint stays in {kept.where if kept else path}: fix the cause, and launch again"
            raise LostError(f"{error}, and no checkpoint is on disk; {remedy}") from None
        return resume(trainer, other)
    trainer.state.load_state_dict(start.manifest)
    if kept:
        on_disk = f"the newest checkpoint on disk is of step {start.newest}" if start.newest >= 0 else "none is on disk"
        LOGGER.info("resumed from %s at step %d; %s", kept.where, trainer.step, on_disk)
    else:
        LOGGER.info("resumed from %s at step %d%s", path, trainer.step, f", because {start.why}" if start.why else "")
    return start


def fixed_options(cfg: Config) -> dict[str, Any]:
    """Return the options that a resumed run must share with its checkpoint, by their names."""
    return {
        f"{section}.{name}": value
        for section, values in to_plain(cfg).items()
        if (free := FREE.get(section, set())) is not None
        for name, value in values.items()
        if name not in free
    }


def check_options(trainer: Training, manifest: dict[str, Any], folder: Path) -> None:
    """Check that the options agree with those of the checkpoint in ``folder``.

    Raises:
        ConfigError: options differ; the message lists each with both values.
    """
    ours = {**fixed_options(trainer.cfg), **_facts(trainer)}
    theirs = {**manifest["fixed"], **manifest["facts"]}
    # A checkpoint in bf16 can be resumed on devices that are not fast at bf16.
    theirs["train.dtype"] = fast_dtype(manifest["dtype"], trainer.backend.device)
    different = [
        f"  {name} is {value_text(theirs[name])} in the checkpoint and {value_text(value)} here"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    if different:
        remedy = f"use the checkpoint's options, or only its weights: train.init_from={folder}"
        first = f"the options differ from those of the checkpoint {folder}:"
        raise ConfigError("\n".join([first, *different, remedy]), page="checkpoints.md#resuming")


def load(trainer: Training, folder: Path, manifest: dict[str, Any], elsewhere: Elsewhere | None = None) -> None:
    """Load model, optimizer, hooks and this process's RNG states from the checkpoint in ``folder``.

    Raises:
        LostError: it is ``elsewhere``, and no longer complete.
    """
    world = trainer.world
    # RNG states belong to ranks: a different layout seeds them anew from the step.
    same = manifest["backend_name"] == trainer.cfg.train.backend and manifest["layout"] == list(trainer.layout.shape)
    mine = rng_name(world.rank)
    states = manifest["hooks"]
    fetch = {} if elsewhere is None else {"fetch": elsewhere.fetch}
    tensors = trainer.hooks.tensors(states or {})
    own = trainer.backend.load(folder, manifest["backend"], [mine] if same else [], tensors, **fetch)
    if elsewhere is not None:
        elsewhere.release()
    if same:
        try:
            rng.restore(rng.from_tensor(own[mine]))
        except Exception as error:  # it may contain anything
            raise DamagedError(f"{folder} is damaged: {mine}: {first_line(error)}") from None
    else:
        seed_everything(rank_seed(trainer.cfg, world.rank) + manifest["step"] * world.size)
    trainer.hooks.load(trainer, states)


def rank_seed(cfg: Config, rank: int) -> int:
    """Return the seed of a rank's own random numbers: dropout, which no two ranks apply to the same elements."""
    return cfg.train.seed + 1 + rank


def rng_name(rank: int) -> str:
    """Return the name of a rank's RNG states in a checkpoint."""
    return f"rng.{rank}"


def own_tensors(trainer: Training) -> dict[str, Tensor]:
    """Return what only this rank saves."""
    return {rng_name(trainer.world.rank): rng.to_tensor(rng.capture())}


def manifest(trainer: Training) -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest, besides its files."""
    cfg = trainer.cfg
    return {
        **trainer.state.state_dict(),
        **trainer.task.manifest(trainer.state.position),
        "time": time.time(),
        "backend_name": cfg.train.backend,
        "layout": list(trainer.layout.shape),
        "ranks": trainer.world.size,
        "dtype": trainer.cfg.train.dtype,
        "config": to_plain(cfg),
        "fixed": fixed_options(cfg),
        "facts": _facts(trainer),
        "trackers": trainer.run.tracker_states(),
        "run": trainer.run.checkpointed(),
        "hooks": trainer.hooks.states(),
    }


def _facts(trainer: Training) -> dict[str, Any]:
    """Return the values, besides options, that determine the order and meaning of the data."""
    batch = {f"the global batch (train.global_batch_size), in {trainer.task.unit},": trainer.examples_per_step}
    inner = {
        f"the checkpoint from which wordrun.load has made {prefix[:-1]}": model.loaded_from.checkpoint
        for part in trainer.backend.parts
        for prefix, model in part.frozen_models().items()
        if model.loaded_from
    }
    return {**batch, **inner, **trainer.task.fixed()}
