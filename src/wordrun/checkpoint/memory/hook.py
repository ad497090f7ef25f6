"""Checkpoints in memory, in addition to those on disk."""

from __future__ import annotations

from pathlib import Path

from wordrun.backend.base import Save, Writer
from wordrun.checkpoint.memory import resume as memory_resume
from wordrun.checkpoint.memory.copies import MemoryCheckpoints
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.hang import watch
from wordrun.train import resume
from wordrun.train.hooks import checks as hook_checks
from wordrun.train.hooks.base import CheckpointHook, Training, due
from wordrun.train.run import Start, recorded


class MemoryCheckpoint(CheckpointHook):
    """Keeps a checkpoint in memory every train.memory_checkpoint_interval steps, and finds it again after a fault."""

    saves: MemoryCheckpoints

    def open(self, cfg: Config, world: World) -> None:
        """Reserve memory on all nodes."""
        self.saves = MemoryCheckpoints(cfg, world)

    def find_start(self, cfg: Config, world: World, run_dir: Path, on_disk: int) -> Start:
        """Return the newest checkpoint in memory, if it is at least as new as the one on disk."""
        record = recorded(run_dir) if world.rank == 0 else {}
        found, why = memory_resume.newest(self.saves, record, max(on_disk, 0))
        if found is None:
            return Start(why=why)
        return Start(folder=found.folder, manifest=found.folder.manifest(), elsewhere=found)

    def after_step(self, trainer: Training) -> None:
        """Start saving to memory if due."""

        def begin(writer: Writer) -> Save:
            return trainer.backend.begin_save(resume.own_tensors(trainer), hook_checks.tensors(trainer), writer)

        self.saves.raise_failure()
        self.saves.check(begin, resumed=trainer.start.source is not None)
        if due(trainer.step, self.saves.interval) and not trainer.done:
            with watch.phase("saving a checkpoint in memory", watch.SLOW):
                trainer.meter.score(trainer.state)
                manifest = {**resume.manifest(trainer), "run": trainer.run.record.get("start")}
                self.saves.save(trainer.step, begin, manifest)

    def at_end(self, trainer: Training) -> None:
        """Remove the checkpoints from memory: the last one is on disk."""
        self.saves.end()

    def at_stop(self, trainer: Training) -> None:
        """Remove the checkpoints from memory if that of the last step is on disk."""
        if trainer.checkpoints.written == trainer.step:
            self.saves.end()

    def release(self) -> None:
        """Leave the checkpoints in memory for a later launch."""
        if "saves" in vars(self):
            self.saves.close()
