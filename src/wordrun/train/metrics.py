"""The metrics of a run: their names, and how they are computed."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from wordrun.backend.base import Backend, StepResult
from wordrun.backend.step_timer import StepTimer
from wordrun.data.validation_set import dealt
from wordrun.dist.collectives import all_max, all_mean, all_rows, all_sum
from wordrun.dist.hang import watch
from wordrun.model import draws
from wordrun.plan import devices
from wordrun.train import rng
from wordrun.train.state import TrainState

PASSES = ("data", "forward", "backward", "passes")
"""The phases of a step that measure a rank's own work. On an accelerator, collectives may overlap with them."""
PHASES = (*PASSES, "communication", "optimizer")
GATHERED = 64
"""Up to this many ranks, times are gathered from all ranks; beyond, a histogram of constant size is reduced."""
RANK_BITS = 24
"""Bits of a rank's number. Time [us] and number are compared as one integer, whose last bits are the number."""
BINS = 32
"""With more than ``GATHERED`` ranks, the median is accurate to 1 / ``BINS`` of the difference between the slowest and
the fastest."""
IN_USE = re.compile(rb"(VmRSS|VmHWM):\s+(\d+)")
"""The process's memory and its peak in /proc/self/status [KiB]."""
OF_TOKENS = ("tps", "tps_per_gpu", "tokens")
"""Metrics that a task without tokens does not have."""
QUIET = ("val_loss", "val_perplexity")
"""Metrics that the log line of an evaluation does not list: it begins with the loss, and the perplexity is logged only
at the end of the run."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device in ``dtype``, or None if it is unknown."""
    device = devices.find(device_name)
    if device is None:
        return None
    return device.peak_fp32 if dtype == torch.float32 else device.peak_half


def device_name(device: torch.device) -> str:
    """Return the model name of ``device``."""
    if device.type in ("cuda", "xpu"):
        return str(getattr(torch, device.type).get_device_name(device))
    return "cpu"


class Meter:
    """Aggregates steps into lines of metrics. Between lines it reads nothing from the device.

    Args:
        device: compute device.
        dtype: compute dtype.
        ranks: number of ranks.
        tokens_per_example: tokens in an example; None: it has none.
        flops_per_example: floating-point operations of an example's forward and backward pass; None: unknown.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        ranks: int,
        tokens_per_example: int | None,
        flops_per_example: int | None,
    ) -> None:
        self.clock = StepTimer(device)
        self.device, self.ranks = device, ranks
        self.tokens_per_example, self.flops_per_example = tokens_per_example, flops_per_example
        self.peak = peak_flops(device_name(device), dtype)
        self._steps = self._examples = 0
        self._losses: list[torch.Tensor] = []
        """Losses of this rank that have not been passed to the spike detector yet."""
        self._last: tuple[StepResult, float]

    def add(self, result: StepResult, lr: float, examples: int) -> None:
        """Add a step with its result, its learning rate and its examples over all ranks to the next line."""
        self._steps += 1
        self._examples += examples
        self._losses.append(result.loss)
        self._last = result, lr

    def score(self, state: TrainState) -> None:
        """Pass the losses since the last line to the spike detector of ``state``, so that it can be saved.

        Every rank must call this.
        """
        if self._losses:
            losses, self._losses = all_mean(torch.stack(self._losses)).tolist(), []
            state.spikes.add(losses, state.step - len(losses) + 1)

    def line(self, state: TrainState) -> dict[str, Any]:
        """Return the metrics of the last step and of the time since the last line; every rank must call this."""
        result, lr = self._last
        steps, examples, self._steps, self._examples = self._steps, self._examples, 0, 0
        seconds = {name: each / steps for name, each in self.clock.read().items()}
        collectives = seconds.get("collectives", 0.0)
        own = sum(seconds.get(name, 0.0) for name in PASSES) - collectives
        losses, self._losses = torch.stack(self._losses).tolist(), []
        means, maxima = self._reduce(
            [
                sum(seconds.get(name, 0.0) for name in PHASES),
                seconds.get("forward", math.nan),
                seconds.get("backward", math.nan),
                seconds.get("data", 0.0),
                math.nan if collectives else seconds.get("communication", 0.0),
                seconds.get("optimizer", 0.0),
                *losses,
            ],
            own,
            [seconds.get("hooks", 0.0), *used_memory(self.device)],
        )
        dt, dtf, dtb, data, communication, optimizer, *losses = means
        hooks, memory, peak, slowest, slowest_by = maxima
        state.spikes.add(losses, state.step - len(losses) + 1)
        sps = examples / steps / dt
        size, flops = self.tokens_per_example or 0, self.flops_per_example
        line = {
            "step": state.step,
            "loss": losses[-1],
            "lr": lr,
            "grad_norm": result.grad_norm.item(),
            "dt": dt,
            "dtf": dtf,
            "dtb": dtb,
            "dt_data": data,
            "dt_comm": communication,
            "dt_optimizer": optimizer,
            "dt_hooks": hooks,
            "slowest_rank": slowest,
            "slowest_by": slowest_by,
            "sps": sps,
            "sps_per_gpu": sps / self.ranks,
            "tps": sps * size,
            "tps_per_gpu": sps * size / self.ranks,
            "mfu": 100 * sps * flops / (self.ranks * self.peak) if self.peak and flops else None,
            **state.spikes.metrics(),
            "memory": memory,
            "memory_peak": peak,
            "tokens": state.position * size,
            "time": state.elapsed(),
        }
        return line if size else {name: value for name, value in line.items() if name not in OF_TOKENS}

    def _reduce(self, values: list[float], own: float, largest: list[float]) -> tuple[list[float], list[Any]]:
        """Return the means of ``values`` over the ranks, the maxima of ``largest``, and the slowest rank.

        Args:
            values: any numbers.
            own: this rank's time, without waiting for others [s].
            largest: numbers, which may be rounded to 1e-6.

        Returns:
            The means; and in one list the maxima, the rank whose ``own`` is the longest, and by how much ``own`` there
            exceeds the median [s].
        """
        ranks = dist.get_world_size()
        if ranks > GATHERED:
            return self._reduce_many(values, own, largest)
        rows = all_rows(torch.tensor([own, *largest, *values], device=self.device)).tolist()
        times, *columns = ([row[i] for row in rows] for i in range(len(rows[0])))
        slowest = times.index(max(times))
        slowest_by = (slowest, times[slowest] - sorted(times)[(ranks - 1) // 2]) if ranks > 1 else (None, None)
        return [sum(each) / ranks for each in columns[len(largest) :]], [
            *map(max, columns[: len(largest)]),
            *slowest_by,
        ]

    def _reduce_many(self, values: list[float], own: float, largest: list[float]) -> tuple[list[float], list[Any]]:
        """Return the same as ``_reduce``, by two collectives whose size does not depend on the number of ranks."""
        ranks, rank, micro = dist.get_world_size(), dist.get_rank(), round(1e6 * own)
        sent = [micro << RANK_BITS | rank, -micro, *(round(1e6 * value) for value in largest)]
        packed, negated_least, *highest = all_max(torch.tensor(sent, device=self.device)).tolist()
        longest, slowest = divmod(packed, 1 << RANK_BITS)
        spread = longest + negated_least
        # A maximum of negated times is their minimum. A histogram between the two extremes gives the median.
        bins = torch.zeros(2, BINS)
        above_least = micro + negated_least
        bins[:, min(BINS - 1, BINS * above_least // max(1, spread))] = torch.tensor([1.0, above_least])
        sums = all_sum(torch.cat((torch.tensor(values), bins.flatten())).to(self.device)).tolist()
        counts, totals = sums[-2 * BINS : -BINS], sums[-BINS:]
        at = next(i for i, count in enumerate(itertools.accumulate(counts)) if count > (ranks - 1) // 2)
        by = (spread - totals[at] / counts[at]) / 1e6
        return [each / ranks for each in sums[: len(values)]], [*(value / 1e6 for value in highest), slowest, by]


def used_memory(device: torch.device) -> tuple[float, float]:
    """Return the memory of ``device`` in use by this process, and its peak so far [GiB]; on a CPU, the process's.

    On a CPU without /proc, both are the peak.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return module.memory_allocated(device) / 2**30, module.max_memory_allocated(device) / 2**30
    try:
        with Path("/proc/self/status").open("rb", buffering=0) as file:
            status = dict(IN_USE.findall(file.read()))
        now, peak = (int(status[name]) / 2**20 for name in (b"VmRSS", b"VmHWM"))
    except (OSError, KeyError):
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    return now, peak


def rate(metrics: dict[str, Any]) -> str:
    """Return the throughput in ``metrics``: tokens, or examples where the task has no tokens."""
    return f"{metrics['tps']:,.0f} tokens/s" if "tps" in metrics else f"{metrics['sps']:,.0f} examples/s"


def one_line(metrics: dict[str, Any], max_iters: int, seconds_left: float = 0.0) -> str:
    """Return the most important of ``metrics`` as a line for the log."""
    parts = [
        f"step {metrics['step']}/{max_iters}",
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['lr']:.2e}",
        rate(metrics),
    ]
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1f} %")
    parts.append(f"{metrics['memory']:.2f} GiB")
    if seconds_left:
        parts.append(f"{timedelta(seconds=round(min(seconds_left, timedelta.max.total_seconds() - 1)))} left")
    return "  ".join(parts)


class ValidationSet(Protocol):
    """This rank's share of the validation examples, in the same number of batches on every rank."""

    def __len__(self) -> int:
        """Return the number of batches."""

    def __getitem__(self, i: int, /) -> tuple[Any, torch.Tensor]:
        """Return a batch, and the weight of each of its examples, (B,)."""


@contextlib.contextmanager
def evaluation_mode(backend: Backend) -> Iterator[None]:
    """Put the model into evaluation mode within a ``with`` block, in which its weights must not change."""
    training = backend.parts[0].training
    for part in backend.parts:
        part.eval()
    try:
        # autocast keeps cast weights until the outermost context ends: with this one, for the whole evaluation.
        with torch.autocast(backend.device.type, enabled=False):
            yield
    finally:
        for part in backend.parts:
            part.train(training)


Measure = Callable[[Any, torch.Tensor], dict[str, torch.Tensor]]
"""Returns further values of each example of a batch, (B,) or (B, K), by name, given the batch and the model's outputs.
"""
Compute = Callable[[torch.Tensor], float]
"""Returns a metric, given the sums of its values over all examples, (K,)."""


class MetricOfSums:
    """Base class of metrics that are not means over examples, such as R2, F1 and AUC: they are computed from sums.

    Args:
        options: the metric's options.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    def sums(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return what each example of ``batch`` adds to the metric's K sums, (B, K).

        Args:
            outputs: what the model's ``forward`` returned when ``losses`` called it.
            batch: as for ``losses``.
        """
        raise NotImplementedError

    def compute(self, sums: torch.Tensor) -> Any:
        """Return the metric, a number, given the ``sums`` over all examples of all ranks, (K,) in fp64 on the CPU."""
        raise NotImplementedError


def evaluate(
    backend: Backend,
    validation: ValidationSet,
    measure: Measure | None = None,
    batches: int | None = None,
    *,
    computed: Mapping[str, Compute] = MappingProxyType({}),
    share: tuple[int, int] = (0, 1),
) -> dict[str, float]:
    """Return the mean loss over ``validation`` on all ranks, under "loss", and what follows from ``measure``.

    Every rank must call this. Torch's random numbers in it are the same at each evaluation, and afterwards continue as
    if there had been none.

    Args:
        backend: holds the model.
        validation: this rank's share of the examples.
        measure: returns further values of each example; their means are returned.
        batches: how many of its batches each rank uses; None: all.
        computed: by name, what is returned of values of ``measure`` instead of their mean.
        share: the index of this rank's share, and the number of different shares.
    """
    totals: dict[str, torch.Tensor] = {}
    index, shares = share
    with evaluation_mode(backend), rng.swapped({}):
        torch.manual_seed(index)
        for i in range(len(validation))[:batches]:
            watch.mark()
            batch, weights = validation[i]
            batch = batch.to(backend.device)
            outputs: list[torch.Tensor] = []
            with draws.for_examples(dealt(i, len(weights), index, shares)):
                values = {"loss": backend.losses(batch) if measure is None else backend.losses(batch, outputs)}
            if measure is not None:
                with torch.no_grad():
                    values |= measure(batch, outputs[-1])
            for name, each in values.items():
                # (K, B); 0 x inf would be NaN.
                rows = each.detach().cpu().double().reshape(len(weights), -1).T
                total = torch.cat((torch.where(weights > 0, rows * weights, 0.0).sum(1), weights.sum()[None]))
                totals[name] = totals.get(name, torch.zeros(len(total), dtype=torch.float64)) + total
    sums = torch.cat([*totals.values()]).to(backend.device, _dtype_of_sums(backend.device))
    # Ranks that share an example count it more than once.
    sums = all_sum(sums).cpu().double() * shares / dist.get_world_size()
    found = dict(zip(totals, torch.split(sums, [len(total) for total in totals.values()]), strict=True))
    return {
        name: computed[name](each[:-1]) if name in computed else float(each[0] / each[-1])
        for name, each in found.items()
    }


def _dtype_of_sums(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 on a device that has no fp64."""
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float32 if device.type == "mps" else torch.float64
