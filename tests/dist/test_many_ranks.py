"""131,072 ranks on one machine, of which torch's fake process group builds a few, one after the other.

Its collectives send nothing, so most values are arbitrary; shapes, bytes and what a checkpoint contains are not.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from wordrun.composer import compose
from wordrun.plan.candidates import Planner
from wordrun.plan.memory import memory
from wordrun.plan.options import PlanConfig, hardware
from wordrun.plan.shapes import shapes_of

RANKS, PER_NODE, VOCAB = 2**17, 8, 67
SMALL = [
    "data=sample", "tracker=jsonl", "train.dtype=fp32", "train.device=cpu", "model.bias=true", "model.n_head=8",
    "model.n_embd=40", "model.block_size=16", "model.batch_size=8", "model.dropout=0",
]  # fmt: skip
PIPELINE = ["train.backend=3D", "model.n_layer=8", "backend.pp=8", "backend.shard=2048", "backend.tp=8"]
WIDEST = {
    "DDP": (["train.backend=DDP", "model.n_layer=1"], [RANKS - 1]),
    "HSDP": (["train.backend=FSDP", "model.n_layer=1", "backend.replicate=64", "optimizer=lion"], [RANKS - 1]),
    "TP": (["train.backend=TP", "model.n_layer=1", "backend.tp=8", "backend.shard=2048", "backend.replicate=8",
            "optimizer=muon"], [0]),
    "PP": (["train.backend=PP", "model.n_layer=8", "backend.pp=8", "optimizer=sgd"], [RANKS // 2]),
    "3D": (PIPELINE, [0, RANKS // 2 + 1029, RANKS - 1]),
}  # fmt: skip
SCRIPT = """
import contextlib, json, resource, sys
from functools import partial
from pathlib import Path
from unittest import mock
import torch
import torch.distributed as td
from torch.distributed.pipelining import stage as pipeline
from torch.testing._internal.distributed.fake_pg import FakeStore
import wordrun
from wordrun import backend
from wordrun.backend.native import local
from wordrun.backend.optimizer import tensors_of
from wordrun.backend.stopwatch import Stopwatch
from wordrun.checkpoint import index, shards, sums
from wordrun.checkpoint.folder import file_of
from wordrun.checkpoint.grid import Box
from wordrun.checks import accumulation, check
from wordrun.data.batch import Batch
from wordrun.dist import World
from wordrun.model import meta_model
from wordrun.registry import part_of

words, ranks, rank, per_node, vocab = json.loads(sys.argv[1])
torch.set_num_threads(1)
cfg = wordrun.compose(words, ranks=ranks)
node = dict(local_rank=rank % per_node, local_size=per_node, node=rank // per_node, nodes=ranks // per_node)
layout = check(cfg, ranks, per_node)
td.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
optimizer = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
made = backend.build(backend.BackendSpec(
    cfg, World(rank=rank, size=ranks, device="cpu", **node), layout, partial(meta_model, cfg.model, vocab), optimizer,
))
parameters = [p for part in made.parts for p in part.parameters()]
found = {}


def size(tensors):
    return sum(local(t).numel() * t.element_size() for t in tensors)


def count(*_):
    states = [t for state in made.optimizer.state.values() for t in state.values() if hasattr(t, "numel")]
    found.update(
        gradients=size(p.grad for p in parameters if p.grad is not None), optimizer=size(states),
        parameters=size(parameters), empty=sum(local(p).numel() == 0 for p in parameters),
    )


def neighbours_shapes(objects, src, **_):
    # A stage asks its neighbours for the shapes of what they exchange: all stages have the same.
    rows = cfg.model.batch_size // cfg.backend.microbatches_of(cfg.model.batch_size, layout.pp)
    shape = made.parts[0].stage_output_shape(torch.empty(rows, cfg.model.block_size), layout.tp)
    before = src < rank
    meta = pipeline.extract_tensor_metas((torch.empty(shape, requires_grad=before),))
    objects[0] = pipeline._StageForwardMeta(meta) if before else pipeline._StageBackwardMeta(meta)


def summed(group, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if getattr(made, "replica", None) is not None:
    made.replica.register_comm_hook(None, summed)
made.grad_clip = 1e-6
made.optimizer.register_step_post_hook(count)
clock = Stopwatch(made.device)
clock.start()
tokens = torch.randint(0, vocab, (cfg.model.batch_size, cfg.model.block_size))
with mock.patch.object(td, "recv_object_list", neighbours_shapes):
    made.train_step([Batch(tokens, tokens)] * accumulation(cfg, layout.dp), 1e-3, clock)
for p in parameters:
    local(p.data).fill_(rank + 1)

folder, own = Path(f"{cfg.train.backend}-{rank}"), f"streams.{rank}"
folder.mkdir()
state = {**made.model_state(), **tensors_of(made.optimizer, made.named_parameters())}  # and the copy of a tied weight
rows = made._rows_of(state)
share = shards.to_write(state, layout, rank, rows)
save = made.begin_save({own: torch.arange(3)})
save.write(folder)
assert sums.problem(folder / file_of(rank)) == ""
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
for file, content in files.items():
    shards.write(folder, content, int(file[7:].partition(".")[0]), {})
found["read"] = len(files)
for p in parameters:
    local(p.data).fill_(-1)
assert made.load(folder, save.facts, [own])[own].tolist() == [0, 1, 2]
mine = {each.name for each in share.shards}
for name, tensor in made.model_state().items():
    assert shards.shard_of(name, tensor, rows.get(name)).data.eq(rank + 1 if name in mine else 0).all(), name
made.close()
found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sys.stdout.write(json.dumps(found) + "\\n")
"""


def plan(words: list[str], rank: int) -> tuple[dict[str, float], bool]:
    """Return the plan for ``rank``, and whether its shards are the first, which are the largest."""
    cfg = compose(words)
    planner = Planner(
        cfg, shapes_of(cfg.model, VOCAB), hardware(PlanConfig(devices=RANKS, per_node=PER_NODE, device="cpu"))
    )
    strategy = planner.strategy("as asked", cfg.backend)
    layout = strategy.layout
    need = memory(planner.model, strategy, "none", pp_rank=layout.index(rank, "pp"))
    is_first = layout.index(rank, "shard") == layout.index(rank, "tp") == 0
    return {name: getattr(need, name) for name in ("parameters", "gradients", "optimizer")}, is_first


@pytest.mark.parametrize("name", WIDEST)
def test_a_rank_of_the_widest_layout(name: str, ranks: Any, tmp_path: Path) -> None:
    """It steps, clips, saves and loads in memory and files that do not grow with the number of ranks."""
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    if name in ("PP", "3D") and not hasattr(stages, "_StageForwardMeta"):
        pytest.skip("before version 2.13, torch's stages tell each other their shapes in another way")
    (tmp_path / "script.py").write_text(SCRIPT)
    words, numbers = [*SMALL, *WIDEST[name][0]], WIDEST[name][1]
    for rank in numbers:
        done = ranks(1, "script.py", json.dumps([words, RANKS, rank, PER_NODE, VOCAB]), under="fork", timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        planned, is_first = plan(words, rank)
        for what, size in planned.items():
            assert found[what] == size if is_first else found[what] <= size, (what, rank)
        if name in ("HSDP", "3D") and rank == RANKS - 1:
            assert found["empty"], "the last rank has no rows"
        assert found["index"] < 50_000
        assert found["file"] < 2 * (found["parameters"] + found["optimizer"]) + 100_000
        assert found["memory"] < 2 * 2**30
