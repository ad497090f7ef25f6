"""The time of an optimizer step, from the measured speeds of a device and of its network.

A step is the passes through the blocks, the pipeline's idle time, communication, and the update of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from wordrun.checks import vocab_multiple
from wordrun.config import PPConfig, checkpointing_of
from wordrun.errors import ConfigError
from wordrun.plan.shapes import ModelShapes, numel, shapes_of
from wordrun.plan.strategy import Strategy, bubble, stages_of
from wordrun.plan.traffic import Traffic, ring, traffic

RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1 / 3}
"""Time of recomputation, relative to that of both passes, by train.activation_checkpointing."""
ASSUMED_SHARE = 0.4
"""Fraction of a device's peak FLOP/s at which blocks compute, if it has not been measured."""
HIDDEN = 0.5
"""Fraction of the passes behind which an accelerator can hide averaging gradients and gathering parameters."""
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Passes around a ring; other operations send their buffer once."""


@dataclass(frozen=True)
class Speeds:
    """How fast a rank computes this model, with as many ranks per node as in the run."""

    block_s: float
    """Seconds per token for the forward and backward pass of a block."""
    rest_s: float
    """The same for everything else: embedding, output layer, loss."""
    update_s: float
    """Seconds per parameter for clipping and the optimizer."""
    block_pass_s: float = 0.0
    """Seconds that both passes of a block take for any number of tokens."""
    rest_pass_s: float = 0.0
    """The same for everything else."""
    split: list[dict[str, Any]] = field(default_factory=list)
    """What tensor parallelism adds besides messages, as ``ranks`` in a group, ``block_s`` and ``rest_s`` [s] for both
    passes: each operation finds out how its tensors are divided, and ranks wait for each other. Empty on accelerators,
    which compute meanwhile."""
    copy_s: float = 0.0
    """Seconds per byte to copy parameters or gradients into new memory; 0 on accelerators, as above."""
    crowd: float = 1.0
    """Ranks per core of a CPU, if there are more ranks than cores; otherwise 1."""
    dtype: str = "auto"
    """The dtype in which it was measured."""
    bandwidth: list[dict[str, Any]] = field(default_factory=list)
    """Results of ``test_dist --bench``."""

    def split_of(self, tp: int) -> tuple[float, float]:
        """Return the seconds that ``tp`` ranks add to a block and to the rest, by the nearest measured number."""
        if tp == 1 or not self.split:
            return 0.0, 0.0
        nearest = min(self.split, key=lambda each: abs(math.log(each["ranks"] / tp)))
        return nearest["block_s"], nearest["rest_s"]

    def save(self, file: Path) -> None:
        """Write the speeds as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_speeds(file: Path) -> Speeds:
    """Return the speeds that ``Speeds.save`` wrote.

    Raises:
        ConfigError: the file cannot be read or is something else.
    """
    found = _read(file)
    if found.keys() != {each.name for each in fields(Speeds)}:
        if "block_s" in found:
            raise ConfigError(f"{file} was measured by another version of wordrun: remove it, and measure again")
        raise ConfigError(f"{file} has no speeds: it should be a file written by wordrun.study.calibrate")
    return Speeds(**found)


def load_bandwidth(file: Path) -> list[dict[str, Any]]:
    """Return the results in a bandwidth.json of ``test_dist --bench``.

    Raises:
        ConfigError: the file cannot be read or is something else.
    """
    results = _read(file).get("results")
    needed = {"operation", "ranks", "size", "seconds"}
    if not isinstance(results, list) or not all(isinstance(each, dict) and needed <= each.keys() for each in results):
        raise ConfigError(
            f"{file} has no results: it should be a bandwidth.json of python -m wordrun.test_dist --bench"
        )
    return results


def of_network(gb_per_s: float) -> list[dict[str, Any]]:
    """Return results as of ``test_dist --bench`` for a network of ``gb_per_s`` [10^9 bytes/s] per device."""
    times = {name: ring(PASSES.get(name, 0), 2) or 1.0 for name in (*PASSES, "point_to_point")}
    return [
        {"operation": name, "ranks": 2, "size": size, "seconds": share * size / gb_per_s / 1e9}
        for name, share in times.items()
        for size in (2**10, 2**30)
    ]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    return found if isinstance(found, dict) else {}


def assumed(model: ModelShapes, peak: float) -> Speeds:
    """Return the speeds of a device of ``peak`` FLOP/s that has not been measured.

    A product with a matrix of n elements takes 6 n operations per token in both passes, attention 12 per token and
    element of the width (Chowdhery et al. 2022, appendix B).
    """
    attention = 12 * model.cfg.n_embd * sum(model.cfg.attention_spans()) / model.cfg.n_layer
    products = [6 * numel([each for each in some if each.matmul]) for some in (model.block, model.last)]
    experts = 6 * numel([each for each in model.block if each.expert])
    block, rest = products[0] - experts * (1 - model.cfg.active_fraction()) + attention, products[1]
    speed = ASSUMED_SHARE * peak
    return Speeds(block / speed, rest / speed, 0.0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step."""

    compute: float
    """Forward and backward passes, with the pipeline's idle time."""
    communication: float
    """What is not hidden behind computation."""
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.communication + self.update


def step_time(model: ModelShapes, strategy: Strategy, checkpointing: str, speeds: Speeds) -> StepTime:
    """Return the time of a step under ``strategy``, on the rank that takes longest.

    Raises:
        NoEstimateError: the plan does not cover this backend.
        ConfigError: there are ranks to communicate with, and no measured bandwidth.
    """
    multiple = vocab_multiple(strategy.cfg, strategy.layout.tp, on_cpu=strategy.on_cpu)
    if model.vocab_size % multiple:
        model = shapes_of(model.cfg, model.vocab_size, multiple)
    compute = _compute(model, strategy, checkpointing, speeds)
    talk = max(
        _communication(traffic(strategy.backend, model, strategy, rank), strategy, speeds)
        for rank in range(strategy.layout.pp)
    )
    if not strategy.on_cpu and strategy.layout.tp == strategy.layout.pp == 1:
        talk = max(0.0, talk - HIDDEN * compute)
    at = strategy.layout
    shard = 1 if strategy.backend.replicated else at.shards
    held = numel(model.stage(model.layers), at.tp, shard) / at.pp
    return StepTime(compute, talk, speeds.update_s * held)


def _compute(model: ModelShapes, strategy: Strategy, checkpointing: str, speeds: Speeds) -> float:
    recomputed = sum(RECOMPUTED[checkpointing_of(checkpointing, layer)] for layer in model.layers) / len(model.layers)
    at, options = strategy.layout, strategy.backend
    last = model.cfg.n_layer - 1
    parts = options.microbatches_of(strategy.cfg.model.batch_size, at.pp)
    tokens = strategy.tokens / parts
    split = speeds.split_of(at.tp)
    block = (1 + recomputed) * (speeds.block_s * tokens + speeds.block_pass_s) / at.tp + split[0]
    rest = (speeds.rest_s * tokens + speeds.rest_pass_s) / at.tp + split[1]

    def of(layers: Sequence[int]) -> float:
        """Return the time of both passes of a micro-batch on a rank that holds the blocks ``layers``."""
        return len(layers) * block + (last in layers) * rest

    if isinstance(options, PPConfig):
        ranks = [sum(map(of, stages_of(strategy, options, rank))) for rank in range(at.pp)]
    else:
        ranks = [of(model.layers)]
    # Where ranks share cores, one that waits leaves its core to the others.
    busiest = max(max(ranks) / speeds.crowd, sum(ranks) / len(ranks))
    stretch = max(1.0, 1 / (1 - bubble(strategy)) / speeds.crowd)
    return busiest * stretch * parts * strategy.gas


def _communication(found: Sequence[Traffic], strategy: Strategy, speeds: Speeds) -> float:
    over_mpi = strategy.on_cpu and strategy.backend.replicated
    sending = sum(seconds(each, speeds.bandwidth, over_mpi=over_mpi) for each in found if each.ranks > 1 and each.sent)
    return sending + speeds.copy_s * sum(each.copied for each in found)


def seconds(found: Traffic, results: Sequence[dict[str, Any]], *, over_mpi: bool = False) -> float:
    """Return the seconds for all messages of ``found``, interpolated between measured sizes.

    Args:
        found: what is sent.
        results: of ``test_dist --bench``.
        over_mpi: whether to prefer what was measured with mpi4py.

    Raises:
        ConfigError: the operation has not been measured.
    """
    names = [f"{found.operation} (mpi4py)"] * over_mpi + [found.operation]
    mine = next((some for name in names if (some := [each for each in results if each["operation"] == name])), [])
    if not mine:
        raise ConfigError(f"the bandwidth of {found.operation} has not been measured")
    ranks = min({each["ranks"] for each in mine}, key=lambda n: (n < 2, abs(math.log(n / found.ranks))))
    # Of several groups of so many ranks, such as those of two axes, the slowest.
    times = [*dict(sorted((each["size"], each["seconds"]) for each in mine if each["ranks"] == ranks)).items()]
    # A ring of n ranks sends (n - 1) / n of the buffer in each pass, so that many passes take longer with more ranks.
    passes = PASSES.get(found.operation)
    share, measured = (1.0, 1.0) if passes is None else (ring(passes, found.ranks), ring(passes, ranks) or 1.0)
    return found.sent / (share * found.message) * _at(times, found.message) * share / measured


def _at(times: Sequence[tuple[float, float]], size: float) -> float:
    """Return the time of a message of ``size`` bytes; beyond the measured sizes the bandwidth stays the same."""
    for (small, fast), (large, slow) in pairwise(times):
        if size <= large:
            return fast + (slow - fast) * max(0.0, size - small) / (large - small)
    return times[-1][1] * max(1.0, size / times[-1][0])
