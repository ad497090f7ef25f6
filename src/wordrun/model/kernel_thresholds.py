"""Sizes from which models use another implementation of attention or loss.

This file is free of torch, because the plan of memory reads it.
"""

from __future__ import annotations

from importlib.util import find_spec

SHORT = 512
"""Number of tokens up to which a CPU in bf16 is faster without the fused kernel (measured: 64 to 512, not 1,024)."""
SHORT_FP32 = 128
"""The same for compiled models in fp32 (measured: 64 and 128, at 256 equal)."""
LARGE = 2**24
"""Number of logits above which ``output_layer.chunked_cross_entropy`` is used; below, their memory does not matter."""
CHUNK = 2**25
"""Number of logits that it computes at once, unless compiled: the largest fp32 copy of them."""
ROWS = 512
"""Maximum number of queries that attend at a time to keys gathered from other ranks; limits the size of a mask."""
SMALL_MASK = 2**22
"""Number of values of an attention mask up to which its memory does not matter."""
TRITON = find_spec("triton") is not None
"""Whether there is a compiler for FlexAttention's kernels; a constant: torch.compile cannot trace the lookup."""
LEAST_HEAD = 16
"""Least number of elements of an attention head that FlexAttention supports on a GPU."""


def skips_blocks(device: str, values: int, p: float, head_size: int) -> bool:
    """Return whether attention within documents uses FlexAttention instead of a mask of that many ``values``.

    On CPUs FlexAttention has no backward pass, and none of its kernels has dropout.

    Args:
        device: type of the device.
        values: B T T for B sequences of T tokens.
        p: dropout probability of the attention weights.
        head_size: elements of a head.
    """
    suits = values > SMALL_MASK and p == 0 and head_size >= LEAST_HEAD
    return suits and device == "cuda" and TRITON


def keeps_weights(p: float, tokens: int, *, bf16: bool, compiled: bool = False) -> bool:
    """Return whether attention over ``tokens`` on a CPU materializes the T x T weights instead of using a fused kernel.

    torch's fused CPU kernel has no dropout, and its fallback draws from a slow Bernoulli. In bf16 the kernel takes
    longer to set up its many small products than to compute them, except for long sequences. torch's compiler fuses
    what surrounds the products of unfused attention, which is then faster in fp32 as well, for short sequences.

    Args:
        p: dropout probability of the attention weights.
        tokens: length of the sequences.
        bf16: whether the computation is in bf16.
        compiled: whether the model is compiled; then dropout is left to the fused kernel.
    """
    if compiled:
        return p == 0 and tokens <= (SHORT if bf16 else SHORT_FP32)
    return p > 0 or (bf16 and tokens <= SHORT)
