"""Determine which rank this process is from the environment alone, without torch or MPI.

Only one family of variables in ``FAMILIES`` is read: with a mixture, a nested process could take itself for rank 0.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

from wordrun.common.errors import WorldError
from wordrun.common.slurm import expand_counts, is_task


@dataclass(frozen=True)
class World:
    """One process of a job, and its position among the others."""

    rank: int = 0
    """Index among all processes, 0 to size - 1."""
    size: int = 1
    """Number of processes in the job."""
    local_rank: int = 0
    """Index among the processes of this node; chooses the device."""
    local_size: int = 1
    """Number of processes on this node."""
    node: int = 0
    """Index of this node."""
    nodes: int = 1
    """Number of nodes."""
    counts: tuple[int, ...] = ()
    """Number of processes on each node; empty: not known."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in rank order, as far as known; at least this one's."""
    device: str = "cpu"
    """Torch device of this process, such as ``cuda:3``; set by ``setup()``."""
    launcher: str = "none"
    """The launcher: torchrun, srun, pals, openmpi, hydra, mvapich, mpi, local or none."""
    source: str = "none of the known launchers' variables is set"
    """The variables from which this was read."""

    @property
    def host(self) -> str:
        """Name of this node."""
        return self.hosts[self.node] if self.node < len(self.hosts) else socket.gethostname()

    @property
    def per_node(self) -> int:
        """The number of ranks on each node; if nodes differ, the greatest common divisor of their numbers."""
        return math.gcd(*self.counts) or self.local_size

    def node_of(self, rank: int) -> int:
        """Return the index of the node of another process."""
        ends = accumulate(self.counts)
        return next((node for node, end in enumerate(ends) if rank < end), rank // self.local_size)

    @property
    def in_step(self) -> bool:
        """Whether this process was started in a SLURM step."""
        return any(family.in_steps for family in FAMILIES if family.launcher == self.launcher)

    @property
    def by_mpi(self) -> bool:
        """Whether an MPI launcher started this process."""
        return self.launcher == TRACED or any(family.mpi for family in FAMILIES if family.launcher == self.launcher)

    def __str__(self) -> str:
        return (
            f"[{self.device}] [rank {self.rank} of {self.size}] "
            f"[local rank {self.local_rank} of {self.local_size}] [node {self.node} of {self.nodes}]"
        )


@dataclass(frozen=True)
class Family:
    """The variables of one launcher. An empty name: the launcher does not set it."""

    launcher: str
    needs: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    in_steps: bool = False
    """Whether SLURM sets these variables for a step. Processes that another launcher starts in a step inherit them, and
    a job's own shell has some of them. The number of ranks on each node is a list, as in 4(x2),3."""
    in_slurm: bool = True
    """Whether it may run in a SLURM job."""
    mpi: bool = False
    """Whether it is MPI's own launcher, so that MPI can verify what the variables say."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """The names of the variables that identify the rank."""
        return self.rank, self.size, self.local_rank

    def present(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process with environment ``env``."""
        if not all(env.get(name) for name in self.needs):
            return False
        return not self.in_steps or is_task(env)

    def contradicts(self, other: Family, env: Mapping[str, str]) -> bool:
        """Return whether both families identify the rank, and differ."""
        pairs = [(env.get(mine), env.get(theirs)) for mine, theirs in zip(self.identity, other.identity, strict=True)]
        return any(mine != theirs for mine, theirs in pairs if mine and theirs)

    def is_single(self, env: Mapping[str, str]) -> bool:
        """Return whether its launcher started one process: a shell, or a step that holds one."""
        return env.get(self.size) == "1"

    def says(self, env: Mapping[str, str]) -> str:
        """Return its values, for a message."""
        values = " ".join(f"{name}={env[name]}" for name in self.identity if env.get(name))
        return f"{'launch' if self is LOCAL else self.launcher} says {values}"


TORCHRUN = Family(
    "torchrun",
    needs=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
)
LOCAL = replace(TORCHRUN, launcher="local", needs=("WORDRUN_LAUNCHER", *TORCHRUN.needs[:4]), node="NODE_RANK")
# What scripts export for init_process_group("env://"); too little to be a family.
PLAIN = Family("the environment", needs=(), rank="RANK", size="WORLD_SIZE", local_rank="", local_size="")
FAMILIES = (
    Family(
        "srun",
        needs=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        in_steps=True,
    ),
    Family(
        "pals",  # sets no world size under PALS_PMI=pmix (Aurora)
        needs=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank="PALS_RANKID",
        size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        node="PALS_NODEID",
        in_slurm=False,
        mpi=True,
    ),
    Family(
        "openmpi",
        needs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        mpi=True,
    ),
    Family(
        "hydra",  # MPICH's and Intel MPI's mpiexec
        needs=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mpi=True,
    ),
    Family(
        "mvapich",
        needs=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        mpi=True,
    ),
)
TRACED = "mpi"
"""The launcher's name in a World if it sets ``MPI_TRACES``, but no complete family. MPI itself knows the rank."""
MPI_TRACES = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK")


def discover(env: Mapping[str, str] | None = None) -> World:
    """Return this process's World as far as ``env`` (default: ``os.environ``) describes it.

    The order is torchrun, ``launch`` (``WORDRUN_LAUNCHER`` names the family), srun, PALS, OpenMPI, Hydra,
    MVAPICH, traces of another MPI launcher (``launcher="mpi"``: ask MPI), else a single process.

    Raises:
        WorldError: a family is present but incomplete or out of range, or contradicts another one or ``launch``.
    """
    env = os.environ if env is None else env
    if TORCHRUN.present(env):
        _check_agents(env)
        return _read(TORCHRUN, env)
    named = env.get("WORDRUN_LAUNCHER", "")
    by_launch = [family for family in (LOCAL, *FAMILIES) if family.launcher == named]
    present = [family for family in (*by_launch, *FAMILIES) if family.present(env)]
    if present:
        chosen = present[0] if present[0] in by_launch else _innermost(present, env)
        _check_others(chosen, env)
        return _read(chosen, env)
    traces = [name for name in MPI_TRACES if env.get(name)]
    if traces:
        return World(hosts=(socket.gethostname(),), launcher=TRACED, source=f"MPI ({', '.join(traces)} set)")
    _check_incomplete(env)
    return World(hosts=(socket.gethostname(),))


def _is_inside(inner: Family, outer: Family, env: Mapping[str, str]) -> bool:
    """Return whether ``inner`` was clearly started in a process of ``outer``."""
    if outer.is_single(env) or (inner.in_steps and not outer.in_slurm):
        return True
    # In a SLURM job, an mpiexec has its daemons started by srun, one on each node.
    one_each = outer.in_steps and set(expand_counts(env.get(outer.local_size, ""), outer.local_size)) == {1}
    return one_each and not inner.is_single(env)


def _innermost(present: list[Family], env: Mapping[str, str]) -> Family:
    """Return the family whose launcher was started by all others, else the first."""
    for family in present:
        outer = [other for other in present if family.contradicts(other, env)]
        if all(_is_inside(family, other, env) for other in outer):
            if outer and env.get(family.rank) == "0" and env is os.environ:
                because = f"{outer[0].launcher} started {family.launcher}, which started the ranks"
                _say(f"using: {family.says(env)}. Ignored: {outer[0].says(env)}, because {because}")
            return family
    return present[0]


@cache
def _say(line: str) -> None:
    """Print a line, once per process: logging may not have started."""
    print(line, file=sys.stderr, flush=True)


def _check_incomplete(env: Mapping[str, str]) -> None:
    """Reject a rank whose variables are incomplete, which would be taken for a single process."""
    families = _incomplete(env)
    if families:
        needs = dict.fromkeys(name for family in families for name in (*family.needs, family.size))
        missing = [name for name in needs if not env.get(name)] or ["LOCAL_RANK"]
        lacking = f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not set"
        found = " and ".join(family.says(env) for family in families)
        raise WorldError(f"{found}, but {lacking}: start the ranks with `launch`, or unset these variables")


def _incomplete(env: Mapping[str, str]) -> list[Family]:
    """Return the families that have some of their variables set, but not all that are needed."""
    found = [family for family in FAMILIES if env.get(family.rank) and not family.present(env)]
    plain = [PLAIN] if env.get("RANK") and env.get("WORLD_SIZE") not in (None, "", "1") else []
    return [family for family in found if not family.in_steps] + plain  # a job's shell has rank 0


def _check_others(chosen: Family, env: Mapping[str, str]) -> None:
    """Reject variables that contradict ``chosen``: one launcher runs inside another, or has left them behind."""
    present = [family for family in FAMILIES if family.present(env)]
    if env.get("WORDRUN_LAUNCHER") == chosen.launcher and env.get("WORDRUN_LAUNCH_ID"):
        # launch has removed all others, except a SLURM step's if it was called in one. rank_env.sh has exported the
        # launcher's values, which a launcher inside this rank would have overwritten.
        others = [LOCAL, *(family for family in present if not family.in_steps)]
    else:
        others = [family for family in present if not _is_inside(chosen, family, env)]
        # A variable may belong to a complete family, too: srun sets PMI_RANK.
        others += [some for some in _incomplete(env) if all(some.contradicts(family, env) for family in present)]
    for other in others:
        if chosen.contradicts(other, env):
            raise WorldError(_both(chosen, other, env))


def _check_agents(env: Mapping[str, str]) -> None:
    """Reject an MPI launcher that started a different number of processes than torchrun has agents."""
    agents = _number("WORLD_SIZE", env) // max(1, _number("LOCAL_WORLD_SIZE", env))
    for other in FAMILIES:
        if not other.in_steps and other.present(env) and env.get(other.size, str(agents)) != str(agents):
            raise WorldError(_both(TORCHRUN, other, env))


def _both(one: Family, other: Family, env: Mapping[str, str]) -> str:
    return (
        f"{one.says(env)}, but {other.says(env)}: one of them runs inside the other. Start the ranks with `launch` "
        "alone (inside a step or job: launch --scheduler none), or unset the variables of the one that did not start "
        "this process."
    )


def _read(family: Family, env: Mapping[str, str]) -> World:
    rank = _number(family.rank, env)
    local_rank = _number(family.local_rank, env)
    node = _number(family.node, env) if env.get(family.node) else None
    if node is None and env.get("WORDRUN_LAUNCHER") == family.launcher and LOCAL.present(env) and env.get(LOCAL.node):
        node = _number(LOCAL.node, env)  # found by rank_env.sh
    local_size = _local_size(family, env, node or 0)
    size, size_source = _size(family, env, local_size)
    hosts = tuple(env["WORDRUN_HOSTS"].split(",")) if env.get("WORDRUN_HOSTS") else ()
    if node is None:
        # This launcher does not set it. Correct for ranks laid out in even blocks; otherwise MPI corrects it.
        node = (rank - local_rank) // local_size
    listed = family.local_size if family.in_steps else "WORDRUN_LAYOUT"
    counts = tuple(expand_counts(env[listed], listed)) if env.get(listed) else ()
    counts = counts if sum(counts) == size else ()
    nodes = len(hosts) or len(counts) or max(node + 1, -(-size // local_size))
    if not family.node:  # only MPI knows where --launcher-args may have put the ranks
        node = min(node, nodes - 1)
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        counts=counts,
        hosts=hosts or ((socket.gethostname(),) if nodes == 1 else ()),
        launcher=family.launcher,
        source=f"{family.rank}, {size_source}, {family.local_rank}",
    )
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size and 0 <= node < nodes):
        raise WorldError(
            f"the variables of {family.launcher} contradict each other: "
            f"rank {rank} of {size} ({world.source}), local rank {local_rank} of {local_size}, node {node} of {nodes}. "
            "Start the ranks with `launch`, or unset the variables that an earlier launcher left."
        )
    return world


def _number(name: str, env: Mapping[str, str]) -> int:
    text = env.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}='{text}' should be a whole number; start the ranks with `launch`") from None


def _local_size(family: Family, env: Mapping[str, str], node: int) -> int:
    if family.in_steps:
        counts = expand_counts(env.get(family.local_size, ""), family.local_size)
        return counts[min(node, len(counts) - 1)]
    return _number(family.local_size, env)


def _size(family: Family, env: Mapping[str, str], local_size: int) -> tuple[int, str]:
    by_launch = env.get("WORDRUN_WORLD_SIZE", "")
    if env.get(family.size):
        size = _number(family.size, env)
        if by_launch and env.get("WORDRUN_LAUNCHER") == family.launcher and _number("WORDRUN_WORLD_SIZE", env) != size:
            differ = f"launch started {by_launch} ranks (WORDRUN_WORLD_SIZE), but {family.size}={size}"
            remedy = "start the command without the inner launcher"
            raise WorldError(f"{differ}: another launcher runs inside this one; {remedy}")
        return size, family.size
    if by_launch:
        return _number("WORDRUN_WORLD_SIZE", env), "WORDRUN_WORLD_SIZE"
    nodefile = env.get("PBS_NODEFILE", "")
    if nodefile and Path(nodefile).is_file():
        hosts = set(Path(nodefile).read_text().split())
        return local_size * len(hosts), f"{family.local_size} x hosts in PBS_NODEFILE"
    missing = f"{family.launcher} sets rank {env.get(family.rank)} but no world size ({family.size} is not set)"
    raise WorldError(f"{missing}: start the ranks with `launch`, or export WORDRUN_WORLD_SIZE")
