"""The figures of a run: their names, and how they are computed."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from wordrun import devices
from wordrun.backend import StepResult
from wordrun.backend.stopwatch import Stopwatch
from wordrun.dist.collectives import all_mean

LEGEND = {
    "step": "optimizer steps done",
    "loss": "training loss of this step, mean over all ranks [nats/token]",
    "val_loss": "mean loss over the fixed validation set [nats/token]",
    "lr": "learning rate of this step",
    "grad_norm": "norm of all gradients before clipping",
    "dt": "time of a step, mean since the last line [s]",
    "dtf": "part of dt in forward passes, unless they mingle with the backward ones in a pipeline [s]",
    "dtb": "part of dt in backward passes, with their communication [s]",
    "sps": "sequences per second, all ranks",
    "sps_per_gpu": "sequences per second and rank",
    "tps": "tokens per second, all ranks",
    "tps_per_gpu": "tokens per second and rank",
    "mfu": "share of the devices' peak FLOP/s that the model uses [%]",
    "tokens": "tokens seen since the start, all ranks",
    "time": "wall time since the start [s]",
}
"""Names in metrics.jsonl, in W&B and on the console."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device in ``dtype``, or None where the table does not know it."""
    device = devices.find(device_name)
    if device is None:
        return None
    return device.peak_fp32 if dtype == torch.float32 else device.peak_half


def device_name(device: torch.device) -> str:
    """Return the model name of ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    return "cpu"


class Meter:
    """Turns steps into one line of metrics. Between lines it reads nothing from the device."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sequences_per_step: int, block_size: int,
        flops_per_token: int, ranks: int, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.clock = Stopwatch(device)
        self.device = device
        self.sequences_per_step, self.block_size = sequences_per_step, block_size
        self.flops_per_token, self.ranks = flops_per_token, ranks
        self.peak = peak_flops(device_name(device), dtype)
        self._begin = time.monotonic() - seconds  # a continued run's clock goes on
        self._steps = 0

    def count_step(self) -> None:
        """Count one step into the next line."""
        self._steps += 1

    def seconds(self) -> float:
        """Return the wall seconds since the start."""
        return time.monotonic() - self._begin

    def line(self, step: int, sequences: int, result: StepResult, lr: float) -> dict[str, Any]:
        """Return the metrics of ``step`` and of the time since the last line; every rank must call this.

        Args:
            step: optimizer steps done.
            sequences: that all ranks have seen since the start.
            result: of the step.
            lr: its learning rate.
        """
        seconds = self.clock.read()
        steps, self._steps = max(1, self._steps), 0
        passes = [seconds.get(name, math.nan) / steps for name in ("forward", "backward")]
        figures = all_mean(
            torch.tensor([result.loss.item(), sum(seconds.values()) / steps, *passes], device=self.device)
        )
        loss, dt, dtf, dtb = figures.tolist()
        sps = self.sequences_per_step / dt
        mfu = None
        if self.peak:
            mfu = 100 * sps * self.block_size * self.flops_per_token / (self.ranks * self.peak)
        return {
            "step": step, "loss": loss, "lr": lr, "grad_norm": result.grad_norm.item(),
            "dt": dt, "dtf": dtf, "dtb": dtb, "sps": sps, "sps_per_gpu": sps / self.ranks,
            "tps": sps * self.block_size, "tps_per_gpu": sps * self.block_size / self.ranks, "mfu": mfu,
            "tokens": sequences * self.block_size, "time": self.seconds(),
        }  # fmt: skip


def one_line(metrics: dict[str, Any], max_iters: int) -> str:
    """Return ``metrics`` as a line for people."""
    parts = [f"step {metrics['step']}/{max_iters}", f"loss {metrics['loss']:.4f}", f"lr {metrics['lr']:.2e}"]
    parts += [f"grad_norm {metrics['grad_norm']:.2f}"]
    times = ((name, metrics[name]) for name in ("dt", "dtf", "dtb"))
    parts += [f"{name} {seconds * 1000:.1f}ms" for name, seconds in times if not math.isnan(seconds)]
    parts += [f"sps {metrics['sps']:.1f}", f"tps {metrics['tps']:,.0f}", f"tps_per_gpu {metrics['tps_per_gpu']:,.0f}"]
    if metrics["mfu"] is not None:
        parts.append(f"mfu {metrics['mfu']:.1f}%")
    return "  ".join(parts)
