"""Checkpoints in memory, in addition to those on disk: a hook keeps them, and finds the newest one after a fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from wordrun import dist
from wordrun.backend.base import Save, Writer
from wordrun.checkpoint.folder import Folder, LostError, file_of
from wordrun.checkpoint.index import INDEX
from wordrun.checkpoint.memory.copies import MemoryCheckpoints
from wordrun.common.run_dir import MANIFEST
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.collectives import gather_json
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
        found, why = newest(self.saves, record, max(on_disk, 0))
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


@dataclass
class InMemory:
    """A checkpoint whose shares are all in the memory of some node."""

    saves: MemoryCheckpoints
    name: str
    step: int
    holders: Mapping[int, Sequence[int]]
    """For each rank that wrote a share, the nodes that have it."""
    where: str = "memory"
    """See ``train.run.Elsewhere``."""
    _brought: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Folder:
        """This node's part."""
        return Folder(self.saves.memory.path / self.name, self.step)

    def fetch(self, files: Iterable[str]) -> None:
        """Bring files of the checkpoint to this node, if it lacks them; all ranks must call this.

        Args:
            files: names of the files that this rank needs.

        Raises:
            LostError: a node cannot get a file.
        """
        nodes, world = self.saves.nodes, self.saves.world
        ranks = {file_of(rank): rank for rank in self.holders}
        needs = gather_json(sorted(ranks[file] for file in files), world.device)
        here = {rank for local in nodes.local for rank in needs[local]}
        lacking = sorted(rank for rank in here if nodes.here not in self.holders[rank])

        def fetch() -> None:
            for rank in lacking[nodes.local_index :: len(nodes.local)]:
                holders = self.holders[rank]
                address = nodes.address(holders[nodes.here % len(holders)])
                self._brought.append(self.saves.fetch(address, self.name, rank))

        if problem := self.saves.problem_of(fetch):
            raise LostError(f"the checkpoint of step {self.step} in memory cannot be read: {problem}")

    def release(self) -> None:
        """Remove what ``fetch`` has fetched, once all ranks have read it."""
        self.saves.problem_of(lambda: None)
        for path in self._brought:
            path.unlink(missing_ok=True)

    def bring_manifest(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Fetch manifest and index if this node has none."""
        nodes, path = self.saves.nodes, self.folder.path
        if self.saves.acts and self.name not in offers[self.saves.world.rank]:
            path.mkdir(exist_ok=True)
            holder = next(node for node, ranks in enumerate(nodes.ranks) if self.name in offers[ranks[0]])
            for file in (INDEX, MANIFEST):
                self.saves.peers.fetch(nodes.address(holder), f"{self.name}/{file}", path / file)


def newest(saves: MemoryCheckpoints, record: Mapping[str, Any], least: int) -> tuple[InMemory | None, str]:
    """Return the newest checkpoint in memory of which no share is lost, or why there is none.

    All ranks must call this; they share the work of verifying files.

    Args:
        saves: this run's checkpoints in memory.
        record: run.json of the run's last launch; only rank 0's is used.
        least: the step of the newest checkpoint on disk; an older one in memory is of no use.
    """
    world, nodes = saves.world, saves.nodes
    # Excludes checkpoints of an earlier run in the same directory, and of a launch that a later one did not continue.
    last = record.get("start"), record.get("resumed_from", {}).get("memory")
    start, resumed = dist.broadcast(last, world)
    offers = gather_json(saves.memory.offers() if saves.acts else {}, world.device)
    known = {
        name: facts for offer in offers for name, facts in offer.items() if facts["run"] == start or name == resumed
    }
    why = "no checkpoint of this run is in memory"
    for name, facts in sorted(known.items(), key=lambda pair: -pair[1]["step"]):
        if facts["step"] < least:
            return None, f"the newest one in memory is of step {facts['step']}"
        damaged = gather_json(saves.memory.verify(name, nodes.local_index, len(nodes.local)), world.device)
        holders: dict[int, list[int]] = {}
        for node, ranks in enumerate(nodes.ranks):
            bad = {each for rank in ranks for each in damaged[rank]}
            for rank in {*offers[ranks[0]].get(name, {}).get("ranks", ())} - bad:
                holders.setdefault(rank, []).append(node)
        if missing := [rank for rank in range(facts["shards"]) if rank not in holders]:
            shown = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            shares = "share of rank" if len(missing) == 1 else "shares of ranks"
            why = f"the checkpoint of step {facts['step']} in memory lacks the {shares} {shown}"
            continue
        found = InMemory(saves, name, facts["step"], holders)
        if problem := saves.problem_of(partial(found.bring_manifest, offers)):
            why = f"the checkpoint of step {facts['step']} in memory cannot be read: {problem}"
            continue
        return found, ""
    return None, why
