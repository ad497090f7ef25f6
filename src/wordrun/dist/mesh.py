"""The layout of the ranks as arithmetic on their numbers: pipeline x replicate x shard x context x tensor.

Ranks are numbered with the tensor-parallel axis innermost: its ranks communicate most, and are neighbors on a node.
The pipeline axis is outermost: its ranks communicate least. Nothing here needs torch or communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from wordrun.common.errors import ConfigError

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Outermost first."""
EXPERT_AXES = ("pp", "replicate", "expert_shard", "ep", "tp")
"""The axes along which the parameters of experts are divided. expert_shard x ep is shard x cp."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis."""

    pp: int = 1
    """Stages of the pipeline."""
    replicate: int = 1
    """Copies of the model, among which gradients are averaged."""
    shard: int = 1
    """Ranks over which a copy's parameters, gradients and optimizer state are sharded."""
    cp: int = 1
    """Ranks over which each sequence is divided; parameters are sharded over them, too."""
    tp: int = 1
    """Ranks over which each matrix product is divided."""
    islands: int = 1
    """Groups of copies that take steps by themselves; each has consecutive copies."""
    ep: int = 1
    """Ranks over which the experts are divided: some of the ranks along shard and cp, not an axis of their own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.shape)

    @property
    def shards(self) -> int:
        """Number of ranks over which parameters are sharded."""
        return self.shard * self.cp

    @property
    def of_parameters(self) -> Layout:
        """The same ranks as parameters see them: sharded over shard and cp together."""
        return replace(self, shard=self.shards, cp=1)

    @property
    def of_island(self) -> Layout:
        """The ranks of one island, or all ranks."""
        return replace(self, replicate=self.replicate // self.islands, islands=1)

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which the parameters of the same experts are sharded."""
        return self.shards // self.ep

    @property
    def of_experts(self) -> tuple[int, ...]:
        """The sizes in the order of ``EXPERT_AXES``: the same ranks as the parameters of experts see them."""
        return tuple(getattr(self, axis) for axis in EXPERT_AXES)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.replicate * self.shard

    def stride(self, axis: str) -> int:
        """Return the difference in rank of neighbors along ``axis``, also of ``EXPERT_AXES``."""
        if axis in ("expert_shard", "ep"):
            return self.tp * (self.ep if axis == "expert_shard" else 1)
        return math.prod(self.shape[AXES.index(axis) + 1 :])

    def index(self, rank: int, axis: str) -> int:
        """Return the coordinate of ``rank`` along ``axis``."""
        size: int = getattr(self, axis)
        return rank // self.stride(axis) % size

    def dp_index(self, rank: int) -> int:
        """Return the data-parallel index of ``rank``: the same for its peers along pp, cp and tp."""
        return self.index(rank, "replicate") * self.shard + self.index(rank, "shard")

    def group(self, rank: int, axis: str) -> range:
        """Return the ranks that differ from ``rank`` only along ``axis``, including itself, in order."""
        stride, size = self.stride(axis), getattr(self, axis)
        first = rank - self.index(rank, axis) * stride
        return range(first, first + size * stride, stride)

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
        return f"{axes}, ep {self.ep}" if self.ep > 1 else axes


def resolve(ranks: int, per_node: int, wanted: dict[str, int | None]) -> Layout:
    """Return the layout of ``ranks`` ranks described by ``wanted``.

    Args:
        ranks: total number of ranks.
        per_node: ranks on each node; a tensor-parallel group must fit.
        wanted: size of each axis (default 1); one may be -1, for the rest. None stands for the ranks of a node for tp,
            and for what the other axes leave for pp.

    Raises:
        ConfigError: the sizes do not fit; the message says which, and what would.
    """
    sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | wanted
    wrong = [
        f"backend.{axis}={n} should be at least 1, or -1 for the rest"
        for axis, n in sizes.items()
        if n is not None and n < 1 and n != -1
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    if sizes["tp"] is None:
        sizes["tp"] = per_node
    if sizes["pp"] is None:
        sizes["pp"] = max(1, ranks // math.prod(max(1, n) for axis, n in sizes.items() if axis != "pp"))
    rest = [axis for axis, n in sizes.items() if n == -1]
    given = {axis: n for axis, n in sizes.items() if n not in (-1, 1)}
    shown = " x ".join(f"backend.{axis}={n}" for axis, n in given.items()) or "1"
    if len(rest) > 1:
        raise ConfigError(f"{' and '.join(f'backend.{axis}=-1' for axis in rest)}: only one axis can take the rest")
    product = math.prod(given.values())
    if ranks % product or (not rest and ranks != product):
        near = max(1, ranks // product) * product if rest else product
        remedy = f"start {near} ranks{_or_sizes(ranks, given)}"
        shown = f"{shown} = {product}" if len(given) > 1 else shown
        raise ConfigError(
            f"{shown} does not fit {ranks} rank{'s' * (ranks != 1)}: {remedy}", page="backends.md#layout-of-the-ranks"
        )
    if rest:
        sizes[rest[0]] = ranks // product
    layout = Layout(**sizes)
    if ranks > per_node and per_node % layout.tp:
        fits = max(n for n in range(1, per_node + 1) if per_node % n == 0 and ranks % n == 0 and n <= layout.tp)
        spans = f"backend.tp={layout.tp} would span nodes, which have {per_node} ranks each"
        raise ConfigError(f"{spans}, and every layer waits for its group: use backend.tp={fits}")
    return layout


def _or_sizes(ranks: int, given: dict[str, int]) -> str:
    """Return alternatives that would fit, if only one size could change."""
    if len(given) != 1:
        return ", or change one of the sizes"
    (axis, size), *_ = given.items()
    fits = sorted({n for n in range(1, min(ranks, 2 * size) + 1) if ranks % n == 0}, key=lambda n: abs(n - size))[:2]
    return f", or use backend.{axis}={' or '.join(map(str, sorted(fits)))}"


def owner_of(stage: int, pp: int, schedule: str) -> int:
    """Return which of a pipeline's ``pp`` ranks has ``stage``: round-robin, or in a V for ZBVZeroBubble."""
    turn, rank = divmod(stage, pp)
    return pp - 1 - rank if turn and schedule == "ZBVZeroBubble" else rank


def blocks_of(stage: int, count: int, n_layer: int) -> range:
    """Return the block numbers of ``stage``, one of ``count`` stages whose sizes differ by at most 1."""
    return range(stage * n_layer // count, (stage + 1) * n_layer // count)
