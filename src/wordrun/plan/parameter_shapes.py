"""The shapes of a model's parameters and of a rank's shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from wordrun.common.errors import ConfigError
from wordrun.model.options import GPTConfig, LlamaConfig, ModelConfig, MoEConfig, TransformerConfig

if TYPE_CHECKING:
    from torch import nn

    from wordrun.model.transformer import Transformer


class NoEstimateError(ConfigError):
    """The plan does not cover this model or backend."""

    page = "plan.md#another-model-or-backend"


@dataclass(frozen=True)
class ParameterShape:
    """The shape of one parameter."""

    shape: tuple[int, ...]
    tp_dim: int | None = None
    """The dimension that tensor parallelism shards; None: replicated on every rank of the group."""
    matmul: bool = False
    """Whether it is a factor of a matrix product, which autocast copies to 16 bits."""
    trained: bool = True
    """Whether it has gradients."""
    hidden: bool = False
    """Whether it is a hidden matrix, see ``Model.matrices``."""
    expert: bool = False
    """Whether it holds the matrices of all experts, of which a token uses a few."""

    def numel(self, tp: int = 1, shard: int = 1, ep: int = 1) -> int:
        """Return the number of elements in the first rank's shard, the largest: torch shards by whole rows.

        Experts are first divided among ``ep`` of the ``shard`` ranks, and stay so where parameters are gathered
        (``shard=1``).
        """
        shape = list(self.shape)
        if self.expert:
            shape[0], shard = math.ceil(shape[0] / ep), max(1, shard // ep)
        if self.tp_dim is not None:
            shape[self.tp_dim] = math.ceil(shape[self.tp_dim] / tp)
        shape[0] = math.ceil(shape[0] / shard)
        return math.prod(shape)


def numel(shapes: Sequence[ParameterShape], tp: int = 1, shard: int = 1, ep: int = 1) -> int:
    """Return the total number of elements in a rank's shards."""
    return sum(each.numel(tp, shard, ep) for each in shapes)


@dataclass(frozen=True)
class ModelShapes:
    """The parameters of a model with identical blocks."""

    cfg: TransformerConfig
    vocab_size: int
    """Rows of the embedding."""
    first: list[ParameterShape]
    """Outside the blocks, in the first pipeline stage: the embedding."""
    block: list[ParameterShape]
    last: list[ParameterShape]
    """Outside the blocks, in the last pipeline stage: the norm and the output layer."""
    tied: list[ParameterShape]
    """Parameters in ``last`` that are tied to ``first`` if both are in the same stage."""
    values: list[ParameterShape] = field(default_factory=list)
    """Outside the blocks: the value embeddings, one for each block that has one."""

    def outside_blocks(self, layers: Sequence[int]) -> list[ParameterShape]:
        """Return the parameters outside the blocks, for a stage that holds the blocks ``layers``."""
        is_first, is_last = 0 in layers, self.cfg.n_layer - 1 in layers
        last = [each for each in self.last if not (is_first and each in self.tied)] if is_last else []
        values = self.values * len(self.cfg.layers_with_values().intersection(layers))
        return [*(self.first if is_first else []), *values, *last]

    def stage(self, layers: Sequence[int]) -> list[ParameterShape]:
        """Return the parameters of a stage that holds the blocks ``layers``."""
        return self.outside_blocks(layers) + self.block * len(layers)

    @property
    def layers(self) -> range:
        """The indices of all blocks."""
        return range(self.cfg.n_layer)

    @property
    def parameters(self) -> int:
        """Number of parameters of the complete model; tied ones count once."""
        return numel(self.stage(self.layers))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token uses."""
        experts = numel([each for each in self.block if each.expert])
        return self.parameters - round(len(self.layers) * experts * (1 - self.cfg.active_fraction()))

    @property
    def largest_layer(self) -> tuple[str, int]:
        """Name and size of the largest layer, which a device must hold unless tensor parallelism shards it."""
        sizes = {"block": numel(self.block), "embedding": numel(self.first), "output layer": numel(self.last)}
        return max(sizes.items(), key=lambda each: each[1])


def shapes_of(cfg: ModelConfig, vocab_size: int, multiple: int = 1, *, split: bool = True) -> ModelShapes:
    """Return the parameters of the model in ``cfg``.

    Args:
        cfg: the model's options.
        vocab_size: size of the vocabulary, if ``cfg`` does not set it.
        multiple: pad the vocabulary to a multiple of this.
        split: whether tensor-parallel dimensions are needed; importing the torch module for them takes a second.

    Raises:
        NoEstimateError: it is not a transformer.
    """
    if not isinstance(cfg, TransformerConfig):
        raise NoEstimateError(f"no estimate for model={cfg.name}: the plan covers wordrun's own transformers only")
    if not needs_torch(cfg):
        return known_shapes(cfg, math.ceil((cfg.vocab_size or vocab_size) / multiple) * multiple)
    from wordrun.model.construction import meta_model

    model = meta_model(cfg.one_block(), vocab_size, multiple=multiple)
    plan = model.tensor_parallel_plan() if split else {}
    shapes = {name: _shapes(model, name, plan) for name, _ in model.named_children()}
    block, last, values = shapes.pop("blocks"), [*shapes.pop("norm"), *shapes["head"]], shapes.pop("values", [])
    head = shapes.pop("head")
    first = [each for some in shapes.values() for each in some]
    return ModelShapes(cfg, model.padded_vocab_size, first, block, last, head[:1] if model.tied else [], values)


def needs_torch(cfg: ModelConfig) -> bool:
    """Return whether ``shapes_of`` has to import torch and construct the model in ``cfg``."""
    return type(cfg) not in known_shapes.registry or bool(getattr(cfg, "lora_rank", 0))


@singledispatch
def known_shapes(cfg: TransformerConfig, V: int) -> ModelShapes:
    """Return the parameters of the model in ``cfg`` with ``V`` rows in its embedding, without LoRA, by arithmetic.

    A test compares them with the parameters of the model itself.
    """
    raise NoEstimateError(f"no estimate for model={cfg.name}")


@known_shapes.register(GPTConfig)
def _gpt(cfg: GPTConfig, V: int) -> ModelShapes:
    C, bias = cfg.n_embd, cfg.bias
    norm = [ParameterShape((C,))] * (2 if bias else 1)
    attention = [*_linear(3 * C, C, 0, bias), *_linear(C, C, 1, bias)]
    mlp = [*_linear(4 * C, C, 0, bias), *_linear(C, 4 * C, 1, bias)]
    first, head = [ParameterShape((V, C), 0), ParameterShape((cfg.block_size, C), 0)], [_head(V, C)]
    return ModelShapes(cfg, V, first, [*norm, *attention, *norm, *mlp], [*norm, *head], tied=head)


@known_shapes.register(MoEConfig)
@known_shapes.register(LlamaConfig)
def _llama(cfg: LlamaConfig, V: int) -> ModelShapes:
    C, width, hidden, norm = cfg.n_embd, cfg.attention_width(), cfg.n_hidden, [ParameterShape((cfg.n_embd,))]
    head_size = width // cfg.n_head
    shared = (cfg.n_kv_head or cfg.n_head) * head_size
    attention = [each for rows in (width, shared, shared) for each in _linear(rows, C, 0, cfg.qkv_bias)]
    attention += [*_linear(C, width, 1), *([ParameterShape((head_size,))] * 2 if cfg.qk_norm else [])]
    mlp = [*_linear(hidden, C, 0), *_linear(hidden, C, 0), *_linear(C, hidden, 1)]
    if isinstance(cfg, MoEConfig):
        mlp = _experts(cfg)
    head = [_head(V, C)]
    block = [*norm, *attention, *norm, *mlp]
    return ModelShapes(cfg, V, [ParameterShape((V, C), 0)], block, [*norm, *head], tied=head if cfg.tie else [])


def _experts(cfg: MoEConfig) -> list[ParameterShape]:
    """Return the router, the experts and the shared expert of a block, which tensor parallelism does not divide."""
    C, E, shared = cfg.n_embd, cfg.n_experts, cfg.n_shared * cfg.n_hidden
    sizes = [(E * cfg.n_hidden, C), (E * cfg.n_hidden, C), (E * C, cfg.n_hidden)]
    experts = [ParameterShape(size, matmul=True, hidden=True, expert=True) for size in sizes]
    gated = [ParameterShape(size, matmul=True, hidden=True) for size in ((shared, C), (shared, C), (C, shared))]
    return [ParameterShape((E, C)), *experts, *(gated if shared else [])]


def _linear(outputs: int, inputs: int, tp_dim: int, bias: bool = False) -> list[ParameterShape]:
    weight = ParameterShape((outputs, inputs), tp_dim, matmul=True, hidden=True)
    return [weight, *([ParameterShape((outputs,), None if tp_dim else 0, matmul=True)] if bias else [])]


def _head(V: int, C: int) -> ParameterShape:
    return ParameterShape((V, C), 0, matmul=True)


def _shapes(model: Transformer, child: str, plan: Mapping[str, Any]) -> list[ParameterShape]:
    """Return the parameters of a child of ``model`` and their tensor-parallel dimensions."""
    from torch import nn

    matrices = model.matrices()
    shapes = []
    for path, module in model.get_submodule(child).named_modules(prefix=child):
        styles = [style for pattern, style in plan.items() if fnmatch(path, pattern)]
        for name, parameter in module.named_parameters(recurse=False):
            tp_dim = _split_dim(module, name, styles) if styles else None
            shapes.append(
                ParameterShape(
                    tuple(parameter.shape),
                    tp_dim,
                    isinstance(module, nn.Linear),
                    parameter.requires_grad,
                    f"{path}.{name}" in matrices,
                    ".experts." in path,
                )
            )
    return shapes


def _split_dim(module: nn.Module, name: str, styles: Sequence[Any]) -> int | None:
    """Return the dimension along which tensor parallelism splits the parameter ``name`` of ``module``; None: none."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if any(isinstance(style, ColwiseParallel) for style in styles):
        return 1 if isinstance(module, nn.Embedding) else 0
    if any(isinstance(style, RowwiseParallel) for style in styles):
        return 0 if isinstance(module, nn.Embedding) else 1 if name == "weight" else None
    return None
