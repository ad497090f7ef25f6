"""Options of models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from wordrun.common.section import EXAMPLES, TEXT, Section
from wordrun.common.validation import above_zero, fractions, not_negative, one_of, part_of_path, positive


@dataclass
class ModelConfig(Section):
    """Options of every model."""

    task: ClassVar[str] = EXAMPLES
    """The task that the model is for; that of the data must be the same."""
    divides: ClassVar[tuple[str, ...]] = ()
    """How the model can be divided besides by examples: cp (its sequences), tp (its matrices), pp (its layers), ep (its
    experts)."""
    implies: ClassVar[tuple[str, ...]] = ()
    """Overrides that choose the tokenizer that comes with the model, instead of the data's default."""

    name: str = "model"
    """Name of the preset; part of the run directory."""
    batch_size: int = 12
    """Examples (of text: sequences) per rank and micro-step."""

    def problems(self) -> Iterable[str]:
        return [*part_of_path("model.name", self.name), *positive("model", self, "batch_size")]

    def tensor_parallel_options(self) -> list[str]:
        """Return the options whose values backend.tp must divide."""
        return []

    def sequences_per_step(self) -> int | None:
        """Return the number of examples of an optimizer step that suits the model's size; None: any."""
        return None

    def width_ratio(self) -> float:
        """Return the ratio of the width to that of the model whose learning rate was tuned; 1: no scaling."""
        return 1.0

    def head_ratio(self) -> float:
        """Return the ratio of the size of attention heads to that in the model whose learning rate was tuned."""
        return 1.0

    def rate_factor(self) -> float | None:
        """Return by what the model's size multiplies the learning rates in conf/optimizer; None: it does not."""
        return None


MOST_LAYERS = 10_000


@dataclass
class TextModelConfig(ModelConfig):
    """Options of every model of text."""

    task: ClassVar[str] = TEXT

    block_size: int = 64
    """Sequence length in tokens (context length)."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *positive("model", self, "block_size")]


@dataclass
class HFConfig(TextModelConfig):
    """A causal language model of the transformers library, as it is."""

    implies: ClassVar[tuple[str, ...]] = ("tokenizer=hf", "tokenizer.path=${model.path}")

    name: str = "hf"
    """Name of the preset; part of the run directory."""
    path: str | None = None
    """The model's folder, with config.json and weights, or its name on Hugging Face's hub."""
    pretrained: bool = True
    """Start with the folder's weights, if it has any; false: with random ones, as its config.json describes."""
    dropout: float = 0.0
    """Probability of the model's dropouts, instead of those in config.json."""
    trust_remote_code: bool = False
    """Run the Python code that the folder brings (auto_map in config.json)."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries that replace those of config.json, as in +model.config.num_hidden_layers=4; a run records all of them."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Entries that replace those of generation_config.json, such as the tokens that end a text."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from fractions("model", self, "dropout")
        if not self.path:
            yield "model=hf needs model.path=FOLDER, a folder with config.json, or a name on Hugging Face's hub"


@dataclass
class TransformerConfig(TextModelConfig):
    """Options of every transformer."""

    divides: ClassVar[tuple[str, ...]] = ("cp", "tp", "pp")

    name: str = "nano"
    """Name of the preset; part of the run directory."""
    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Number of attention heads, which must divide n_embd."""
    n_embd: int = 128
    """Width of the residual stream."""
    dropout: float = 0.0
    """Dropout probability, at least 0 and less than 1."""
    vocab_size: int | None = None
    """Vocabulary size (rows of the embedding); null: the tokenizer's, padded for TP and on accelerators."""
    lora_rank: int = 0
    """Rank of LoRA: freeze the weights and train adapters of this rank for the blocks' matrices; 0: train all."""
    lora_alpha: float = 16.0
    """Scale of LoRA: adapters are multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout probability of the adapters' input."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers of each block that get adapters, such as [attention.q,attention.v]; []: all."""
    mup: bool = False
    """Maximal update parametrization (Yang et al. 2022): scale initial values, learning rates, logits and attention
    with the width, so that the best learning rate of a narrow model is also that of a wide one."""
    mup_base_width: int | None = None
    """n_embd of the model for which the learning rate was tuned, at which mup changes nothing; null: 128."""
    mup_base_head_size: int | None = None
    """Elements of an attention head at that width; null: as many heads as here, unless head_size or depth sets their
    size."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("model", self, "n_layer", "n_head", "n_embd", "vocab_size")
        if self.n_layer > MOST_LAYERS:  # its memory is summed layer by layer
            yield f"model.n_layer={self.n_layer} should be at most {MOST_LAYERS}"
        yield from fractions("model", self, "dropout", "lora_dropout")
        yield from not_negative("model", self, "lora_rank")
        yield from above_zero("model", self, "lora_alpha")
        yield from positive("model", self, "mup_base_width", "mup_base_head_size")
        for name in ("mup_base_width", "mup_base_head_size"):
            if not self.mup and getattr(self, name) is not None:
                yield f"model.{name}={getattr(self, name)} has no effect without model.mup=true: set that, or omit this"
        if self.mup and self.lora_rank:
            yield (
                f"model.mup=true scales the learning rates of complete matrices, but model.lora_rank={self.lora_rank} "
                "trains adapters: export the model, and fine-tune the result with model.mup=false"
            )
        if self.n_head > 0 and self.n_embd > 0 and self.attention_width() % self.n_head:
            below = self.n_embd // self.n_head * self.n_head
            fits = f"{below} or {below + self.n_head}" if below else f"{self.n_head}"
            yield (
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}: "
                f"with {self.n_head} heads use n_embd={fits}"
            )

    def attention_width(self) -> int:
        """Return the number of elements of all query heads together."""
        return self.n_embd

    def base_width(self) -> int:
        """Return the width at which muP changes nothing."""
        return (self.mup_base_width or 128) if self.mup else self.n_embd

    def width_ratio(self) -> float:
        """Return the width relative to ``base_width``; hidden units and heads are assumed to grow with it."""
        return self.n_embd / self.base_width()

    def head_ratio(self) -> float:
        """Return the size of an attention head relative to that at ``base_width``."""
        if not self.mup or self.mup_base_head_size is None:
            return self.width_ratio()
        return self.attention_width() / self.n_head / self.mup_base_head_size

    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.n_head

    def attention_spans(self) -> list[int]:
        """Return the largest number of tokens to which a token attends in each block."""
        return [self.block_size] * self.n_layer

    def tensor_parallel_options(self) -> list[str]:
        return ["n_head", "n_embd", "block_size", "vocab_size"]

    def active_fraction(self) -> float:
        """Return the fraction of its experts that a token uses."""
        return 1.0

    def hidden_at(self, width: int) -> int | None:
        """Return n_hidden for another n_embd, in proportion; None: it follows from n_embd."""
        return None

    def layers_with_values(self) -> set[int]:
        """Return the numbers of the blocks with value embeddings."""
        return set()

    def one_block(self) -> TransformerConfig:
        """Return the options of a model with one of the blocks, with value embeddings if any block has them."""
        return replace(self, n_layer=1)


@dataclass
class GPTConfig(TransformerConfig):
    """A GPT-2-style transformer."""

    bias: bool = False
    """Use biases in linear layers and norms, as GPT-2 does."""
    gelu: str = "none"
    """GELU approximation in the MLP: none (exact) or tanh (as in GPT-2)."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *one_of("model.gelu", self.gelu, ["none", "tanh"])]


@dataclass
class LlamaConfig(TransformerConfig):
    """A LLaMA-style transformer; its options make it Mistral, Qwen2.5 or Qwen3 as well."""

    name: str = "llama_debug"
    """Name of the preset; part of the run directory."""
    n_kv_head: int | None = None
    """Number of key/value heads (grouped-query attention), which must divide n_head; null: n_head."""
    head_size: int | None = None
    """Elements of an attention head; null: n_embd / n_head."""
    qk_norm: bool = False
    """Normalize each query and key head, as Qwen3 does."""
    qkv_bias: bool = False
    """Use biases in the layers of queries, keys and values, as Qwen2.5 does."""
    n_hidden: int = 352
    """Hidden size of the MLP; in LLaMA models at least about 8/3 n_embd."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding; larger values give slower rotations."""
    rope_factor: float = 1.0
    """Llama 3.1's scaling for long contexts: slow down rotations with periods above 8,192 tokens by this factor; 1: no
    scaling."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tie: bool = False
    """Tie the output layer's weights to the token embedding."""
    window: int | None = None
    """Sliding-window attention, as in Mistral: each token attends to this many tokens, up to and including itself;
    null: to all earlier tokens."""
    global_every: int = 0
    """With window: every n-th block attends to all earlier tokens; 0: no block."""

    def hidden_at(self, width: int) -> int | None:
        """Return n_hidden for another n_embd, in proportion and divisible by 8."""
        return 8 * round(self.n_hidden * width / self.n_embd / 8)

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("model", self, "n_kv_head", "head_size", "n_hidden", "rope_factor", "window")
        yield from above_zero("model", self, "rope_theta", "norm_eps")
        yield from not_negative("model", self, "global_every")
        if self.window is None and self.global_every:
            yield f"model.global_every={self.global_every} is for blocks with a window: set model.window, or omit this"
        if self.n_head < 1:
            return
        if self.n_kv_head is not None and self.n_kv_head > 0 and self.n_head % self.n_kv_head:
            fits = max(n for n in range(1, self.n_kv_head) if self.n_head % n == 0)
            yield (
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: "
                f"use model.n_kv_head={fits}, or another model.n_head"
            )
        if self.head_size is not None and self.head_size % 2:
            yield (
                f"model.head_size={self.head_size} is odd, and the rotary embedding pairs the elements of a head: "
                f"use model.head_size={self.head_size + 1}"
            )
        elif self.head_size is None and self.n_embd % self.n_head == 0 and self.n_embd // self.n_head % 2:
            yield (
                f"model.n_embd={self.n_embd} and model.n_head={self.n_head} make heads of {self.n_embd // self.n_head} "
                f"elements, which the rotary embedding cannot pair: use model.n_embd={self.n_embd + self.n_head}"
            )

    def key_heads(self) -> int:
        return self.n_kv_head or self.n_head

    def tensor_parallel_options(self) -> list[str]:
        return [*super().tensor_parallel_options(), "n_kv_head", "n_hidden"]

    def head_ratio(self) -> float:
        return 1.0 if self.head_size and self.mup_base_head_size is None else super().head_ratio()

    def attention_width(self) -> int:
        return self.n_head * self.head_size if self.head_size else self.n_embd

    def local_layers(self) -> list[int]:
        """Return the numbers of the blocks with a window."""
        every = self.global_every or self.n_layer + 1
        return [layer for layer in range(self.n_layer) if self.window and (layer + 1) % every]

    def attention_spans(self) -> list[int]:
        local = set(self.local_layers())
        shorter = min(self.window or self.block_size, self.block_size)
        return [shorter if layer in local else self.block_size for layer in range(self.n_layer)]

    @property
    def norm_weights(self) -> bool:
        """Whether norms have weights."""
        return True


@dataclass
class MoEConfig(LlamaConfig):
    """A LLaMA-style transformer with a mixture of experts in each block, as Qwen3-MoE and Mixtral."""

    divides: ClassVar[tuple[str, ...]] = ("cp", "pp", "ep")

    name: str = "moe_debug"
    """Name of the preset; part of the run directory."""
    n_hidden: int = 128
    """Hidden size of each expert."""
    n_experts: int = 8
    """Number of experts in each block."""
    n_active: int = 2
    """Number of experts that each token is routed to."""
    n_shared: int = 0
    """Number of shared experts, which process every token, in addition to n_experts."""
    router: str = "softmax"
    """How the router's outputs become scores: softmax (Mixtral, Qwen3-MoE) or sigmoid (DeepSeek-V3)."""
    normalize_weights: bool = True
    """Whether the weights of a token's experts sum to 1."""
    balance_rate: float = 0.001
    """By how much the bias of each expert moves after an optimizer step, to balance the load without an auxiliary
    loss (Wang et al. 2024); 0: the biases stay as they are."""
    balance_loss: float = 0.0
    """Coefficient of an auxiliary balance loss for each sequence, as in DeepSeek-V3, whose gradient is added to that of
    the loss; 0: none."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("model", self, "n_experts", "n_active")
        yield from not_negative("model", self, "n_shared", "balance_rate", "balance_loss")
        yield from one_of("model.router", self.router, ["softmax", "sigmoid"])
        if self.n_active > self.n_experts > 0:
            yield (
                f"model.n_active={self.n_active} is more than model.n_experts={self.n_experts}: use "
                f"model.n_active={self.n_experts} or fewer"
            )
        if self.lora_rank:
            yield (
                f"model.lora_rank={self.lora_rank}: LoRA has no adapters for experts; train all weights, or a model "
                "without experts"
            )
        if self.mup:
            yield "model.mup=true does not cover a mixture of experts: use model.mup=false, or a model without experts"

    def active_fraction(self) -> float:
        return self.n_active / self.n_experts


@dataclass
class ModernConfig(LlamaConfig):
    """Qwen3's architecture (rotary embedding, QK norm, SwiGLU) with projections that start at zero, and with more
    options; depth alone sizes it."""

    name: str = "modern"
    """Name of the preset; part of the run directory."""
    depth: int | None = None
    """Number of blocks. As in nanochat, it also sets these options, unless they are set explicitly: n_embd = 64 depth
    (rounded up to a multiple of 128), heads of 128 elements, a batch of 2^19 (depth / 12)^1.15 tokens (rounded to a
    power of two, then to whole micro-steps). null: 4 blocks, 4 heads, n_embd=128."""
    n_layer: int = 0
    """Number of transformer blocks; 0: depth."""
    n_head: int = 0
    """Number of attention heads, which must divide n_embd; 0: from depth."""
    n_embd: int = 0
    """Width of the residual stream; 0: from depth."""
    n_hidden: int = 0
    """Hidden size of the MLP; 0: 4 n_embd, and for swiglu, which has three matrices, 8/3 n_embd rounded up to a
    multiple of 64."""
    mlp: str = "swiglu"
    """Activation in the MLP: swiglu (gated as in LLaMA), relu2 (the square of ReLU) or gelu."""
    qk_norm: bool = True
    """Normalize each query and key head; larger models then train stably at higher learning rates (Wortsman et al.
    2023)."""
    norm_weights: bool = True
    """Whether norms have weights."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    embed_norm: bool = False
    """Normalize the embedding, the input of the first block."""
    zero_init: bool = True
    """Start with projections into the residual stream, and an untied output layer, of zeros; the output layer's lets
    learning rates carry over to wider models (Yang et al. 2022). model=modern: only with Muon, since AdamW then learns
    much more slowly."""
    softcap: float = 0.0
    """Bound of the logits: z becomes softcap tanh(z / softcap); 0: none."""
    value_layers: list[int] = field(default_factory=list)
    """Blocks with value embeddings, a vector of each token that is added to its values; -1: the last block; []:
    none."""
    ngram_rows: list[int] = field(default_factory=list)
    """Rows of n-gram embeddings, of the last 2, 3, ... tokens together, which are added to the token's: [1000, 2000]
    for 2 and 3 tokens; a hash assigns the rows; []: none."""

    def __post_init__(self) -> None:
        """Fill in what depth determines."""
        depth = self.depth if self._sized else None
        self.n_layer = self.n_layer or depth or 4
        self.n_embd = self.n_embd or 128 * math.ceil((depth or 2) / 2)
        if depth and not self.n_head:
            self.n_head = max(1, self.n_embd // 128)
            if self.mup and self.mup_base_head_size is None:  # the size is the same at every depth
                self.mup_base_head_size = self.n_embd // self.n_head
        self.n_head = self.n_head or 4
        self.n_hidden = self.n_hidden or self._usual_hidden()

    def _usual_hidden(self) -> int:
        return 64 * math.ceil(self.n_embd / 24) if self.mlp == "swiglu" else 4 * self.n_embd

    def hidden_at(self, width: int) -> int | None:
        """Return n_hidden for another n_embd; None if it is the default for n_embd."""
        return None if self.n_hidden == self._usual_hidden() else super().hidden_at(width)

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("model", self, "depth")
        yield from not_negative("model", self, "softcap")
        if min(self.ngram_rows, default=1) < 1:
            yield f"model.ngram_rows={self.ngram_rows} should be numbers of at least 1"
        yield from one_of("model.mlp", self.mlp, ["relu2", "gelu", "swiglu"])
        for layer in self.value_layers:
            if not -self.n_layer <= layer < self.n_layer:
                where = f"model.value_layers={self.value_layers} has {layer}"
                yield f"{where}, but model.n_layer={self.n_layer}: use numbers below it"

    def sequences_per_step(self) -> int | None:
        """Return the number of sequences of an optimizer step for this depth.

        The best batch grows with the tokens to train on as D^0.383 (Bergsma et al. 2025), and these grow with the
        parameters, as depth^3.
        """
        if not self._sized:
            return None
        assert self.depth is not None
        tokens: int = 2 ** round(19 + 3 * 0.383 * math.log2(self.depth / 12))
        return max(1, tokens // self.block_size)

    def rate_factor(self) -> float | None:
        """Return the factor of the learning rates over those for n_embd=768; with muP, for the base width."""
        return math.sqrt(768 / self.base_width()) if self.base_width() > 0 else None

    @property
    def _sized(self) -> bool:
        """Whether depth sets the options that are not set explicitly."""
        return self.depth is not None and self.depth > 0

    def layers_with_values(self) -> set[int]:
        return {layer % self.n_layer for layer in self.value_layers}

    def one_block(self) -> TransformerConfig:
        return replace(self, n_layer=1, value_layers=[0] if self.value_layers else [])


@dataclass
class ConvNetConfig(ModelConfig):
    """Two convolutions, pooling, and two linear layers: the network of PyTorch's MNIST example."""

    name: str = "convnet"
    """Name of the preset; part of the run directory."""
    batch_size: int = 64
    """Examples per rank and micro-step."""
    channels: int = 32
    """Channels of the first convolution; the second has twice as many."""
    hidden: int = 128
    """Width of the first linear layer."""
    dropout: float = 0.25
    """Dropout probability after pooling; twice as large before the last layer."""
    norm: str = "none"
    """Normalization after each convolution: none, batch, or sync (over the batches of all ranks)."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("model", self, "channels", "hidden")
        yield from one_of("model.norm", self.norm, ["none", "batch", "sync"])
        if not 0 <= self.dropout < 0.5:
            problem = "should be at least 0 and less than 0.5, because the last layer uses twice this value"
            yield f"model.dropout={self.dropout} {problem}"


@dataclass
class ResNetConfig(ModelConfig):
    """A residual network (He et al. 2016), as built by torchvision."""

    name: str = "resnet18"
    """Name of the preset; part of the run directory."""
    batch_size: int = 32
    """Examples per rank and micro-step."""
    depth: int = 18
    """Number of layers: 18, 34, 50, 101 or 152."""
    norm: str = "batch"
    """Batch normalization over each rank's own batch (batch), or over the batches of all ranks (sync)."""
    stem: str = "auto"
    """First layers: large (a 7x7 convolution with stride 2, and pooling), small (a 3x3 convolution), or auto (small for
    images of fewer than 64 pixels)."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        if self.depth not in (18, 34, 50, 101, 152):
            yield f"model.depth={self.depth} should be 18, 34, 50, 101 or 152"
        yield from one_of("model.norm", self.norm, ["batch", "sync"])
        yield from one_of("model.stem", self.stem, ["auto", "large", "small"])
