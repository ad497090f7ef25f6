"""Checkpoints in the nodes' memory: each rank's share, and on the next node a copy of it, for restarts after failures.

How a checkpoint is written; training waits only for step 1:

1. Every rank copies its share into a file in its node's memory.
2. When all files are complete, each node adds index and manifest, and gives its part the final name.
3. When all nodes have done so, they remove the previous checkpoint.
4. Ranks fetch copies of the shares of the node before theirs.

So at any moment, the memory of the nodes holds all shares of one checkpoint, and ranks may be killed at any time. A
node may be lost at any time except during step 4: keeping the previous checkpoint until then would take a third more
memory.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wordrun import dist
from wordrun.backend.base import Save, Writer
from wordrun.checkpoint import checksums, folder as folders
from wordrun.checkpoint.folder import file_of
from wordrun.checkpoint.index import INDEX, StoredTensor
from wordrun.checkpoint.memory import file, node as node_memory
from wordrun.checkpoint.memory.node import NodeMemory
from wordrun.checkpoint.memory.peers import NodeGroups, Peers
from wordrun.checkpoint.shards import TensorShard
from wordrun.common import files
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.collectives import first_text, gather_json
from wordrun.plan.memory_fit import readable
from wordrun.train.checkpoint import BackgroundSaves, SaveError

# A run that ends waits at most this long [s] for the checkpoint being written.
LAST_SAVE_S = 5.0
# More bytes than any node has: asking for them removes everything that is not needed.
ALL = 2**62


class MemoryCheckpoints(BackgroundSaves):
    """Writes the checkpoints of a run to memory. All ranks must make the same calls.

    Raises:
        ConfigError: a rank cannot write to its node's memory, or cannot be reached by others.
    """

    def __init__(self, cfg: Config, world: World) -> None:
        super().__init__(cfg.train, world)
        self.interval = cfg.train.memory_checkpoint_interval
        secret, self._launch = dist.broadcast((secrets.token_hex(16), secrets.token_hex(4)), world)

        def start() -> None:
            self.memory = NodeMemory(Path(cfg.run_dir).resolve())
            self.peers = Peers(self.memory.path, world, secret)

        if problem := self.problem_of(start):
            raise ConfigError(self._refusal(problem), page="faults.md#checkpoints-in-memory")
        self.nodes = NodeGroups(self.memory, self.peers.address, world)
        self._number = 0
        self._own = 0
        """Bytes of the shares of this node's ranks; 0: not known yet."""
        self._lacks = self._lacks_copies = False
        """Whether the last checkpoint, or its copies, could not be kept; each is warned about once."""

    @property
    def acts(self) -> bool:
        """Whether this rank acts for its node."""
        return self.nodes.local_index == 0

    def _refusal(self, problem: str) -> str:
        remedy = "set it to 0 to train without checkpoints in memory"
        return f"train.memory_checkpoint_interval={self.interval}: {problem}; {remedy}"

    def problem_of(self, action: Callable[[], Any]) -> str:
        """Run ``action`` in the main thread; return the first problem of any rank, or an empty string."""
        problem = ""
        try:
            action()
        except (OSError, UserError) as error:
            problem = f"{self.world.host}: {error if isinstance(error, UserError) else first_line(error)}"
        return first_text(problem, self.world.device)[1]

    def check(self, begin: Callable[[Writer], Save], *, resumed: bool) -> None:
        """Compare what checkpoints need with the memory of each node, once the first step has allocated all state.

        Args:
            begin: ``Backend.begin_save`` with its other arguments.
            resumed: whether the run has resumed, so that memory may be short only temporarily.

        Raises:
            ConfigError: a node has less, and the run is new or train.on_save_error=stop.
        """
        if self._own:
            return
        size = 0

        def measure(shards: Sequence[TensorShard], *_: Any) -> Callable[[], None]:
            nonlocal size
            size = file.size_of(shards)
            return lambda: None

        begin(measure)
        sizes = gather_json(size, self.world.device)
        shares = [sum(sizes[rank] for rank in ranks) for ranks in self.nodes.ranks]
        self._own, other = shares[self.nodes.here], shares[self.nodes.here - 1] if len(shares) > 1 else 0
        needed = 2 * self._own + other

        def compare() -> None:
            if self.acts:
                self.memory.clean(needed)
                if (room := self.memory.room()) < needed:
                    what = f"this node's share of the state, {readable(self._own)}, twice while the next one is written"
                    copy = f", and a copy of another node's, {readable(other)}" if other else ""
                    raise UserError(
                        f"checkpoints in memory need {readable(needed)} in {self.memory.root} ({what}{copy}), but "
                        f"only {readable(room)} are free"
                    )

        if problem := self.problem_of(compare):
            if not resumed or self.train.on_save_error == "stop":
                raise ConfigError(self._refusal(problem), page="faults.md#checkpoints-in-memory")
            text = "%s; training continues without checkpoints in memory, and retries every %d steps"
            LOGGER.warning(text, problem, self.interval, extra=FIRST_RANK)
            self._lacks = True
            return
        where = f"every {self.interval} steps in {self.memory.root}, {readable(self._own + other)} on this node"
        copies = "with a copy on the next node" if other else "without copies, because all ranks are on one node"
        LOGGER.info("checkpoints in memory: %s, %s", where, copies)

    def save(self, step: int, begin: Callable[[Writer], Save], manifest: dict[str, Any]) -> None:
        """Copy the state, and complete the checkpoint in the background; ``wait`` for the previous one first.

        Args:
            step: optimizer steps so far.
            begin: ``Backend.begin_save`` with its other arguments.
            manifest: what the manifest contains besides the files; that of rank 0 is used.
        """
        self.wait()
        name = node_memory.name_of(step, self._launch, self._number)
        self._number += 1
        tensors: dict[str, Any] = {}

        def write(shards: Sequence[TensorShard], rank: int, stored: Mapping[str, StoredTensor]) -> Callable[[], None]:
            tensors.update((name, tensor.plain()) for name, tensor in stored.items())
            return file.write(self.memory.draft(name), shards, rank, stored)

        save, problem = None, ""
        try:
            if (free := self.memory.free()) < self._own:
                raise OSError(f"needs {readable(self._own)}, but only {readable(free)} are free")
            save = begin(write)
        except OSError as error:
            problem = f"{self.memory.root} on {self.nodes.host}: {first_line(error)}"
        self._start("memory checkpoint", self._write, step, name, save, problem, tensors, manifest)

    def wait(self) -> None:
        """Wait for the checkpoint being written."""
        self.join(None)
        self.raise_failure()

    def _write(
        self, step: int, name: str, save: Save | None, problem: str, tensors: dict[str, Any], manifest: dict[str, Any]
    ) -> None:
        try:
            complete = partial(save.write, self.memory.path) if save else None
            found = self._together(step, name, complete, problem, tensors or None)
            content: dict[str, Any] = {}
            if save is not None and self.world.rank == 0:
                content = {"manifest": {"step": step, **manifest, "backend": save.facts, "shards": save.shards}}
                content["index"] = {key: facts for stage in found for key, facts in stage.items()}
            content = json.loads(self._agreement.send(json.dumps(content), receives=self.acts) or "{}")
            self._together(step, name, partial(self._publish, name, **content) if self.acts else None)
            if self.acts:
                self.memory.keep_only(name)
            if self._lacks:
                LOGGER.info("checkpoints are kept in memory again, from step %d on", step)
            self._lacks = False
            self._copy(step, name)
        except Exception as error:
            self._error = error

    def _warn(self, error: SaveError) -> None:
        if not self._lacks:
            super()._warn(error)
        self._lacks = True

    def _together(
        self, step: int, name: str, action: Callable[[], Any] | None, problem: str = "", value: Any = None
    ) -> list[Any]:
        """Run ``action``, unless there is a ``problem``; if any rank has one, remove the checkpoint and raise on all.

        Returns:
            On rank 0, the ``value`` of all ranks that have one.
        """
        try:
            if action is not None and not problem:
                action()
        except (OSError, UserError) as error:
            problem = f"{self.nodes.host}: {first_line(error)}"
        problem, values = self._agreement.meet(problem, value)
        if problem:
            if self.acts:
                self.memory.discard(name)
            raise SaveError(f"the checkpoint of step {step} could not be kept in memory ({problem})")
        return values

    def _publish(self, name: str, manifest: dict[str, Any], index: dict[str, Any]) -> None:
        draft = self.memory.draft(name)
        files.write(draft / INDEX, json.dumps(index))
        folders.write_manifest(draft, {**manifest, "files": folders.describe(draft, [INDEX])})
        self.memory.publish(name)

    def _copy(self, step: int, name: str) -> None:
        """Fetch this rank's share of the copies, and wait until all ranks have theirs."""
        problem = ""
        try:
            for rank in self.nodes.sources:
                self.fetch(self.nodes.addresses[rank], name, rank)
        except OSError as error:
            problem = f"{self.nodes.host}: {first_line(error)}"
        problem, _ = self._agreement.meet(problem)
        warned, self._lacks_copies = self._lacks_copies, bool(problem)
        if problem and not warned:
            LOGGER.warning(
                "the checkpoint of step %d is in memory, but without a copy on another node (%s); training continues",
                step,
                problem,
                extra=FIRST_RANK,
            )

    def fetch(self, address: Any, name: str, rank: int) -> Path:
        """Fetch the share of ``rank`` in the checkpoint ``name``, and return its file.

        Raises:
            OSError: it cannot be fetched, or is damaged.
        """
        path = self.memory.path / name / file_of(rank)
        fetch = partial(self.peers.fetch, address, f"{name}/{path.name}", path)
        try:
            fetch()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.memory.clean(ALL)
            fetch()
        if problem := checksums.problem(path):
            path.unlink()
            raise OSError(problem)
        return path

    def end(self) -> None:
        """Remove the run's checkpoints from memory: the disk has all that is needed."""
        self.join(None)
        if self.acts:
            self.memory.remove()

    def close(self) -> None:
        """Leave the checkpoints in memory for a later launch, and release everything else."""
        self.join(LAST_SAVE_S)
        self.peers.close()
        self.memory.close()
