"""``launch -n N python -m wordrun.study.calibrate FILE [overrides]``: how fast these ranks compute and communicate.

All ranks compute at the same time, each by itself: the passes of a model with one and with two of the blocks, and the
update of its weights. Rank 0 writes the slowest rank's times to FILE.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as td

from wordrun import bandwidth, dist
from wordrun.backend.precision import TORCH_DTYPES, fast_dtype
from wordrun.checks import require_transformer
from wordrun.composer import compose
from wordrun.config import Config
from wordrun.data.batch import Batch
from wordrun.dist.collectives import all_max
from wordrun.launch.job import count_cores
from wordrun.model import build
from wordrun.plan.cli import vocabulary
from wordrun.plan.time import Speeds
from wordrun.registry import part_of

ROUNDS = 5
"""Measurements of each model, of which the median counts."""
TICK = 1e-12
"""Ranks compare times as integers of this unit [s]."""
SIZES = "64KB..4MB"
"""Messages to measure."""


def main(argv: Sequence[str]) -> int:
    """Measure, write the file, and return the exit status."""
    cfg = compose(argv[1:])
    require_transformer(cfg, ": the plan covers transformers only")
    with dist.session(device=cfg.train.device, seed=0) as world:
        speeds = measure(cfg, world)
        if world.rank == 0:
            speeds.save(Path(argv[0]))
    return 0


def measure(cfg: Config, world: dist.World) -> Speeds:
    """Return the speeds of these ranks for the model of ``cfg``; every rank calls this."""
    device = torch.device(world.device)
    dtype = fast_dtype(cfg.train.dtype, device)
    tokens = cfg.model.batch_size * cfg.transformer.block_size
    one, update = _times(cfg, 1, device, dtype)
    two, _ = _times(cfg, 2, device, dtype)
    block = max(two - one, 0.1 * one)
    mine = [block / tokens, max(one - block, 0.0) / tokens, update]
    slowest = all_max(torch.tensor([round(each / TICK) for each in mine], device=device)) * TICK
    shared = bandwidth.measure(world, bandwidth.sizes(SIZES), None, lambda text: None) if world.size > 1 else {}
    crowd = max(1.0, world.local_size / count_cores()[0]) if device.type == "cpu" else 1.0
    block_s, rest_s, update_s = slowest.tolist()
    return Speeds(block_s, rest_s, update_s, crowd, dtype, shared.get("results", []))


def _times(cfg: Config, layers: int, device: torch.device, dtype: str) -> tuple[float, float]:
    """Return the seconds of both passes of a model with so many blocks, and those per parameter of an update."""
    vocab_size, _ = vocabulary(cfg)
    model = build(replace(cfg.transformer.one_block(), n_layer=layers), vocab_size, device=device)
    make = part_of("optimizer", cfg.optimizer).build
    optimizer = make(cfg.optimizer, model.named_parameters())
    parameters = list(model.parameters())
    shape = (cfg.model.batch_size, cfg.transformer.block_size)
    random = torch.randint(vocab_size, shape, device=device)
    batch = Batch(random, random)

    def passes() -> None:
        with torch.autocast(device.type, dtype=TORCH_DTYPES[dtype], enabled=dtype != "fp32"):
            loss = model.losses(batch).mean()
        torch.autograd.backward(loss)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    timed = [(_seconds(passes, device), _seconds(update, device)) for _ in range(ROUNDS + 1)][1:]
    middle = [statistics.median(each) for each in zip(*timed, strict=True)]
    return middle[0], middle[1] / sum(each.numel() for each in parameters)


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """Return how long ``action`` takes, begun by all ranks together."""
    td.barrier()
    _wait(device)
    begin = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
