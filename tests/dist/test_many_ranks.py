"""131,072 ranks on one machine, of which torch's fake process group builds a few, one after the other.

Its collectives send nothing, so most values are arbitrary; shapes, bytes and what a checkpoint contains are not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from wordrun.config.compose import compose
from wordrun.config.registry import parts
from wordrun.plan.estimator import Estimator
from wordrun.plan.memory import memory
from wordrun.plan.options import PlanConfig, hardware
from wordrun.plan.parameter_shapes import shapes_of

RANKS, PER_NODE, VOCAB = 2**17, 8, 67
FIRST, MIDDLE, LAST = 0, RANKS // 2 + 1029, RANKS - 1
SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.device=cpu model.bias=true model.n_head=8
    model.n_embd=40 model.block_size=16 model.batch_size=8
""")
# The options of each backend's widest layout, and which optimizers step on which ranks: Muon, whose matrices have
# owners, and others, which step element by element, on each; both on a last rank that has no rows.
WIDEST = {
    "DDP": (["train.backend=DDP", "model.n_layer=1"], {MIDDLE: ["lion"], LAST: ["muon"]}),
    "FSDP": (
        ["train.backend=FSDP", "model.n_layer=1", "backend.replicate=64"],
        {FIRST: ["muon"], MIDDLE: ["adamw"], LAST: ["lion", "sgd"]},
    ),
    "TP": (
        ["train.backend=TP", "model.n_layer=1", "backend.tp=8", "backend.shard=2048", "backend.replicate=8"],
        {FIRST: ["lion"], MIDDLE: ["muon"], LAST: ["adamw"]},
    ),
    "PP": (
        ["train.backend=PP", "model.n_layer=8", "backend.pp=8"],
        {FIRST: ["adamw"], MIDDLE: ["sgd"], LAST: ["muon"]},
    ),
    "3D": (
        ["train.backend=3D", "model.n_layer=8", "backend.pp=8", "backend.shard=2048", "backend.tp=8"],
        {FIRST: ["sgd"], MIDDLE: ["muon"], LAST: ["adamw", "muon"]},
    ),
    "diloco": (
        shlex.split("""
        train.backend=diloco model.n_layer=1 backend.inner=FSDP backend.islands=64
        train.max_iters=1
    """),
        {LAST: ["adamw"]},
    ),
}
HEAD = """
import contextlib, json, resource, sys
from functools import partial
from pathlib import Path
from unittest import mock
import torch
import torch.distributed as td
from torch.distributed import device_mesh
from torch.distributed.pipelining import stage as pipeline
from torch.testing._internal.distributed.fake_pg import FakeStore
import wordrun
from wordrun import backend
from wordrun.dist import torch_private
from wordrun.backend.sharded_tensors import local
from wordrun.backend.optimizer_state import tensors_of
from wordrun.backend.step_timer import StepTimer
from wordrun.checkpoint import index, shards, checksums
from wordrun.checkpoint.folder import file_of
from wordrun.checkpoint.sharding import Box
from wordrun.config.rules import check
from wordrun.train.options import accumulation
from wordrun.data.batch import Batch
from wordrun.dist import World
from wordrun.model import meta_model
from wordrun.config.registry import part_of

words, optimizers, ranks, rank, per_node, vocab = json.loads(sys.argv[1])
torch.set_num_threads(1)
node = dict(local_rank=rank % per_node, local_size=per_node, node=rank // per_node, nodes=ranks // per_node)
td.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def size(tensors):
    return sum(local(t).numel() * t.element_size() for t in tensors)


def received(output, *_, **__):
    output.zero_()  # which the fake group refuses if this rank sends nothing
    return mock.Mock()


def summed(group, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def build(optimizer):
    cfg = wordrun.compose([*words, f"optimizer={optimizer}"], ranks=ranks)
    make = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
    world = World(rank=rank, size=ranks, device="cpu", **node)
    model = partial(meta_model, cfg.model, vocab)
    with mock.patch.object(torch_private, "settle_buckets"):  # the fake group gives DDP itself no sums
        made = backend.build(backend.BackendSpec(cfg, world, check(cfg, ranks, per_node), model, make))
    tokens = torch.randint(0, vocab, (cfg.model.batch_size, cfg.model.block_size))
    return cfg, made, Batch(tokens, tokens)


def report(found):
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps(found) + "\\n")
"""
SCRIPT = """
def walk(optimizer):
    cfg, made, batch = build(optimizer)
    layout = made.layout
    parameters = [p for part in made.parts for p in part.parameters()]
    found = {"optimizer": optimizer}

    def count(*_):
        states = [t for state in made.optimizer.state.values() for t in state.values() if hasattr(t, "numel")]
        found["bytes"] = dict(
            gradients=size(p.grad for p in parameters if p.grad is not None), optimizer=size(states),
            parameters=size(parameters),
        )
        found["empty"] = sum(local(p).numel() == 0 for p in parameters)

    def neighbors_shapes(objects, src, **_):
        # A stage asks its neighbors for the shapes of what they exchange: all stages have the same.
        rows = cfg.model.batch_size // cfg.backend.microbatches_of(cfg.model.batch_size, layout.pp)
        shape = made.parts[0].stage_output_shape(torch.empty(rows, cfg.model.block_size), layout.tp)
        before = src < rank
        meta = pipeline.extract_tensor_metas((torch.empty(shape, requires_grad=before),))
        objects[0] = pipeline._StageForwardMeta(meta) if before else pipeline._StageBackwardMeta(meta)

    if getattr(made, "replica", None) is not None:
        made.replica.register_comm_hook(None, summed)
        torch_private.settle_buckets(made.replica)
    made.grad_clip = 1e-6
    made.optimizer.register_step_post_hook(count)
    clock = StepTimer(made.device)
    clock.start()
    with mock.patch.multiple(td, recv_object_list=neighbors_shapes, all_to_all_single=received):
        made.train_step([batch] * accumulation(cfg, layout.dp), 1e-3, clock)
    for p in parameters:
        local(p.data).fill_(rank + 1)

    folder, own = Path(f"{cfg.train.backend}-{rank}-{optimizer}"), f"rng.{rank}"
    folder.mkdir()
    state = {**made.model_state(), **tensors_of(made.optimizer, made.named_parameters())}  # and copies of tied weights
    rows = made._rows_of(state)
    share = shards.to_write(state, layout, rank, rows)
    save = made.begin_save({own: torch.arange(3)})
    save.write(folder)
    assert checksums.problem(folder / file_of(rank)) == ""
    found["file"] = (folder / file_of(rank)).stat().st_size
    found["index"] = (folder / index.INDEX).write_text(json.dumps({n: t.plain() for n, t in share.tensors.items()}))

    # What this rank reads of the other ranks' files, with zeros in it.
    files = {}
    for name, tensor in state.items():
        shard = shards.shard_of(name, tensor, rows.get(name))
        for each in share.tensors[name].overlapping(Box(tuple(shard.offset), tuple(shard.data.shape))):
            if each.file != file_of(rank):
                value = shards.TensorShard(name, shard.shape, each.offset, torch.zeros(each.shape, dtype=tensor.dtype))
                files.setdefault(each.file, []).append(value)
    with mock.patch("os.fsync"):
        for file, content in files.items():
            shards.write(folder, content, int(file[7:].partition(".")[0]), {})
    assert made.load(folder, save.facts, [own])[own].tolist() == [0, 1, 2]
    mine = {each.name for each in share.shards}
    for name, tensor in made.model_state().items():
        assert shards.shard_of(name, tensor, rows.get(name)).data.eq(rank + 1 if name in mine else 0).all(), name
    made.close()
    report(found)


def own_group(ranks, *args, **options):
    # torch makes every group of the mesh, and takes seconds for those of other ranks.
    return td.new_group(ranks, *args, **options) if rank in ranks else None


# Those of a rank's optimizers are the same.
meshes = {}


def own_mesh(device, shape, mesh_dim_names):
    key = (device, tuple(shape), tuple(mesh_dim_names))
    if key not in meshes:
        meshes[key] = device_mesh.init_device_mesh(device, shape, mesh_dim_names=mesh_dim_names)
    return meshes[key]


with (
    mock.patch.object(device_mesh, "new_group", own_group),
    mock.patch("wordrun.backend.fsdp.init_device_mesh", own_mesh),
):
    for optimizer in optimizers:
        walk(optimizer)
"""
# Rank 0's file has the weights, which the other ranks read, too.
ZERO = """
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# DeepSpeed looks it up for every rank, for half of the time, and never reads it.
with mock.patch.object(DeepSpeedZeroOptimizer, "get_first_param_index", lambda *_: None):
    cfg, made, batch = build(optimizers[0])
made.train_step([batch], 1e-3, StepTimer(made.device))
engine = made.engine.optimizer
shards = engine.single_partition_of_fp32_groups
states = [t for state in engine.optimizer.state.values() for t in state.values() if hasattr(t, "numel")]
found = dict(groups=len(shards), optimizer=size([*shards, *states]), parameters=size(made.parts[0].parameters()))
for shard in shards:
    shard.data.fill_(rank + 1)
folder = Path("zero")
folder.mkdir(exist_ok=True)
save = made.begin_save({"own": torch.arange(3)})
save.write(folder)
for shard in shards:
    shard.data.zero_()
assert made.load(folder, save.facts, ["own"])["own"].tolist() == [0, 1, 2]
# The last rank has nothing but padding, which DeepSpeed does not save.
assert all(shard.eq(0 if rank == ranks - 1 else rank + 1).all() for shard in shards)
made.close()
report(found)
"""


def plan(words: list[str], rank: int) -> tuple[dict[str, float], bool]:
    """Return the plan for ``rank``, and whether its shards are the first, which are the largest."""
    cfg = compose(words)
    estimator = Estimator(
        cfg, shapes_of(cfg.model, VOCAB), hardware(PlanConfig(ranks=RANKS, per_node=PER_NODE, device="cpu"))
    )
    strategy = estimator.strategy("as asked", cfg.backend)
    layout = strategy.layout
    need = memory(estimator.model, strategy, "none", pp_rank=layout.index(rank, "pp"))
    is_first = layout.index(rank, "shard") == layout.index(rank, "tp") == 0
    return {name: getattr(need, name) for name in ("parameters", "gradients", "optimizer")}, is_first


def test_every_optimizer_is_among_them() -> None:
    used = {name: {each for some in by_rank.values() for each in some} for name, (_, by_rank) in WIDEST.items()}
    assert used["FSDP"] == {*parts("optimizer")}
    assert all("muon" in each and len(each) > 1 for name, each in used.items() if name != "diloco")


@pytest.mark.parametrize("name", WIDEST)
def test_a_rank_of_the_widest_layout(name: str, ranks: Any, tmp_path: Path) -> None:
    """It steps, clips, saves and loads in memory and files that do not grow with the number of ranks."""
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    if name in ("PP", "3D") and not hasattr(stages, "_StageForwardMeta"):
        pytest.skip("before version 2.13, torch's stages tell each other their shapes in another way")
    (tmp_path / "script.py").write_text(HEAD + SCRIPT)
    words = [*SMALL, *WIDEST[name][0]]
    for rank, optimizers in WIDEST[name][1].items():
        facts = json.dumps([words, optimizers, RANKS, rank, PER_NODE, VOCAB])
        done = ranks(1, "script.py", facts, under="fork", timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [found["optimizer"] for found in lines] == optimizers
        for found in lines:
            at, sizes = (name, rank, found["optimizer"]), found["bytes"]
            if name != "diloco":  # which the plan does not cover
                planned, is_first = plan([*words, f"optimizer={found['optimizer']}"], rank)
                for what, size in planned.items():
                    assert sizes[what] == size if is_first else sizes[what] <= size, (what, at)
            if name in ("FSDP", "3D") and rank == LAST:
                assert found["empty"], "the last rank has no rows"
            assert found["index"] < 50_000, at
            assert found["file"] < 2 * (sizes["parameters"] + sizes["optimizer"]) + 100_000, at
            assert found["memory"] < 2 * 2**30, at


@pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed: pip install 'wordrun[deepspeed]'"
)
def test_a_rank_of_deepspeeds_widest_layout(ranks: Any, tmp_path: Path) -> None:
    """ZeRO over all ranks: it steps, saves and loads with shares of the optimizer of the planned size."""
    words = [*SMALL, "train.backend=deepspeed", "backend.stage=1", "model.n_layer=1", "model.bias=false"]
    planned, _ = plan(words, LAST)
    (tmp_path / "script.py").write_text(HEAD + ZERO)
    for rank in (FIRST, LAST):
        facts = json.dumps([words, ["adamw"], RANKS, rank, PER_NODE, VOCAB])
        done = ranks(1, "script.py", facts, under="fork", timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        # DeepSpeed rounds the share of each group up, to two elements with up to four values.
        assert planned["optimizer"] <= found["optimizer"] <= planned["optimizer"] + 2 * 16 * found["groups"]
        assert found["parameters"] == planned["parameters"]
        assert found["memory"] < 2 * 2**30
