"""A run goes on from a checkpoint, its own or another's, or takes its first weights from one."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from wordrun import dist
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.folder import DamagedError, Folder
from wordrun.checkpoint.saved import find
from wordrun.config import Config, to_plain
from wordrun.dist.setup import seed_everything
from wordrun.errors import ConfigError
from wordrun.log import FIRST_RANK, LOGGER
from wordrun.model import meta_model, pretrained
from wordrun.train import streams
from wordrun.train.run import Start, read_record

if TYPE_CHECKING:
    from wordrun.train.trainer import Trainer

FREE = {
    "model": {"name", "batch_size"},
    "data": {"path", "url", "offline", "prepared", "workers", "stage", "ahead"},
    "tokenizer": {"path", "train_mb"},
    "optimizer": {"gas", "decay_lr"},
    "train": {
        "backend", "max_iters", "global_batch_size", "eval_interval", "eval_iters", "log_interval", "sample_interval",
        "sample_tokens", "sample_prompt", "temperature", "top_k", "compile", "activation_checkpointing", "device",
        "timeout_s", "checkpoint_interval", "keep_checkpoints", "save_best", "async_save", "on_save_error",
        "on_nonfinite", "resume", "init_from",
    },
    "backend": None, "tracker": None, "profiler": None,
}  # fmt: skip
"""Options that may change when a run is continued (None: all of a section): steps, intervals, layout, outputs."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run goes on."""

    folder: Folder | None
    """None: the run has none yet, and begins again in its place."""
    manifest: dict[str, Any]
    run_dir: Path
    """Of the run that wrote it."""
    known: int = -1
    """The step of the last checkpoint of that run, whole or not."""


def look(cfg: Config, world: dist.World) -> Resumed | None:
    """Return what the run goes on from, where train.resume or the scheduler asks for that; None: a fresh start.

    Every rank must call this, and all check the checkpoint's files together.
    """
    requested = bool(os.environ.get("WORDRUN_RESUME")) or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    found = dist.share(candidates(cfg, requested) if world.rank == 0 else None, world)
    if found is None:
        return None
    run_dir, those = found
    known = those[-1].step if those else -1
    if not those:
        return Resumed(None, {}, run_dir, known)  # the same place, from the beginning
    resumed = open_newest(those, world)
    if resumed.manifest["backend"]["kind"] == "weights":
        raise ConfigError(f"{those[-1].path} holds weights alone: use train.init_from={those[-1].path}")
    return replace(resumed, run_dir=run_dir, known=known)


def take_up(trainer: Trainer, resumed: Resumed) -> None:
    """Let a new trainer go on from where ``look`` has found that it should."""
    if resumed.folder is not None:
        check_same(trainer.cfg, unchanging(trainer), resumed)
        load(trainer, resumed)
        LOGGER.info("going on after %d steps, from %s", trainer.step, resumed.folder.path)
    states = resumed.manifest.get("trackers", {})
    named = str(resumed.folder.path) if resumed.folder else ""
    trainer.start = Start(trainer.step, resumed.run_dir, states, named, resumed.known)


def load(trainer: Trainer, resumed: Resumed) -> None:
    """Take the state of training from a checkpoint; the random streams of this process, too."""
    assert resumed.folder is not None
    manifest = resumed.manifest
    # Streams belong to ranks: with others there is nothing to continue, and they begin anew from the step.
    backend_name, layout = trainer.cfg.train.backend, list(trainer.layout.shape)
    same = manifest["backend_name"] == backend_name and manifest["layout"] == layout
    mine = own_streams(trainer)
    own = trainer.backend.load(resumed.folder.path, manifest["backend"], [mine] if same else [])
    if same:
        streams.restore(streams.from_tensor(own[mine]))
    else:
        seed_everything(trainer.rank_seed + manifest["step"] * trainer.world.size)
    trainer.step, trainer.position = manifest["step"], manifest["position"]
    trainer.metrics, trainer.seconds_before = dict(manifest["metrics"]), manifest["seconds"]


def own_streams(trainer: Trainer) -> str:
    """Return the name of this rank's random streams in a checkpoint."""
    return f"streams.{trainer.world.rank}"


def manifest(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint says of the run, besides its files."""
    cfg, keep = trainer.cfg, ("loss", "val_loss", "best_val_loss")
    return {
        "position": trainer.position, "tokens": trainer.position * cfg.model.block_size,
        "seconds": trainer.meter.seconds(), "time": time.time(),
        "metrics": {name: trainer.metrics[name] for name in keep if name in trainer.metrics},
        "backend_name": cfg.train.backend, "layout": list(trainer.layout.shape), "ranks": trainer.world.size,
        "vocab_size": trainer.corpus.tokenizer.vocab_size, "config": to_plain(cfg), "config_hash": config_hash(cfg),
        "fixed": fixed(cfg), "facts": unchanging(trainer), "trackers": trainer.run.tracker_states(),
    }  # fmt: skip


def unchanging(trainer: Trainer) -> dict[str, Any]:
    """Return what the order and the meaning of the data depend on, besides the options."""
    return {
        "the global batch (train.global_batch_size), in sequences,": trainer.sequences_per_step,
        "the vocabulary": trainer.corpus.tokenizer.vocab_size,
        "the number of training tokens": len(trainer.corpus.train),
    }


def candidates(cfg: Config, requested: bool) -> tuple[Path, list[Folder]] | None:
    """Return the run to continue and its checkpoints that may be meant, the oldest first; None: there is no run yet.

    Args:
        cfg: the config.
        requested: whether a scheduler or ``launch`` has begun this run anew, which makes train.resume=auto the default.

    Raises:
        UserError: train.resume names no checkpoint, or one that is not the newest of the run that it would continue.
    """
    wish = cfg.train.resume or ("auto" if requested else None)
    if wish is None:
        return None
    here = Path(cfg.run_dir).resolve()
    begun = read_record(here) if cfg.run_dir else {}
    run_dir, found = (here, []) if wish == "auto" else folders.locate(Path(wish))
    named = str(found[-1].path) if found else ""
    again = requested and run_dir == here
    if wish == "auto" or again or (begun and begun.get("resumed_from", {}).get("named") == named):
        return (here, folders.all_in(here)) if begun else None
    if run_dir != here and begun:
        raise ConfigError(
            f"hydra.run.dir={here} holds a run already, which train.resume={wish} would overwrite: choose another "
            "directory, or continue that one by train.resume=auto"
        )
    newest = folders.all_in(run_dir)[-1:]
    if run_dir == here and newest and newest[0].step > found[-1].step:
        raise ConfigError(
            f"train.resume={wish} is after {found[-1].step} steps, but the run has come to {newest[0].step}: add "
            f"hydra.run.dir=DIR to branch off there, or remove the later checkpoints"
        )
    return run_dir, found


def open_newest(found: list[Folder], world: dist.World) -> Resumed:
    """Return the newest of the checkpoints ``found`` that is whole; all ranks check the files together.

    Raises:
        DamagedError: none is.
    """
    problem = ""
    for folder in reversed(found):
        manifest: dict[str, Any] = {}
        try:
            manifest = folder.check_sizes()
            mine = folder.check_content(sorted(manifest["files"])[world.rank :: world.size], manifest)
        except DamagedError as error:
            mine = str(error)
        problems: list[Any] = [None] * world.size
        torch.distributed.all_gather_object(problems, mine)
        problem = next((each for each in problems if each), "")
        if not problem:
            return Resumed(folder, manifest, folder.path.parent.parent)
        if folder is not found[0]:
            LOGGER.warning("%s; taking the one before it", problem, extra=FIRST_RANK)
    raise DamagedError(f"{problem}: no checkpoint of this run is whole; start anew in another hydra.run.dir=DIR")


def fixed(cfg: Config) -> dict[str, Any]:
    """Return the options that a continued run must share with its checkpoint, by their names."""
    return {
        f"{section}.{name}": value
        for section, values in to_plain(cfg).items()
        if FREE.get(section, set()) is not None
        for name, value in values.items()
        if name not in (FREE.get(section) or set())
    }


def config_hash(cfg: Config) -> str:
    """Return a hash of the options that a continued run must share."""
    return hashlib.sha256(json.dumps(fixed(cfg), sort_keys=True).encode()).hexdigest()[:16]


def check_same(cfg: Config, facts: Mapping[str, Any], resumed: Resumed) -> None:
    """Refuse to continue a run with options that contradict its checkpoint.

    Args:
        cfg: the options.
        facts: what else has to be the same, by the names that people know it by.
        resumed: the checkpoint.

    Raises:
        ConfigError: names each option with both values.
    """
    theirs = {**resumed.manifest["fixed"], **resumed.manifest["facts"]}
    # Before there were schedules, an option said so.
    theirs.setdefault("schedule.name", "cosine" if theirs.get("optimizer.decay_lr", True) else "constant")
    # An option that has come since then has its default in both.
    folder = resumed.folder.path if resumed.folder else resumed.run_dir
    different = [
        f"  {name} is {theirs[name]} in the checkpoint and {value} here"
        for name, value in {**fixed(cfg), **facts}.items()
        if name in theirs and theirs[name] != value
    ]
    if different:
        raise ConfigError(
            "\n".join([
                f"the options contradict the checkpoint {folder}:", *different,
                f"use the checkpoint's, or its weights alone: train.init_from={folder}",
            ])
        )  # fmt: skip


def first_weights(cfg: Config, vocab_size: int, world: dist.World) -> Mapping[str, torch.Tensor] | None:
    """Return what train.init_from names: weights by name, each read when it is asked for; None: random ones.

    Raises:
        UserError: there are none.
        ConfigError: they are another model's.
    """
    source = cfg.train.init_from
    if source is None:
        return None
    if source.startswith("hf:"):
        folder = dist.share(pretrained.fetch(source.removeprefix("hf:")) if world.rank == 0 else None, world)
        return pretrained.open_weights(folder, cfg.model, vocab_size)
    # One rank checks all files, and says which checkpoint is whole.
    saved = find(dist.share(find(Path(source)).folder if world.rank == 0 else None, world), check=False)
    theirs = {name: p.shape for name, p in meta_model(saved.config.model, saved.vocab_size).weights()}
    ours = {name: p.shape for name, p in meta_model(cfg.model, vocab_size).weights()}
    different = [
        f"  {name} has the shape {_shown(theirs.get(name))} there and {_shown(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        raise ConfigError(
            "\n".join([f"train.init_from={source} holds another model than model={cfg.model.name}:",
                       *different[:8], *(["  ..."] if different[8:] else [])])
        )  # fmt: skip
    return saved.weights()


def _shown(shape: torch.Size | None) -> str:
    return "x".join(map(str, shape)) if shape is not None else "none"
