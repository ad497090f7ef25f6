"""The metrics of a run: their names, and how they are computed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch

from wordrun import devices
from wordrun.backend import Backend, StepResult
from wordrun.backend.stopwatch import Stopwatch
from wordrun.dist import watch
from wordrun.dist.collectives import all_mean, all_sum
from wordrun.errors import UserError
from wordrun.train.state import TrainState

OF_TOKENS = ("tps", "tps_per_gpu", "tokens")
"""Metrics that a task without tokens does not have."""


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
        examples_per_step: examples in one step over all ranks.
        tokens_per_example: tokens in an example; None: it has none.
        flops_per_example: floating-point operations of an example's forward and backward pass; None: unknown.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, ranks: int, examples_per_step: int,
        tokens_per_example: int | None, flops_per_example: int | None,
    ) -> None:  # fmt: skip
        self.clock = Stopwatch(device)
        self.device, self.ranks = device, ranks
        self.examples_per_step, self.tokens_per_example = examples_per_step, tokens_per_example
        self.flops_per_example = flops_per_example
        self.peak = peak_flops(device_name(device), dtype)
        self._steps = 0
        self._last: tuple[StepResult, float]

    def add(self, result: StepResult, lr: float) -> None:
        """Add a step with its result and its learning rate to the next line."""
        self._steps += 1
        self._last = result, lr

    def line(self, state: TrainState) -> dict[str, Any]:
        """Return the metrics of the last step and of the time since the last line; every rank must call this."""
        seconds = self.clock.read()
        result, lr = self._last
        steps, self._steps = self._steps, 0
        passes = [seconds.get(name, math.nan) / steps for name in ("forward", "backward")]
        means = all_mean(torch.tensor([result.loss.item(), sum(seconds.values()) / steps, *passes], device=self.device))
        loss, dt, dtf, dtb = means.tolist()
        sps = self.examples_per_step / dt
        size, flops = self.tokens_per_example or 0, self.flops_per_example
        line = {
            "step": state.step, "loss": loss, "lr": lr, "grad_norm": result.grad_norm.item(),
            "dt": dt, "dtf": dtf, "dtb": dtb, "sps": sps, "sps_per_gpu": sps / self.ranks,
            "tps": sps * size, "tps_per_gpu": sps * size / self.ranks,
            "mfu": 100 * sps * flops / (self.ranks * self.peak) if self.peak and flops else None,
            "tokens": state.position * size, "time": state.elapsed(),
        }  # fmt: skip
        return line if size else {name: value for name, value in line.items() if name not in OF_TOKENS}


def rate(metrics: dict[str, Any]) -> str:
    """Return the throughput in ``metrics``: tokens, or examples where the task has no tokens."""
    return f"{metrics['tps']:,.0f} tokens/s" if "tps" in metrics else f"{metrics['sps']:,.0f} examples/s"


def one_line(metrics: dict[str, Any], max_iters: int, seconds_left: float = 0.0) -> str:
    """Return the most important of ``metrics`` as a line for the log."""
    parts = [
        f"step {metrics['step']}/{max_iters}", f"loss {metrics['loss']:.4f}", f"{1000 * metrics['dt']:.1f} ms/step",
        rate(metrics),
    ]  # fmt: skip
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1f} %")
    if seconds_left:
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


class ValidationSet(Protocol):
    """This rank's share of the validation examples, in the same number of batches on every rank."""

    def __len__(self) -> int:
        """Return the number of batches."""

    def __getitem__(self, i: int, /) -> tuple[Any, torch.Tensor]:
        """Return a batch, and the weight of each of its examples, (B,)."""


@contextlib.contextmanager
def evaluation_mode(backend: Backend) -> Iterator[None]:
    """Put the model into evaluation mode within a ``with`` block."""
    training = backend.parts[0].training
    for part in backend.parts:
        part.eval()
    yield
    for part in backend.parts:
        part.train(training)


Measure = Callable[[Any, torch.Tensor], dict[str, torch.Tensor]]
"""Returns further values of each example of a batch, (B,), by name, given the batch and the model's outputs."""


def means(backend: Backend, validation: ValidationSet, measure: Measure | None = None) -> dict[str, float]:
    """Return the means over ``validation`` on all ranks: of the loss, under "loss", and of what ``measure`` returns.

    Every rank must call this.

    Raises:
        UserError: a value has another shape than (B,).
    """
    totals: dict[str, torch.Tensor] = {}
    with evaluation_mode(backend):
        for i in range(len(validation)):
            watch.mark()
            batch, weights = validation[i]
            batch = batch.to(backend.device)
            outputs: list[torch.Tensor] = []
            values = {"loss": backend.losses(batch) if measure is None else backend.losses(batch, outputs)}
            if measure is not None:
                with torch.no_grad():
                    values |= measure(batch, outputs[-1])
            for name, each in values.items():
                if each.shape != weights.shape:
                    raise UserError(
                        f"{name} of a batch has the shape {list(each.shape)}, but should have a value for each "
                        f"example: {list(weights.shape)}"
                    )
                total = torch.stack(((each.cpu().double() * weights).sum(), weights.sum()))
                totals[name] = totals.get(name, torch.zeros(2, dtype=torch.float64)) + total
    sums = all_sum(torch.stack(list(totals.values())).float().to(backend.device)).tolist()
    return {name: total / count for name, (total, count) in zip(totals, sums, strict=True)}
