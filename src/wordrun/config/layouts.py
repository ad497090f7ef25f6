"""How a backend lays out the ranks."""

from __future__ import annotations

from dataclasses import replace

from wordrun.backend.diloco.options import DilocoConfig
from wordrun.backend.options import BackendConfig
from wordrun.common.errors import ConfigError
from wordrun.dist.mesh import Layout, resolve


def layout(backend: BackendConfig, ranks: int, per_node: int) -> Layout:
    """Return how ``backend`` lays out ``ranks`` ranks, ``per_node`` to a node; islands are its outermost copies."""
    if not isinstance(backend, DilocoConfig):
        return _with_experts(backend, resolve(ranks, per_node, backend.axes()))
    islands = backend.count(ranks, per_node)
    each, inside = ranks // islands, backend.inside()
    if each == 1 and inside.sharded:
        raise ConfigError(
            f"backend.inner=FSDP shards the model across the ranks of an island, and each of the {islands} islands has "
            "only one: use a smaller backend.islands, or backend.inner=DDP"
        )
    try:
        at = resolve(each, min(each, per_node), inside.axes())
    except ConfigError as error:
        raise ConfigError(f"inside each island of {each} ranks: {backend.of_inner(str(error))}") from None
    return replace(at, replicate=at.replicate * islands, islands=islands)


def _with_experts(backend: BackendConfig, at: Layout) -> Layout:
    """Return ``at`` with the ranks among which the experts are divided."""
    ep = max(1, backend.experts_over)
    if at.shards % ep:
        fits = " or ".join(str(n) for n in range(1, at.shards + 1) if at.shards % n == 0)
        raise ConfigError(
            f"backend.ep={ep} does not divide the {at.shards} ranks of backend.shard x backend.cp, among which experts "
            f"are divided: use backend.ep={fits}"
        )
    return replace(at, ep=ep)
