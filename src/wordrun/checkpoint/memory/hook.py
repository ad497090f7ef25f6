"""Checkpoints in memory, in addition to those on disk."""

from __future__ import annotations

from wordrun.backend.base import MemoryWriter, Save
from wordrun.checkpoint.memory.copies import MemoryCheckpoints
from wordrun.dist.hang import watch
from wordrun.train import hook_checks, resume
from wordrun.train.hooks.standard import Checkpoint
from wordrun.train.training import Training, due


class CheckpointAndMemory(Checkpoint):
    """Also keeps a checkpoint in memory every train.memory_checkpoint_interval steps."""

    def __init__(self, in_memory: MemoryCheckpoints) -> None:
        self._in_memory = in_memory

    def after_step(self, trainer: Training) -> None:
        """Start saving to memory and to disk if due."""

        def begin(memory_writer: MemoryWriter) -> Save:
            return trainer.backend.begin_save(resume.own_tensors(trainer), hook_checks.tensors(trainer), memory_writer)

        self._in_memory.raise_failure()
        self._in_memory.check(begin, resumed=trainer.start.source is not None)
        if due(trainer.step, self._in_memory.interval) and not trainer.done:
            with watch.phase("saving a checkpoint in memory", watch.SLOW):
                trainer.meter.score(trainer.state)
                manifest = {**resume.manifest(trainer), "run": trainer.run.record.get("start")}
                self._in_memory.save(trainer.step, begin, manifest)
        super().after_step(trainer)

    def at_end(self, trainer: Training) -> None:
        """Remove the checkpoints from memory once the last one is on disk."""
        super().at_end(trainer)
        self._in_memory.end()
