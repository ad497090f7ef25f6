"""Which strategy to choose, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from wordrun.backend.options import BackendConfig
from wordrun.plan.estimator import (
    AS_ASKED,
    DIVIDED,
    LIKE_ZERO_2,
    LIKE_ZERO_3,
    OFFLOADED,
    TP_OVER_FSDP,
    WITHIN_NODES,
    Estimate,
    Estimator,
    Unavailable,
)
from wordrun.plan.memory_fit import readable
from wordrun.plan.options import Hardware

MANY_NODES = 64
"""Number of nodes above which 3D is tried: gathering a layer from more nodes takes longer than computing it."""
SHARDED = (WITHIN_NODES, LIKE_ZERO_2, LIKE_ZERO_3)


@dataclass(frozen=True)
class Advice:
    """The recommended strategy."""

    best: Estimate | None
    """None if nothing fits."""
    checkpointing: str
    why: list[str] = field(default_factory=list)
    alternative: Estimate | None = None
    """The equivalent with the engine of another library, if it fits with the same activation checkpointing."""


def advise(estimator: Estimator, rows: Sequence[Estimate | Unavailable]) -> Advice:
    """Choose one of ``rows`` by the decision tree from ALCF's talk on parallel training.

    If the model fits on one device: DDP. If not: FSDP or ZeRO, then with offload. If even its largest layer does not
    fit: tensor parallelism. On many nodes: 3D. Each branch tries activation checkpointing before moving on, which costs
    at most another forward pass, a third of the operations.
    """
    hardware, kinds = estimator.hardware, estimator.checkpointing
    candidates = [row for row in rows if isinstance(row, Estimate) and row.strategy.name != AS_ASKED]

    def pick(names: Sequence[str], kinds_tried: Sequence[str] = kinds) -> tuple[Estimate, str] | None:
        """Return the first that fits and its activation checkpointing, trying the least checkpointing first."""
        for kind, name, row in product(kinds_tried, names, candidates):
            if row.strategy.name == name and row.fits and kinds.index(row.fits) <= kinds.index(kind):
                return row, kind
        return None

    def advice(pair: tuple[Estimate, str], *why: str, others: Sequence[str] = ()) -> Advice:
        row, kind = pair
        other = pick(others, kinds[: kinds.index(kind) + 1])
        return Advice(row, kind, [*why, *([] if kind == kinds[0] else [_recomputing(kind)])], other and other[0])

    if not candidates:
        return Advice(None, kinds[0], ["No strategy can be recommended, for the reasons above."])
    engines = [row.strategy for row in candidates if row.strategy.backend.engine]
    sharding, offloading = ([each.name for each in engines if _shards(each.backend, offloads=o)] for o in (False, True))
    device, many = _device(hardware), hardware.devices > 1
    if found := pick(["DDP"], kinds[:1]):
        enough = ", so DDP is enough: each rank keeps the full model, and only gradients are averaged"
        return advice(found, f"The full model fits {device}{enough if many else ''}.")
    plain = "Without activation checkpointing the" if kinds[0] == "none" else "The"
    why = [f"{plain} full model does not fit {device}."]
    if hardware.nodes > MANY_NODES:
        if found := pick([WITHIN_NODES]):
            together = f"The {hardware.per_node} devices of a node can hold it, so no layer is gathered across nodes."
            return advice(found, *why, together)
        if found := pick(["3D"]):
            layered = (
                f"Gathering every layer from {hardware.nodes} nodes would be slow, so a pipeline, whose stages "
                "communicate least, spans the nodes, and tensor-parallel ranks share a node."
            )
            return advice(found, *why, layered)
    if found := pick(["DDP", *SHARDED]) or pick([OFFLOADED]):
        name = found[0].strategy.name
        if name == "DDP":
            return advice(found, *why)
        offload = name == OFFLOADED
        where = " and kept in host memory" if offload else " across the ranks"
        why.append(f"Its largest layer does, so parameters, gradients and optimizer state are sharded{where}.")
        return advice(found, *why, others=offloading if offload else sharding)
    if found := pick(offloading):
        reason = "Sharding is not enough" if many else "There are no other ranks to shard it across"
        why.append(f"{reason}, but {found[0].strategy.backend.engine} can keep part of it in host memory.")
        return advice(found, *why)
    if found := pick([DIVIDED]):
        return advice(found, *why, *_divided(estimator, found[0].strategy.layout.cp))
    if found := pick([TP_OVER_FSDP]) or pick(["3D"]) or pick(["PP"]):
        sharded = any(row.strategy.name in SHARDED for row in candidates)
        return advice(found, *why, _split(found[0].strategy.name, sharded=sharded))
    return Advice(None, kinds[0], [*why, *_remedies(estimator, candidates)])


def _shards(backend: BackendConfig, *, offloads: bool) -> bool:
    """Return whether ``backend`` shards at least gradients and optimizer state, and offloads if and only if asked."""
    return {"gradients", "optimizer"}.issubset(backend.sharded_states) and backend.offloads == offloads


def _recomputing(kind: str) -> str:
    """Return a sentence: the model fits with the activation checkpointing ``kind``, and what that costs."""
    full = "repeats the forward pass, a third more operations"
    cost = "recomputes all but the matrix products" if kind == "selective" else full
    return f"It fits with train.activation_checkpointing={kind}, which {cost}."


def _device(hardware: Hardware) -> str:
    """Return a phrase for where the model should fit, with the memory there."""
    free = f" with {hardware.reserve:.0%} left free" if hardware.reserve else ""
    if hardware.on_cpu:
        return f"into the {hardware.memory:.4g} GiB of one rank{free}"
    return f"on one {hardware.kind} of {hardware.memory:g} GiB{free}"


def _split(name: str, *, sharded: bool) -> str:
    """Return why the strategy ``name`` splits the model, where the ``sharded`` one does not fit, or is impossible."""
    if name == "PP":
        reason = "Sharding is not enough" if sharded else "No layout that keeps the blocks together suits the run"
        return f"{reason}, so a pipeline splits the blocks across the ranks."
    reason = "One layer does not fit either" if sharded else "No layout that keeps layers whole suits the run"
    blocks = ", and a pipeline splits the blocks" if name == "3D" else ""
    return f"{reason}, so tensor parallelism splits each layer across a node's ranks{blocks}."


def _divided(estimator: Estimator, cp: int) -> list[str]:
    """Return why sequences are divided over ``cp`` ranks."""
    long = (
        "No strategy that keeps sequences whole works here, so context parallelism splits each sequence of "
        f"{estimator.model.cfg.block_size:,} tokens over {cp} ranks."
    )
    across = ["These ranks span nodes and communicate in every layer."]
    return [long, *(across if cp > estimator.hardware.per_node else [])]


def _remedies(estimator: Estimator, candidates: Sequence[Estimate]) -> list[str]:
    """Return changes that would help when nothing fits."""
    hardware, most_saving = estimator.hardware, estimator.checkpointing[-1]
    least = min(candidates, key=lambda row: row.memory[most_saving].total)
    need = least.memory[most_saving]
    size = estimator.cfg.model.batch_size
    remedies = [
        f"Nothing fits. {least.strategy.name} with train.activation_checkpointing={most_saving} comes closest: it "
        f"needs {readable(need.total)}, and {readable(hardware.usable)} are usable."
    ]
    if need.host > hardware.usable_host:
        has = readable(hardware.usable_host)
        remedies.append(
            f"For each device it also needs {readable(need.host)} of host memory, of which there are {has}."
        )
    if need.activations + max(need.logits, need.block) > need.total / 2 and size > 1:
        remedy = f"Most of it grows with the batch: use model.batch_size={size // 2} and twice the train.accumulation."
    else:
        remedy = f"Try more devices than plan.ranks={hardware.devices}."
    return [*remedies, remedy]
