"""Chooses the compute dtype for a device."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from wordrun import dist
from wordrun.common.log import LOGGER
from wordrun.config.schema import Config
from wordrun.dist import torch_private
from wordrun.dist.collectives import all_min

GAIN = 1.25
"""bf16 is used if a matrix product in it is at least this many times as fast as in fp32. From a width of 128 on, AMD
Zen 4 and Intel's AMX reach 2 to 4, Intel processors with only AVX512_BF16 0.5, and those that emulate bf16 0.01. So the
choice is the same at each start of a run."""
ROWS, WIDTHS = 256, (256, 512)
"""The size of that product: rows, and the smallest and largest width, so that it takes a few milliseconds."""
ROUNDS = 8
"""Number of measurements. The shortest time counts, because other load makes some of them longer."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype, and log a message if it is not the requested one.

    Args:
        asked: fp32, bf16, fp16, or auto (bf16 if ``device`` is fast at it, else fp32).
        device: where the model runs.
    """
    name = fast_dtype(asked, device)
    if name != asked and asked != "auto":
        LOGGER.info(
            "train.dtype=%s: this %s has no fast %s and would emulate it, so the run computes in fp32",
            asked,
            "processor" if device.type == "cpu" else torch.accelerator.current_accelerator(),
            asked,
        )
    return TORCH_DTYPES[name]


def settled_dtype(cfg: Config, world: dist.World, kept: str | None = None) -> str:
    """Return the dtype in which all ranks compute: fp32, bf16 or fp16; every rank must call this.

    With train.dtype=auto on CPUs that are fast at bf16, rank 0 measures whether it is faster than fp32 at this width.
    With train.deterministic, two starts must not differ, so nothing is measured.

    Args:
        cfg: the config.
        world: the ranks.
        kept: the dtype of the checkpoint from which the run is resumed, which train.dtype=auto keeps.
    """
    device, asked = torch.device(world.device), cfg.train.dtype
    wanted = kept if asked == "auto" and kept else asked
    if wanted == "auto" and device.type == "cpu" and not cfg.train.deterministic:
        wanted = "bf16" if dist.broadcast(world.rank == 0 and _gains(cfg, device), world) else "fp32"
    dtype = choose_dtype(wanted, device)
    everywhere = all_min(torch.tensor(float(dtype != torch.float32), device=device)).item()
    return NAMES[dtype] if everywhere else "fp32"


def _gains(cfg: Config, device: torch.device) -> bool:
    """Return whether this CPU is faster in bf16 than in fp32; if its bf16 instructions are slower, log that."""
    if fast_dtype("auto", device) != "bf16":
        return False
    gain = bf16_gain(getattr(cfg.model, "n_embd", None) or 0)
    if gain < GAIN:
        text = "train.dtype=auto: fp32, because matrix products of this size are only %.2g times as fast in bf16"
        LOGGER.info(text, gain)
    return gain >= GAIN


def bf16_gain(width: int) -> float:
    """Return how many times as fast as in fp32 this CPU computes a layer of this ``width`` in bf16, with casts."""
    size = min(max(width, WIDTHS[0]), WIDTHS[1])
    x, weight = torch.ones(ROWS, size), torch.ones(4 * size, size)
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the thread's processor time is that of the product
    try:
        with torch.no_grad():
            for _ in range(ROUNDS):
                for dtype, each in seconds.items():
                    begin = time.thread_time()
                    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                        F.linear(x, weight)
                    each.append(time.thread_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def fast_dtype(asked: str, device: torch.device) -> str:
    """Return the name of the compute dtype: fp32, bf16 or fp16; see ``choose_dtype``."""
    name = "bf16" if asked == "auto" else asked
    return name if _is_fast(TORCH_DTYPES[name], device) else "fp32"


def _is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype == torch.float32 or device.type == "xpu":
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype == torch.bfloat16 and torch_private.cpu_is_fast_at_bf16()
