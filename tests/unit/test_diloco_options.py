"""Islands that cannot be made are refused with a remedy; fragments; what is planned."""

from __future__ import annotations

import pytest

from wordrun.backend.diloco.engine import fragments
from wordrun.backend.diloco.options import DilocoConfig
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.plan.memory import memory
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.strategy import Strategy
from wordrun.plan.traffic import traffic

DILOCO = ["data=sample", "train.backend=diloco", "train.dtype=fp32"]
REFUSED = {
    "islands do not divide": (4, 4, ["backend.islands=3"], ["backend.islands=3 does not divide 4 ranks: use 2 or 4"]),
    "tensor parallel": (4, 4, ["backend.inner=TP"], ["backend.inner=TP", "DDP or FSDP"]),
    "pipeline": (4, 4, ["backend.inner=PP"], ["backend.inner=PP", "DDP or FSDP"]),
    "DeepSpeed": (4, 4, ["backend.inner=deepspeed"], ["backend.inner=deepspeed", "DDP or FSDP"]),
    "tp inside": (4, 4, ["backend.inner=FSDP", "backend.inner_options.tp=2"], ["tp: 2", "use replicate and shard"]),
    "nothing to shard": (2, 2, ["backend.inner=FSDP"], ["only one: use a smaller backend.islands"]),
    "unknown option": (2, 2, ["backend.inner_options.compres=bf16"], ["no such option; did you mean 'compress'"]),
    "wrong type": (2, 2, ["backend.inner_options.bucket_cap_mb=many"], ["bucket_cap_mb=many should be of type int"]),
    "wrong value": (2, 2, ["backend.inner_options.compress=int8"], ["backend.inner_options.compress=int8"]),
    "shards do not fit": (
        4,
        4,
        ["backend.islands=2", "backend.inner=FSDP", "backend.inner_options.shard=3"],
        ["inside each island of 2 ranks: backend.inner_options.shard=3 does not fit 2 ranks"],
    ),
    "fragments": (2, 2, ["backend.fragments=9", "backend.sync_every=4"], ["use at most 4"]),
    "momentum": (2, 2, ["backend.outer_momentum=1"], ["backend.outer_momentum=1"]),
    "skip": (2, 2, ["train.on_nonfinite=skip"], ["use train.on_nonfinite=rollback"]),
    "fp16": (2, 2, ["train.dtype=fp16"], ["use train.dtype=bf16 or fp32"]),
    "averages": (2, 2, ["hooks=[ema]"], ["hooks=[ema]", "outer weights"]),
    "static graph": (
        2,
        2,
        ["backend.inner_options.static_graph=true", "optimizer.gas=2"],
        ["one micro-step per step"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    ranks, per_node, words, parts = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        check(compose([*DILOCO, *words]), ranks, per_node)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "per_node", "islands", "found"),
    [(1, 1, None, 1), (4, 4, None, 4), (8, 4, None, 2), (8, 4, 4, 4), (8, 1, None, 8), (4, 4, 1, 1)],
)
def test_islands_are_nodes_or_ranks(ranks: int, per_node: int, islands: int | None, found: int) -> None:
    assert DilocoConfig(islands=islands).count(ranks, per_node) == found


def test_data_are_divided_as_with_ddp() -> None:
    words = ["backend.inner=FSDP", "backend.islands=2", "model.batch_size=2"]
    at = check(compose([*DILOCO, *words]), 8, 4)
    assert (at.replicate, at.shard, at.dp) == (2, 4, 8)
    assert [at.dp_index(rank) for rank in range(8)] == list(range(8))


def test_fragments_are_whole_blocks_in_turn() -> None:
    names = ["model.embedding.weight", *(f"model.blocks.{n}.{w}" for n in range(3) for w in "ab"), "model.norm.weight"]

    def block_of(name: str) -> str:
        return name.rpartition(".")[0] if name.startswith("blocks.") else ""

    first, second = fragments(names, 2, block_of)
    assert first == ["model.embedding.weight", "model.blocks.1.a", "model.blocks.1.b", "model.norm.weight"]
    assert second == ["model.blocks.0.a", "model.blocks.0.b", "model.blocks.2.a", "model.blocks.2.b"]
    assert [len(each) for each in fragments(names, 7, block_of)] == [1, 2, 2, 2, 1, 0, 0]


def planned(words: list[str], ranks: int) -> tuple[float, float, dict[tuple[str, int], float]]:
    """Return the bytes of optimizer state and all bytes of a rank, and those sent by operation and number of ranks."""
    cfg = compose([*DILOCO, "model.batch_size=2", *words])
    strategy = Strategy("", cfg, check(cfg, ranks, ranks), on_cpu=True)
    shapes = shapes_of(cfg.model, 67)
    sent = {(each.operation, each.ranks): each.sent for each in traffic(cfg.backend, shapes, strategy) if each.sent}
    need = memory(shapes, strategy, "none")
    assert need.sent == sum(sent.values())
    return need.optimizer, need.total, sent


def test_plan_counts_the_outer_state_and_the_exchange() -> None:
    count = shapes_of(compose(DILOCO).model, 67).parameters
    ddp = planned(["train.backend=DDP"], 2)
    alone = planned(["train.backend=DDP"], 1)
    mine = planned(["backend.sync_every=30"], 2)
    assert mine[2] == {("all_reduce", 2): pytest.approx(ddp[2]["all_reduce", 2] / 30)}
    assert mine[0] == ddp[0] + 8 * count
    assert mine[1] == alone[1] + 8 * count  # an island of one rank has no buckets
    assert planned(["backend.outer_momentum=0"], 2)[0] == ddp[0] + 4 * count


def test_plan_of_islands_with_shards_keeps_the_batch() -> None:
    words = ["backend.inner=FSDP", "backend.islands=2", "train.global_batch_size=32"]
    fsdp = planned(["train.backend=FSDP", "train.global_batch_size=16"], 2)
    mine = planned(words, 4)
    assert mine[2].pop(("all_reduce", 2)) > 0
    assert mine[2] == fsdp[2]
    count = shapes_of(compose(DILOCO).model, 67).parameters
    assert mine[0] - fsdp[0] == pytest.approx(8 * count / 2, rel=0.01)  # whole rows are sharded
