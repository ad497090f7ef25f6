"""Activation memory: what a block saves for its backward pass, by kind of model, and how much a rank needs for it.

To plan another kind of model, register a function for its config: ``saved_tensors.register(MyConfig)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from wordrun.config import GPTConfig, LlamaConfig, ModelConfig
from wordrun.plan.shapes import ModelShapes
from wordrun.plan.strategy import FP32, NoEstimateError, Strategy

CROSS_ENTROPY = 12
"""Bytes per logit when its backward pass begins: the log-probabilities and two gradients of them, in fp32."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves between its forward and its backward pass."""

    width: int
    """Elements per token."""
    dtype: str = "compute"
    """compute (that of matrix products), stream (that of the residual stream), fp32 or byte."""
    matmul: bool = False
    """Whether it is the result of a matrix product, which selective activation checkpointing keeps."""
    needed: bool = True
    """Whether the backward pass reads it; if not, only selective activation checkpointing keeps it."""
    readers: int = 0
    """Matrix products that read it as the result of a norm, all of it on each rank of a tensor-parallel group: under
    autocast each makes its own 16-bit copy."""


@singledispatch
def saved_tensors(cfg: ModelConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """Return the tensors that one block saves for its backward pass, besides its input.

    Args:
        cfg: the model; its type selects the function.
        on_cpu: on a CPU rather than an accelerator; their kernels save different tensors.
        bf16: computed in bf16.

    Raises:
        NoEstimateError: no function is registered for this type.
    """
    raise NoEstimateError(f"no estimate for model={cfg.name}: the activations of a {type(cfg).__name__} are unknown")


@saved_tensors.register(GPTConfig)
def _gpt(cfg: GPTConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """32 C bytes per token with the input in 16 bits, 34 C with dropout (Korthikanti et al. 2022, section 4.1)."""
    C = cfg.n_embd
    statistics = SavedTensor(2, dtype="fp32")  # a norm's mean and deviation
    return [
        statistics,
        SavedTensor(C, readers=1),  # the norm's result, for qkv
        SavedTensor(3 * C, matmul=True),  # q, k, v
        SavedTensor(C, matmul=True),  # the attention's result, for its projection
        SavedTensor(C, matmul=True, needed=False),  # the projection
        SavedTensor(C, dtype="stream"),  # between attention and MLP, for the norm
        statistics,
        SavedTensor(C, readers=1),  # the norm's result, for up
        SavedTensor(4 * C, matmul=True),  # up, for the GELU
        SavedTensor(4 * C),  # the GELU's result, for the projection
        SavedTensor(C, matmul=True, needed=False),  # the projection
        *_attention(cfg, on_cpu=on_cpu, bf16=bf16),
    ]


@saved_tensors.register(LlamaConfig)
def _llama(cfg: LlamaConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    C, hidden = cfg.n_embd, cfg.n_hidden
    shared = C * (cfg.n_kv_head or cfg.n_head) // cfg.n_head
    # The mean square; a CPU's RMSNorm consists of several operations, and the scaled input is saved between two.
    norm = [SavedTensor(1, dtype="fp32"), *([SavedTensor(C, dtype="stream")] if on_cpu else [])]
    return [
        *norm,
        SavedTensor(C, readers=3),  # the norm's result, for q, k and v
        *(SavedTensor(width, matmul=True, needed=False) for width in (C, shared)),  # q, k
        *(SavedTensor(width) for width in (C, shared)),  # q, k after rotation
        SavedTensor(shared, matmul=True),  # v
        SavedTensor(C, matmul=True),  # the attention's result, for its projection
        SavedTensor(C, matmul=True, needed=False),  # the projection
        SavedTensor(C, dtype="stream"),  # between attention and MLP, for the norm
        *norm,
        SavedTensor(C, readers=2),  # the norm's result, for gate and up
        *[SavedTensor(hidden, matmul=True)] * 2,  # gate and up
        *[SavedTensor(hidden)] * 2,  # the gate's SiLU, and its product with up
        SavedTensor(C, matmul=True, needed=False),  # the projection
        *_attention(cfg, on_cpu=on_cpu, bf16=bf16),
    ]


def _attention(cfg: ModelConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """Return what the softmax of attention and dropout save.

    Fused attention has no T x T matrix. Without it (``keeps_weights``) the weights are saved, and with dropout also its
    mask and their product.
    """
    from wordrun.model.attention import keeps_weights

    C, N, T = cfg.n_embd, cfg.n_head, cfg.block_size
    masks = [SavedTensor(C, dtype="compute" if on_cpu else "byte")] * 2 if cfg.dropout else []
    if on_cpu and keeps_weights(cfg.dropout, T, bf16=bf16):
        return [*masks, *[SavedTensor(N * T)] * (3 if cfg.dropout else 1)]
    return [*masks, SavedTensor(N, dtype="fp32", matmul=True)]


def activation_memory(
    model: ModelShapes, strategy: Strategy, checkpointing: str, layers: Sequence[int], parts: int = 1
) -> dict[str, Any]:
    """Return the ``activations``, ``logits`` and ``block`` of a Memory, in bytes.

    Args:
        model: the complete model.
        strategy: for the batch and the layout.
        checkpointing: as train.activation_checkpointing.
        layers: numbers of the blocks of this stage.
        parts: micro-batches that a micro-step's sequences are split into.
    """
    cfg, tp, tokens = model.cfg, strategy.layout.tp, strategy.tokens / parts
    sizes = {"compute": strategy.compute, "stream": strategy.stream, "fp32": FP32, "byte": 1}
    autocast = strategy.stream != strategy.compute
    tensors = saved_tensors(cfg, on_cpu=strategy.on_cpu, bf16=strategy.cfg.train.dtype == "bf16")

    def size(tensor: SavedTensor) -> float:
        copies = max(1, tensor.readers if autocast else 1)
        return tensor.width * copies * sizes[tensor.dtype] / (1 if tensor.readers else tp)

    needed = sum(size(each) for each in tensors if each.needed)
    products = sum(size(each) for each in tensors if each.matmul)
    start = cfg.n_embd * strategy.stream / tp  # the block's input
    saved = {"none": needed + start, "selective": products + start, "full": start}
    others = sum(size(each) for each in tensors if each.needed and not each.matmul)
    recomputed = {"none": 0.0, "selective": others}.get(checkpointing, needed)
    if checkpointing.isdecimal():
        per_token = sum(saved["none" if layer % int(checkpointing) else "full"] for layer in layers)
        if layers[-1] % int(checkpointing):  # by the time a block is recomputed, the last one's tensors are freed
            recomputed = 0.0
    else:
        per_token = len(layers) * saved[checkpointing]
    head = 0.0
    if cfg.n_layer - 1 in layers:  # the last norm's input, its result, and the logits
        head = start + cfg.n_embd * strategy.compute + CROSS_ENTROPY * model.vocab_size / tp
    # Gradients of the widest layer's output and of its input. What is recomputed includes that output, which is freed
    # before the second gradient is allocated.
    widest = max(size(each) for each in tensors) * (1 if recomputed else 2)
    return {
        "activations": tokens * per_token,
        "logits": tokens * head,
        "block": tokens * (recomputed + start + widest),  # with the gradient of the stream
    }
