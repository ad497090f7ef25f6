"""Activation memory: what a block of each kind of model saves for its backward pass, and the total per rank.

To plan another kind of model, register a function for its config: ``saved_tensors.register(MyConfig)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from wordrun.backend.options import FSDPConfig
from wordrun.config.rules import context_attention
from wordrun.model.kernel_thresholds import CHUNK, LARGE, ROWS, keeps_weights
from wordrun.model.options import GPTConfig, LlamaConfig, ModernConfig, MoEConfig, TransformerConfig
from wordrun.plan.parameter_shapes import ModelShapes, NoEstimateError
from wordrun.plan.strategy import FP32, Strategy
from wordrun.train.options import checkpointing_of

CROSS_ENTROPY = 12
"""Bytes per logit when its backward pass begins: log-probabilities and two gradients, in fp32."""
SHARDED_CROSS_ENTROPY = 16
"""The same where the vocabulary is sharded over ranks: torch's loss_parallel has a fourth tensor of that size."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves between its forward and its backward pass."""

    width: int
    """Elements per token."""
    dtype: str = "compute"
    """compute (as for matrix products), stream (as for the residual stream), fp32 or byte."""
    matmul: bool = False
    """Whether a matrix product computes it; selective activation checkpointing keeps such results."""
    needed: bool = True
    """Whether the backward pass reads it; otherwise only selective activation checkpointing keeps it."""
    readers: int = 0
    """Number of matrix products that read it as the result of a norm, in full on each tensor-parallel rank: under
    autocast each product makes a 16-bit copy."""


@singledispatch
def saved_tensors(cfg: TransformerConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """Return the tensors that one block saves for its backward pass, excluding its input.

    Args:
        cfg: the model; its type selects the implementation.
        on_cpu: whether the device is a CPU, whose kernels save different tensors than an accelerator's.
        bf16: whether the computation is in bf16.

    Raises:
        NoEstimateError: if no function is registered for this type.
    """
    raise NoEstimateError(f"no estimate for model={cfg.name}: the activations of a {type(cfg).__name__} are unknown")


@saved_tensors.register(GPTConfig)
def _gpt(cfg: GPTConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """32 C bytes per token with a 16-bit input, 34 C with dropout (Korthikanti et al. 2022, section 4.1)."""
    C = cfg.n_embd
    statistics = SavedTensor(2, dtype="fp32")  # mean and standard deviation of a norm
    return [
        statistics,
        SavedTensor(C, readers=1),  # norm output, for qkv
        SavedTensor(3 * C, matmul=True),  # q, k, v
        SavedTensor(C, matmul=True),  # attention output, for its projection
        SavedTensor(C, matmul=True, needed=False),  # the projection
        SavedTensor(C, dtype="stream"),  # residual stream between attention and MLP, for the norm
        statistics,
        SavedTensor(C, readers=1),  # norm output, for up
        SavedTensor(4 * C, matmul=True),  # up, for the GELU
        SavedTensor(4 * C),  # GELU output, for the projection
        SavedTensor(C, matmul=True, needed=False),  # the projection
        *_attention(cfg, on_cpu=on_cpu, bf16=bf16),
    ]


@saved_tensors.register(LlamaConfig)
@saved_tensors.register(ModernConfig)
@saved_tensors.register(MoEConfig)
def _llama(cfg: LlamaConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    C, width, hidden = cfg.n_embd, cfg.attention_width(), cfg.n_hidden
    shared = width * (cfg.n_kv_head or cfg.n_head) // cfg.n_head
    # The mean square; on a CPU, RMSNorm consists of several operations, which also save what its weights scale.
    scaled = [SavedTensor(C, dtype="stream")] if on_cpu and cfg.norm_weights else []
    norm = [SavedTensor(1, dtype="fp32"), *scaled]
    gated = [
        SavedTensor(C, readers=2),  # norm output, for gate and up
        *[SavedTensor(hidden, matmul=True)] * 2,  # gate and up
        *[SavedTensor(hidden)] * 2,  # SiLU of the gate, and its product with up
    ]
    mlp = _two_layers(cfg) if isinstance(cfg, ModernConfig) and cfg.mlp != "swiglu" else gated
    if isinstance(cfg, MoEConfig):
        mlp = _experts(cfg)
    windows = [SavedTensor(width)] if min(cfg.attention_spans()) < cfg.block_size else []
    return [
        *norm,
        SavedTensor(C, readers=3),  # norm output, for q, k and v
        *(SavedTensor(each, matmul=True, needed=cfg.qk_norm) for each in (width, shared)),  # q, k
        *[SavedTensor(width + shared)] * (cfg.qk_norm and bool(scaled)),  # what their norms' weights scale
        *(SavedTensor(each) for each in (width, shared)),  # q, k after rotation
        SavedTensor(shared, matmul=True),  # v
        SavedTensor(width, matmul=True),  # attention output, for its projection
        *windows,  # outputs of the windows, before they are joined
        SavedTensor(C, matmul=True, needed=False),  # the projection
        SavedTensor(C, dtype="stream"),  # residual stream between attention and MLP, for the norm
        *norm,
        *mlp,
        SavedTensor(C, matmul=True, needed=False),  # the projection
        *_attention(cfg, on_cpu=on_cpu, bf16=bf16),
    ]


def _experts(cfg: MoEConfig) -> list[SavedTensor]:
    """Return what a mixture of experts saves, if each rank's experts get as many tokens as the rank has."""
    C, E, K, hidden, shared = cfg.n_embd, cfg.n_experts, cfg.n_active, cfg.n_hidden, cfg.n_shared * cfg.n_hidden
    return [
        SavedTensor(C, readers=2 if shared else 1),  # norm output, for the router and the shared expert
        SavedTensor(E + 12 * K, dtype="fp32"),  # scores, weights, and 64-bit numbers of experts and of tokens
        SavedTensor(K * C),  # the tokens of each expert
        *[SavedTensor(K * hidden + shared, matmul=True)] * 2,  # gate and up
        *[SavedTensor(K * hidden + shared)] * 2,  # SiLU of the gate, and its product with up
        SavedTensor(K * C, matmul=True),  # the projection, for the weighted sum
    ]


def _two_layers(cfg: ModernConfig) -> list[SavedTensor]:
    """Return what an MLP of two layers saves."""
    return [
        SavedTensor(cfg.n_embd, readers=1),  # norm output, for up
        SavedTensor(cfg.n_hidden, matmul=True),  # up
        *[SavedTensor(cfg.n_hidden)] * (2 if cfg.mlp == "relu2" else 1),  # ReLU and its product with up, or the GELU
    ]


def _attention(cfg: TransformerConfig, *, on_cpu: bool, bf16: bool) -> list[SavedTensor]:
    """Return the tensors saved by the attention softmax and by dropout.

    Fused attention stores no T x T matrix. Unfused attention (``keeps_weights``) saves the weights and, with dropout,
    also the mask and their product.
    """
    C, N, T = cfg.n_embd, cfg.n_head, cfg.block_size
    masks = [SavedTensor(C, dtype="compute" if on_cpu else "byte")] * 2 if cfg.dropout else []
    if on_cpu and keeps_weights(cfg.dropout, T, bf16=bf16):
        return [*masks, *[SavedTensor(N * T)] * (3 if cfg.dropout else 1)]
    return [*masks, SavedTensor(N, dtype="fp32", matmul=True)]


def activation_memory(
    model: ModelShapes, strategy: Strategy, checkpointing: str, layers: Sequence[int], parts: int = 1
) -> dict[str, Any]:
    """Return the fields ``activations``, ``logits`` and ``block`` of a Memory, in bytes.

    Args:
        model: the complete model.
        strategy: determines the batch and the layout.
        checkpointing: a value of train.activation_checkpointing.
        layers: indices of this stage's blocks.
        parts: number of micro-batches per micro-step.
    """
    cfg, tp, tokens = model.cfg, strategy.layout.tp, strategy.tokens / parts
    sizes = {"compute": strategy.compute, "stream": strategy.stream, "fp32": FP32, "byte": 1}
    autocast = strategy.stream != strategy.compute
    if type(cfg) not in saved_tensors.registry:  # a subclass may save something else
        raise NoEstimateError(f"no estimate for model={cfg.name}")
    tensors = saved_tensors(cfg, on_cpu=strategy.on_cpu, bf16=strategy.cfg.train.dtype == "bf16")

    def size(tensor: SavedTensor) -> float:
        copies = max(1, tensor.readers if autocast else 1)
        return tensor.width * copies * sizes[tensor.dtype] / (1 if tensor.readers else tp)

    needed = sum(size(each) for each in tensors if each.needed)
    products = sum(size(each) for each in tensors if each.matmul)
    start = cfg.n_embd * strategy.stream / tp  # the block's input
    saved = {"none": needed + start, "selective": products + start, "full": start}
    others = sum(size(each) for each in tensors if each.needed and not each.matmul)
    redone = {"none": 0.0, "selective": others, "full": needed}
    per_token = recomputed = 0.0
    # While a block's tensors are recomputed, those of the blocks after it have been freed.
    for kind in (checkpointing_of(checkpointing, layer) for layer in reversed(layers)):
        recomputed = max(recomputed, redone[kind] - per_token)
        per_token += saved[kind]
    logits = 0.0
    if cfg.n_layer - 1 in layers:  # with the input and output of the last norm
        logits = tokens * (start + cfg.n_embd * strategy.compute) + logits_memory(model, strategy, tokens)
    # Gradients of the widest layer's output and input. With recomputation, the recomputed output is freed before the
    # second gradient is allocated.
    widest = max(size(each) for each in tensors) * (1 if recomputed else 2)
    return {
        "activations": tokens * per_token,
        "logits": logits,
        "block": tokens * (recomputed + start + widest) + _gathered(strategy, tokens),  # start: the stream's gradient
    }


def _gathered(strategy: Strategy, tokens: float) -> float:
    """Return the bytes of the keys and values that context-parallel ranks gather, their gradients and their masks."""
    cfg, at, backend = strategy.cfg.transformer, strategy.layout, strategy.backend
    if at.cp == 1 or not isinstance(backend, FSDPConfig) or context_attention(backend, strategy.cfg, at) == "heads":
        return 0.0
    head = cfg.attention_width() / cfg.n_head
    few = max(1, cfg.key_heads() // at.tp // at.cp)
    elements = 2 * few * head * tokens * at.cp
    sequences = tokens * at.cp / cfg.block_size if getattr(strategy.cfg.data, "mask_documents", False) else 1
    masks = sequences * ROWS * cfg.block_size * (1 + strategy.compute)  # as booleans, and added to scores
    return elements * (2 * strategy.compute + 2 * FP32) + masks


def _in_chunks(model: ModelShapes, strategy: Strategy, tokens: float) -> bool:
    """Return whether the losses of ``tokens`` are computed in chunks."""
    if not strategy.backend.chunked_loss:
        return False
    chunked = strategy.cfg.train.chunked_loss
    return tokens * model.vocab_size > LARGE if chunked is None else chunked


def kept_logits(model: ModelShapes, strategy: Strategy, tokens: float) -> float:
    """Return the bytes that the losses of ``tokens`` keep for the backward pass.

    These are the softmax in fp32 and, with a soft-cap, the bounded logits; in chunks, only the logits' gradients.
    """
    softcap = getattr(model.cfg, "softcap", 0) > 0
    chunked = _in_chunks(model, strategy, tokens)
    each = strategy.compute if chunked else FP32 + strategy.compute * softcap
    return each * tokens * model.vocab_size / strategy.layout.tp


def logits_memory(model: ModelShapes, strategy: Strategy, tokens: float) -> float:
    """Return the bytes of the logits of ``tokens`` on a rank of the last stage, and of the tensors of their loss."""
    count, sharded = tokens * model.vocab_size / strategy.layout.tp, strategy.layout.tp > 1
    softcap = getattr(model.cfg, "softcap", 0) > 0  # its backward pass needs the bounded logits
    if not _in_chunks(model, strategy, tokens):
        return count * ((SHARDED_CROSS_ENTROPY if sharded else CROSS_ENTROPY) + strategy.compute * softcap)
    # The softmax of a chunk is computed in fp32; with a sharded vocabulary, fp32 logits need no further copy.
    copies = 3 if softcap else 2 - (strategy.compute == FP32) - sharded
    return count * strategy.compute + copies * FP32 * min(CHUNK, count)
