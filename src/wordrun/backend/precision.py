"""Chooses the compute dtype for a device."""

from __future__ import annotations

import torch

from wordrun import compat
from wordrun.log import LOGGER

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype, and log a message if it is not the requested one.

    Args:
        asked: fp32, bf16, fp16, or auto (bf16 if ``device`` is fast at it, else fp32).
        device: where the model runs.
    """
    if asked == "auto":
        return torch.bfloat16 if _is_fast(torch.bfloat16, device) else torch.float32
    dtype = TORCH_DTYPES[asked]
    if not _is_fast(dtype, device):
        LOGGER.info(
            "train.dtype=%s: this %s has no fast %s and would emulate it, so the run computes in fp32",
            asked, "processor" if device.type == "cpu" else torch.accelerator.current_accelerator(), asked,
        )  # fmt: skip
        return torch.float32
    return dtype


def _is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype == torch.float32 or device.type == "xpu":
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype == torch.bfloat16 and compat.cpu_is_fast_at_bf16()
