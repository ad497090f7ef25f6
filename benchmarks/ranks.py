"""What the number of ranks costs each rank, and rank 0, at 10^3 to 10^5 ranks, all measured on one machine.

    python benchmarks/ranks.py                    # all parts
    python benchmarks/ranks.py --parts store --ranks 1000,10000

``checkpoint``: what a rank computes before it writes and reads, and the size of what it has to know, for a model whose
tensors are divided over all ranks. ``store``: as many
clients of one store, each of which is a connection, meet, get the config, and agree that a checkpoint has been written.
``owners``: Muon's first step. ``mesh``: torch's groups. ``zero``: DeepSpeed's engine. ``launch``: the list of hosts.
``gather``: a message of every rank. ``files``: a folder with a file of each rank. The last thing printed is a table of
all of it.

A store with 10^5 clients needs as many open files (ulimit -n 110000), and more ports than one address has, so each
process of clients connects to an address of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

PER_NODE, LAYERS, WIDTH = 8, 32, 4096
CLIENT_PROCESSES, CLIENT_THREADS = 4, 2500


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[float, Any]:
    """Return how many seconds ``call`` takes of this process's CPU time, or by another ``clock``, and its result."""
    begun = clock()
    result = call()
    return clock() - begun, result


def checkpoint(ranks: int) -> dict[str, float]:
    """Measure planning: every tensor of a 32-layer model, with AdamW's state, is divided over all ``ranks``."""
    import torch

    from wordrun.checkpoint import index
    from wordrun.checkpoint.index import StoredTensor
    from wordrun.checkpoint.sharding import Box, Cut, Sharding

    shapes = {"qkv": (3 * WIDTH, WIDTH), "proj": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    names = {
        f"{kind}.{layer}.{name}": shape
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    rank, found = ranks // 2, {}

    def plan() -> dict[str, StoredTensor]:
        made = {}
        for name, shape in names.items():
            sharding = Sharding(shape, (Cut(0, ranks, 1),))
            sharding.box(rank)
            made[name] = StoredTensor(torch.Size(shape), torch.float32, sharding, 0)
        return made

    found["plan_s"], tensors = timed(plan)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps({name: tensor.plain() for name, tensor in tensors.items()})
        (folder / index.INDEX).write_text(text)
        found["index_bytes"] = len(text)
        found["read_index_s"], stored = timed(lambda: index.load(folder))

        def find() -> int:  # as another number of ranks reads it
            windows = [
                (each, Sharding(tuple(each.shape), (Cut(0, ranks // 3, 1),)).box(ranks // 5))
                for each in stored.values()
            ]
            return sum(len(list(each.overlapping(Box(*window)))) for each, window in windows)

        found["find_shards_s"], found["shards_found"] = timed(find)
    return found


def store(ranks: int) -> dict[str, float]:
    """Measure one store with as many clients: to connect, to read the config, and to agree on a checkpoint."""

    import wordrun
    from wordrun.dist import coordination, rendezvous
    from wordrun.dist.world import World

    # torch looks up the name of an address before it connects: what that costs depends on the DNS alone.
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    config = coordination.dumps(wordrun.compose(["data=sample"]))
    context = multiprocessing.get_context("spawn")
    pipes = []
    here = World(size=ranks, hosts=("127.0.0.1",))
    server = rendezvous._host_store("0.0.0.0", 0, here, timedelta(seconds=300), wait=False)
    for number in range(CLIENT_PROCESSES):
        ours, theirs = context.Pipe()
        count = (ranks - 1) // CLIENT_PROCESSES + (number < (ranks - 1) % CLIENT_PROCESSES)
        context.Process(
            target=clients, args=(theirs, f"127.0.0.{number + 1}", server.port, ranks, count), daemon=True
        ).start()
        pipes.append(ours)
        ours.recv()

    def everywhere(what: str) -> float:
        def round_trip() -> None:
            for pipe in pipes:
                pipe.send(what)
            for pipe in pipes:
                pipe.recv()

        return timed(round_trip, time.perf_counter)[0]

    found = {"connect_s": everywhere("connect")}
    server.set("config", config)
    found |= {"config_bytes": len(config), "share_s": everywhere("config"), "arrive_s": everywhere("arrive")}
    assert server.add("here", 0) == ranks - 1
    server.set("end", b"")
    found["look_s"] = everywhere("look")
    found["rank_0_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def clients(pipe: Any, address: str, port: int, ranks: int, count: int) -> None:
    """Be ``count`` clients of the store at ``address`` and ``port``."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def connect(_: int) -> Any:
        return TCPStore(address, port, ranks, False, timeout=timedelta(seconds=300))

    mine: list[Any] = []
    acts: dict[str, Callable[[], Any]] = {
        # At the same time, as ranks do: torch looks the address up in the DNS before each connection.
        "connect": lambda: mine.extend(ThreadPoolExecutor(min(count, CLIENT_THREADS)).map(connect, range(count))),
        "config": lambda: [each.get("config") for each in mine],
        "arrive": lambda: [each.add("here", 1) for each in mine],
        "look": lambda: [each.check(["end"]) for each in mine],
    }
    pipe.send("ready")
    with contextlib.suppress(EOFError):  # at the end of the measurement
        while True:
            acts[pipe.recv()]()
            pipe.send("done")


def owners(ranks: int) -> dict[str, float]:
    """Measure how a rank finds its part in Muon's exchange of 192 matrices that are divided over ``ranks``."""
    from unittest import mock

    import torch.distributed

    from wordrun.checkpoint.sharding import Cut, Sharding
    from wordrun.train.optim.muon_assignment import assign

    shardings = [Sharding((WIDTH, WIDTH), (Cut(0, ranks, 1),))] * (6 * LAYERS)
    with mock.patch.multiple(
        "wordrun.train.optim.muon_assignment.dist",
        get_process_group_ranks=lambda _: range(ranks),
        get_rank=lambda _: ranks // 2,
    ):
        seconds, _ = timed(lambda: assign(shardings, [1.0] * len(shardings), "", torch.float32, torch.device("cpu")))
    return {"assign_s": seconds}


def mesh(ranks: int) -> dict[str, float]:
    """Measure torch's own cost: the mesh, and fully_shard of a block, in a fake process group."""
    import torch
    import torch.distributed as td
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    td.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    sizes = (1, max(1, ranks // 2048), min(2048, ranks), 1)
    seconds, made = timed(lambda: init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "replicate", "shard", "tp")))
    block = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    wide = timed(lambda: fully_shard(block, mesh=made["shard"]))[0]
    td.destroy_process_group()
    return {
        "mesh_s": seconds,
        "fully_shard_8_tensors_s": wide,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def zero(ranks: int) -> dict[str, float]:
    """Measure how long DeepSpeed's engine takes to build and to step over so many ranks, in a fake process group."""
    from functools import partial

    import torch
    import torch.distributed as td
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import wordrun
    from wordrun import backend
    from wordrun.backend.step_timer import StepTimer
    from wordrun.config.registry import part_of
    from wordrun.config.rules import check
    from wordrun.data.batch import Batch
    from wordrun.dist.world import World
    from wordrun.model.construction import meta_model

    for name in ("deepspeed", "torch._dynamo"):  # not to be measured
        importlib.import_module(name)
    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # DeepSpeed compares with rank 0
    world = World(rank=0, size=ranks, local_rank=0, local_size=PER_NODE, device="cpu")
    found = {}
    for stage in (1, 3):
        words = ["data=sample", "train.device=cpu", "train.dtype=fp32", "train.backend=deepspeed"]
        cfg = wordrun.compose([*words, "model.n_layer=1", "model.n_embd=64", f"backend.stage={stage}"], ranks=ranks)
        make = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
        model = partial(meta_model, cfg.transformer, 67)
        spec = backend.BackendSpec(cfg, world, check(cfg, ranks, PER_NODE), model, make)
        found[f"build_stage_{stage}_s"], made = timed(partial(backend.build, spec))
        tokens = torch.zeros(cfg.model.batch_size, cfg.transformer.block_size, dtype=torch.int64)
        step = partial(made.train_step, [Batch(tokens, tokens)], 1e-3, StepTimer(made.device))
        found[f"step_stage_{stage}_s"], _ = timed(step)
        made.close()
    return {**found, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def launch(ranks: int) -> dict[str, float]:
    """Measure the list of hosts: its length, and how long a rank needs to read it."""
    from wordrun.common.slurm import expand_hosts

    nodes = -(-ranks // PER_NODE)
    seconds, hosts = timed(lambda: expand_hosts(f"x[{0:05d}-{nodes - 1:05d}]"))
    return {"nodes": nodes, "expand_hosts_s": seconds, "hosts_bytes": len(",".join(hosts))}


def gather(ranks: int) -> dict[str, float]:
    """Measure what a rank does with a message of every rank, as those of checkpoints in memory."""
    from unittest import mock

    from wordrun.dist.collectives import gather_json

    def all_gather(found: list[Any], value: Any, group: Any) -> None:
        for each in found:
            each.copy_(value)

    with mock.patch.multiple(
        "wordrun.dist.collectives.dist", get_world_size=lambda group: ranks, all_gather=all_gather
    ):
        seconds, _ = timed(lambda: gather_json(["x1000c0s0b0n0", "x1000c0s0b0n0:54321", "x1000c0s0b0n0"]))
    return {"gather_json_s": seconds}


def files(ranks: int) -> dict[str, float]:
    """Measure a folder with so many files on a local disk: to make them, to list them, and to remove them."""
    with tempfile.TemporaryDirectory() as name:
        paths = [f"{name}/shards-{rank:05d}.safetensors" for rank in range(ranks)]

        def make() -> None:
            for path in paths:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))

        def remove() -> None:
            for path in paths:
                os.unlink(path)

        found = {"make_s": timed(make)[0]}
        found["list_s"] = timed(lambda: len(os.listdir(name)))[0]
        return {**found, "remove_s": timed(remove)[0]}


PARTS = {each.__name__: each for each in (checkpoint, store, owners, mesh, zero, launch, gather, files)}


def main() -> None:
    """Run each part at each size in a process of its own, print a JSON line for each, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ranks", default="1000,10000,100000")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for part in options.parts.split(","):
        for ranks in sizes:
            if options.here:
                print(json.dumps({name: float(f"{value:.3g}") for name, value in PARTS[part](ranks).items()}))
            elif part == "store" and ranks > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
                print(f"{part} of {ranks} ranks: left out, ulimit -Hn is too low", file=sys.stderr)
            else:
                words = [sys.executable, __file__, "--parts", part, "--ranks", str(ranks), "--here"]
                text = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
                print(json.dumps({"part": part, "ranks": ranks, **json.loads(text)}), flush=True)
                for name, value in json.loads(text).items():
                    rows.setdefault((part, name), {})[ranks] = value
    if rows:
        print("\n| what |", " | ".join(f"{ranks:,}" for ranks in sizes), "|\n|---|" + "---|" * len(sizes))
    for (part, name), values in rows.items():
        cells = [f"{values[ranks]:,.7g}" if ranks in values else "-" for ranks in sizes]
        print(f"| {part}: {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
