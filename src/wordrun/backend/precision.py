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
    name = fast_dtype(asked, device)
    if name != asked and asked != "auto":
        LOGGER.info(
            "train.dtype=%s: this %s has no fast %s and would emulate it, so the run computes in fp32",
            asked, "processor" if device.type == "cpu" else torch.accelerator.current_accelerator(), asked,
        )  # fmt: skip
    return TORCH_DTYPES[name]


def fast_dtype(asked: str, device: torch.device) -> str:
    """Return the name of the compute dtype: fp32, bf16 or fp16; see ``choose_dtype``."""
    name = "bf16" if asked == "auto" else asked
    return name if _is_fast(TORCH_DTYPES[name], device) else "fp32"


def _is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype == torch.float32 or device.type == "xpu":
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype == torch.bfloat16 and compat.cpu_is_fast_at_bf16()
