"""The schema: every option with its type, default, unit and meaning. YAML files under conf/ hold only differences.

``wordrun --help`` and docs/reference.md are made from the text under each field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from wordrun.errors import ConfigError, UserError, nearest
from wordrun.registry import Part, part_of, parts
from wordrun.sections import TEXT, DataConfig as DataConfig, ModelConfig as ModelConfig, Section as Section
from wordrun.synonyms import GONE
from wordrun.validation import above_zero, fractions, metric_of, not_negative, one_of, positive

DTYPES = {
    "auto": "auto",
    "fp32": "fp32", "float32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16",
}  # fmt: skip


MOST_LAYERS = 10_000


@dataclass
class TextModelConfig(ModelConfig):
    """Options of every model of text."""

    task: ClassVar[str] = TEXT

    block_size: int = 64
    """Sequence length in tokens (context length)."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *positive("model", self, "block_size")]


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
    """n_embd at which mup changes nothing: that of the model for which the learning rate was chosen; null: 128."""
    mup_base_head_size: int | None = None
    """Elements of an attention head at that width; null: as many heads as here, unless head_size or depth sets their
    size."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
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
        """Return the options whose values backend.tp must divide."""
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
        """Return what is wrong with these options alone."""
        return [*super().problems(), *one_of("model.gelu", self.gelu, ["none", "tanh"])]


@dataclass
class LlamaConfig(TransformerConfig):
    """A LLaMA-style transformer; its options make it Mistral, Qwen2.5, Qwen3 or Gemma 3 as well."""

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
    """Llama 3.1's scaling for long contexts: slow rotations longer than 8,192 tokens by this factor; 1: no scaling."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tie: bool = False
    """Tie the output layer's weights to the token embedding."""
    window: int | None = None
    """Sliding-window attention, as in Mistral: each token attends to this many tokens, up to and including itself;
    null: to all earlier tokens."""
    global_every: int = 0
    """With window: every n-th block attends to all earlier tokens (Gemma 3: 6); 0: no block."""
    rope_local_theta: float | None = None
    """Base of the rotary position embedding in the blocks with a window; null: rope_theta."""
    gate: str = "silu"
    """Activation of the gate in the MLP: silu (SwiGLU), or gelu (GeGLU with the tanh approximation, as in Gemma)."""
    post_norm: bool = False
    """Also normalize what attention and MLP add to the residual stream, as Gemma 3 does."""
    embed_scale: bool = False
    """Multiply the token embedding by sqrt(n_embd), as Gemma does."""

    def hidden_at(self, width: int) -> int | None:
        """Return n_hidden for another n_embd, in proportion and divisible by 8."""
        return 8 * round(self.n_hidden * width / self.n_embd / 8)

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from positive("model", self, "n_kv_head", "head_size", "n_hidden", "rope_factor", "window")
        yield from above_zero("model", self, "rope_theta", "norm_eps")
        yield from not_negative("model", self, "global_every")
        yield from one_of("model.gate", self.gate, ["silu", "gelu"])
        if self.rope_local_theta is not None:
            yield from above_zero("model", self, "rope_local_theta")
        for name in ("global_every", "rope_local_theta"):
            if self.window is None and getattr(self, name):
                yield f"model.{name}={getattr(self, name)} is for blocks with a window: set model.window, or omit this"
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
        elif self.head_size is None and self.n_embd // self.n_head % 2:
            yield (
                f"model.n_embd={self.n_embd} and model.n_head={self.n_head} make heads of {self.n_embd // self.n_head} "
                f"elements, which the rotary embedding cannot pair: use model.n_embd={self.n_embd + self.n_head}"
            )

    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.n_kv_head or self.n_head

    def tensor_parallel_options(self) -> list[str]:
        """Return the options whose values backend.tp must divide."""
        return [*super().tensor_parallel_options(), "n_kv_head", "n_hidden"]

    def head_ratio(self) -> float:
        """Return the size of an attention head relative to that at ``base_width``."""
        return 1.0 if self.head_size and self.mup_base_head_size is None else super().head_ratio()

    def attention_width(self) -> int:
        """Return the number of elements of all query heads together."""
        return self.n_head * self.head_size if self.head_size else self.n_embd

    def local_layers(self) -> list[int]:
        """Return the numbers of the blocks with a window."""
        every = self.global_every or self.n_layer + 1
        return [layer for layer in range(self.n_layer) if self.window and (layer + 1) % every]

    def attention_spans(self) -> list[int]:
        """Return the largest number of tokens to which a token attends in each block."""
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
        """Return what is wrong with these options alone."""
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
        """Return the fraction of its experts that a token uses."""
        return self.n_active / self.n_experts


@dataclass
class ModernConfig(LlamaConfig):
    """A GPT with rotary embedding, QK norm, squared ReLU, value embeddings and more; depth alone sizes it."""

    name: str = "modern"
    """Name of the preset; part of the run directory."""
    depth: int | None = None
    """Number of blocks, from which others follow as in nanochat: n_embd = 64 depth (rounded up to a multiple of 128),
    heads of 128 elements, a batch of 2^19 (depth / 12)^1.15 tokens (rounded to a power of two, then to whole
    micro-steps), and with optimizer=muon the learning rates 0.004 sqrt(768 / n_embd). Each applies unless it is set by
    itself. null: 4 blocks, 4 heads, n_embd=128."""
    n_layer: int = 0
    """Number of transformer blocks; 0: depth."""
    n_head: int = 0
    """Number of attention heads, which must divide n_embd; 0: from depth."""
    n_embd: int = 0
    """Width of the residual stream; 0: from depth."""
    n_hidden: int = 0
    """Hidden size of the MLP; 0: 4 n_embd."""
    mlp: str = "relu2"
    """Activation in the MLP: relu2 (the square of ReLU), gelu, or swiglu (gated as in LLaMA: with the same n_hidden,
    half as many weights more)."""
    qk_norm: bool = True
    """Normalize each query and key head."""
    norm_weights: bool = False
    """Whether norms have weights."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    embed_norm: bool = True
    """Normalize the embedding, the input of the first block."""
    zero_init: bool = True
    """Start with projections into the residual stream, and an untied output layer, of zeros."""
    softcap: float = 15.0
    """Bound of the logits: z becomes softcap tanh(z / softcap); 0: none."""
    value_layers: list[int] = field(default_factory=lambda: [0, -1])
    """Blocks with value embeddings, a vector of each token that is added to its values; -1: the last block."""
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
        self.n_hidden = self.n_hidden or 4 * self.n_embd

    def hidden_at(self, width: int) -> int | None:
        """Return n_hidden for another n_embd; None if it is the default for n_embd."""
        return None if self.n_hidden == 4 * self.n_embd else super().hidden_at(width)

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from positive("model", self, "depth")
        yield from not_negative("model", self, "softcap")
        if min(self.ngram_rows, default=1) < 1:
            yield f"model.ngram_rows={self.ngram_rows} should be numbers of at least 1"
        yield from one_of("model.mlp", self.mlp, ["relu2", "gelu", "swiglu"])
        if self.embed_scale:
            yield "model.embed_scale=true is for model=llama: here model.embed_norm=true sets the embedding's scale"
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
        """Return the learning rates for this depth, divided by those for n_embd=768; muP scales the base width's."""
        return math.sqrt(768 / self.base_width()) if self._sized and self.base_width() > 0 else None

    @property
    def _sized(self) -> bool:
        """Whether depth sets what is not set by itself."""
        return self.depth is not None and self.depth > 0

    def layers_with_values(self) -> set[int]:
        """Return the numbers of the blocks with value embeddings."""
        return {layer % self.n_layer for layer in self.value_layers}

    def one_block(self) -> TransformerConfig:
        """Return the options of a model with one of the blocks, with value embeddings if any block has them."""
        return replace(self, n_layer=1, value_layers=[0] if self.value_layers else [])


@dataclass
class TextConfig(DataConfig):
    """Where the text comes from, and how it is divided into sequences."""

    task: ClassVar[str] = TEXT

    name: str = "shakespeare"
    """Name of the dataset; part of the run directory."""
    kind: str = "file"
    """Kind of source: file (path), download (path, downloaded from url if missing), sample (built-in synthetic text),
    hf (dataset), pairs (path: .jsonl files of prompts and answers; the loss is on the answers alone), shards (path: a
    folder of tokens prepared elsewhere) or mix (several datasets)."""
    path: str | None = None
    """A UTF-8 text file, a folder or a glob: .txt, .md, .jsonl (also .gz, .zst) and .parquet; for shards, a folder."""
    url: str | None = None
    """URL from which to download the file if path does not exist."""
    sha256: str | None = None
    """Expected SHA-256 of the file; a file with a different hash is rejected."""
    offline: str = "error"
    """What to do if the download fails: error, or sample (train on the built-in text and show a warning)."""
    strict: bool = False
    """Refuse a folder with an empty, unreadable or binary file among the others, instead of leaving that file out."""
    text_key: str = "text"
    """Field (.jsonl) or column (.parquet, hf) that contains the text."""
    prompt_key: str = "prompt"
    """Field of a prompt (pairs)."""
    answer_key: str = "answer"
    """Field of an answer (pairs)."""
    template: str = "{prompt}{answer}"
    """Text of a pair; the loss is on {answer} and what follows it. wordrun generate formats the turns of a conversation
    with it."""
    dataset: str | None = None
    """A Hugging Face dataset: its name, or a local folder."""
    subset: str | None = None
    """Configuration of the Hugging Face dataset, such as sample-10BT."""
    split: str = "train"
    """Split of the Hugging Face dataset, used for both training and validation."""
    revision: str | None = None
    """Revision of the Hugging Face dataset: a tag, branch or commit; null: the latest."""
    val_fraction: float = 0.1
    """Fraction used for validation: the end of a single text, or every (1 / val_fraction)-th document of many."""
    prepared: str | None = None
    """Folder of the prepared shards; null: a folder under $WORDRUN_DATA_HOME/prepared whose name contains a hash."""
    shard_mb: int = 64
    """Text per shard in MiB; also the size of the work items prepared in parallel."""
    workers: int | None = None
    """Worker processes per rank for preparation; null: the number of cores per rank."""
    stage: str | None = None
    """Node-local folder (disk or memory) to which the shards are copied before training."""
    mix: dict[str, float] = field(default_factory=dict)
    """Weights of datasets, such as {fineweb: 3, yelp: 1}; a key is the NAME in data=NAME, or a folder of shards."""
    align: bool = False
    """Start each sequence at the first document boundary inside it, if there is one."""
    mask_documents: bool = False
    """Mask attention so that tokens attend only within their own document; for pairs, also pack several into a sequence
    (false: one)."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from one_of("data.kind", self.kind, [*parts("data"), "mix"])
        part = parts("data").get(self.kind)
        if type(self) is TextConfig and part and not part.configures(self):
            yield f"data.kind={self.kind} has options of its own: select it by data={self.kind}"
        yield from one_of("data.offline", self.offline, ["error", "sample"])
        if self.kind == "pairs":
            yield from self._pairs_problems()
        if self.kind in ("file", "download") and not self.path:
            yield f"data={self.name} needs data.path=FILE, a text file"
        if self.kind == "shards" and not self.path:
            yield f"data={self.name} needs data.path=FOLDER, a folder of .bin or .npy files"
        if self.kind == "hf" and not self.dataset:
            yield f"data={self.name} needs data.dataset=NAME of a Hugging Face dataset, or a FOLDER"
        if self.kind == "download" and not (self.url and self.sha256):
            yield "data.kind=download needs data.url and data.sha256"
        if not 0 < self.val_fraction < 1:
            yield f"data.val_fraction={self.val_fraction} should be between 0 and 1"
        yield from positive("data", self, "shard_mb", "workers")
        yield from self._mix_problems()

    def turn(self, prompt: str) -> tuple[str, str]:
        """Return what precedes the answer to ``prompt`` in the template, and what follows it."""
        before, _, after = self.template.partition("{answer}")
        return before.replace("{prompt}", prompt), after

    def _pairs_problems(self) -> Iterable[str]:
        if not self.path:
            yield f"data={self.name} needs data.path=FILE, a .jsonl file of prompts and answers"
        prompt, answer = "{prompt}", "{answer}"
        if not (prompt in self.template.partition(answer)[0] and self.template.count(answer) == 1):
            yield f"data.template={self.template!r} should contain {prompt} and then {answer}, which occurs once"
        if self.align:
            yield "data.align=true has no effect on pairs, which are never divided over sequences: omit it"

    def _mix_problems(self) -> Iterable[str]:
        if self.kind != "mix":
            if self.mix:
                yield f"data.mix is for data=mix, not data={self.name}: omit one of the two"
            return
        if not self.mix:
            yield "data=mix needs data.mix, the weight of each dataset, such as 'data.mix={fineweb: 3, yelp: 1}'"
        least = sum(self.mix.values()) / MIX_PERIOD
        for name, weight in self.mix.items():
            if not 0 < weight < math.inf:
                yield f"data.mix.{name}={weight:g} should be a number above 0"
            elif weight < least < math.inf:
                yield (
                    f"data.mix.{name}={weight:g} is less than 1/{MIX_PERIOD} of the total: omit it, or raise it "
                    f"to {least:g}"
                )


MIX_PERIOD = 4096
"""Sequences after which the shares of a mix are exactly those of data.mix, rounded to one."""

BUILT_FROM = ("sample", "characters")
"""What of the text a tokenizer can be built from."""


@dataclass
class TokenizerConfig(Section):
    """How text becomes tokens."""

    name: str = ""
    """Name of the tokenizer; set by tokenizer=NAME."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from one_of("tokenizer.name", self.name, parts("tokenizer"))
        if self.built_from not in (*BUILT_FROM, ""):
            yield (
                f"{type(self).__name__}.built_from={self.built_from!r} should be 'sample' (texts of the data), "
                f"'characters' (all distinct ones) or '' (nothing){nearest(str(self.built_from), BUILT_FROM)}"
            )

    @property
    def built_from(self) -> str:
        """What of the text the tokenizer is built from: all its "characters", a "sample", or nothing ("").

        A class of options may have a plain attribute of this name instead.
        """
        return ""

    @property
    def sample_mb(self) -> int:
        """Size of that sample, in MiB."""
        return 64

    @property
    def known_vocab_size(self) -> int | None:
        """The vocabulary size, if it is known before the text and all files are read."""
        return None


@dataclass
class CharTokenizerConfig(TokenizerConfig):
    """One token per distinct character of the text."""

    name: str = "char"
    """Name of the tokenizer; set by tokenizer=NAME."""

    @property
    def built_from(self) -> str:
        """All characters."""
        return "characters"


@dataclass
class ByteTokenizerConfig(TokenizerConfig):
    """256 bytes and an end-of-text token."""

    name: str = "byte"
    """Name of the tokenizer; set by tokenizer=NAME."""

    @property
    def known_vocab_size(self) -> int | None:
        """The number of tokens."""
        return 257


@dataclass
class GPT2TokenizerConfig(TokenizerConfig):
    """GPT-2's byte pair encoding with 50,257 tokens, through tiktoken."""

    name: str = "gpt2"
    """Name of the tokenizer; set by tokenizer=NAME."""
    path: str | None = None
    """Vocabulary: a .tiktoken file, vocab.bpe, merges.txt or a folder with one of these; null: tiktoken's cache."""

    @property
    def known_vocab_size(self) -> int | None:
        """The number of tokens."""
        return 50257


@dataclass
class BPETokenizerConfig(TokenizerConfig):
    """Byte pair encoding trained on the text, in any language; needs no network."""

    name: str = "bpe"
    """Name of the tokenizer; set by tokenizer=NAME."""
    vocab_size: int = 4096
    """Maximum vocabulary size: 256 bytes, the end-of-text token, and merges."""
    train_mb: int = 64
    """Maximum amount of text to train the tokenizer on, in MiB, sampled evenly from the source."""
    path: str | None = None
    """An existing tokenizer.json; null: train one."""

    @property
    def built_from(self) -> str:
        """A sample, unless there is a trained one."""
        return "" if self.path else "sample"

    @property
    def sample_mb(self) -> int:
        """Size of the sample, in MiB."""
        return self.train_mb

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from positive("tokenizer", self, "train_mb")
        if self.vocab_size < 257:
            yield f"tokenizer.vocab_size={self.vocab_size} should be at least 257: 256 bytes and the end-of-text token"


@dataclass
class HFTokenizerConfig(TokenizerConfig):
    """The tokenizer of a Hugging Face model."""

    name: str = "hf"
    """Name of the tokenizer; set by tokenizer=NAME."""
    path: str | None = None
    """Folder of the model, which contains tokenizer.json."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        if not self.path:
            yield "tokenizer=hf needs tokenizer.path=FOLDER, with the model's tokenizer.json"


@dataclass
class BackendConfig(Section):
    """Parallelization of the optimizer step."""

    pipeline: ClassVar[bool] = False
    """Whether the model's layers are divided into the stages of a pipeline."""
    own_engine: ClassVar[bool] = False
    """Whether a library's engine takes the steps, and flattens and shards the parameters."""
    replicated: ClassVar[bool] = False
    """Whether every rank has the whole model, with all gradients, as one module."""
    sharded: ClassVar[bool] = False
    """Whether FSDP shards each parameter across ranks."""
    independent: ClassVar[bool] = False
    """Whether groups of ranks take steps by themselves, with gradients that differ between the groups."""
    always_shown: ClassVar[tuple[str, ...]] = ()
    """Options that `wordrun plan` names in its commands even if they have their defaults."""

    name: str = "DDP"
    """Name of the backend; set by train.backend."""

    def axes(self) -> dict[str, int | None]:
        """Return the requested size of each axis of the layout; -1: all remaining ranks, None: chosen for the job."""
        return {"replicate": -1}

    @property
    def experts_over(self) -> int:
        """Number of ranks among which the experts of a mixture are divided."""
        return 1

    @property
    def zero_bubble(self) -> bool:
        """Whether a pipeline computes gradients of weights later than those of activations."""
        return False

    @property
    def one_micro_step(self) -> bool:
        """Whether a step must have one micro-step."""
        return False

    @property
    def one_module(self) -> bool:
        """Whether nothing runs between the blocks, so that the model may be compiled as one graph."""
        return self.replicated

    def stages(self, pp: int) -> int:
        """Return the number of stages in a pipeline of ``pp`` ranks."""
        return 1

    def microbatches_of(self, batch_size: int, pp: int) -> int:
        """Return into how many micro-batches a pipeline of ``pp`` ranks divides ``batch_size`` examples."""
        return 1


@dataclass
class DDPConfig(BackendConfig):
    """Distributed data parallel: a full model on every rank; gradients are averaged."""

    replicated: ClassVar[bool] = True

    name: str = "DDP"
    """Name of the backend; set by train.backend."""
    bucket_cap_mb: int = 25
    """Size of the gradient all-reduce buckets, in MiB."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views into the buckets, which saves a copy (memory and time)."""
    static_graph: bool = False
    """Tell DDP that the graph never changes, which enables optimizations; requires one micro-step per step."""
    find_unused_parameters: bool = False
    """Allow steps in which some parameters get no gradient, for which DDP searches the graph of each step."""
    compress: str = "none"
    """Gradient compression for the all-reduce: none, or bf16 (half the traffic)."""

    @property
    def one_micro_step(self) -> bool:
        """Whether a step must have one micro-step."""
        return self.static_graph

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("backend", self, "bucket_cap_mb")
        yield from one_of("backend.compress", self.compress, ["none", "bf16"])
        if self.find_unused_parameters and self.static_graph:
            yield (
                "backend.static_graph=true finds unused parameters by itself, in the first step: omit "
                "backend.find_unused_parameters=true; if other parameters are unused in other steps, omit "
                "backend.static_graph=true"
            )


@dataclass
class FSDPConfig(BackendConfig):
    """Fully sharded data parallel: parameters, gradients and optimizer state are sharded across ranks (ZeRO-3)."""

    sharded: ClassVar[bool] = True

    name: str = "FSDP"
    """Name of the backend; set by train.backend."""
    replicate: int = 1
    """Number of model replicas, each sharded across backend.shard ranks (hybrid sharding); -1: all remaining ranks."""
    shard: int = -1
    """Number of ranks across which each replica is sharded; -1: all remaining ranks."""
    cp: int = 1
    """Context-parallel ranks: the number over which each sequence is divided, for sequences that are too long for one
    rank's memory; -1: all remaining ranks."""
    cp_attention: str = "auto"
    """How context-parallel ranks compute attention: heads (each gets whole sequences of some heads) or gather (each
    gathers keys and values); auto: heads if their number allows it, or gather."""
    ep: int = 1
    """Expert-parallel ranks: the number over which the experts of a mixture are divided; part of shard x cp."""
    tp: int | None = 1
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward pass (ZeRO-3); false:
    keep them in between (ZeRO-2)."""
    reduce_dtype: str = "fp32"
    """Precision of the gradient reduction: fp32 or bf16."""
    cpu_offload: bool = False
    """Keep the shards in host memory and run the optimizer on the CPU."""
    prefetch: int = 1
    """Number of blocks whose parameters are prefetched, that is, gathered before they are used; 0: gather on demand."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from one_of("backend.reduce_dtype", self.reduce_dtype, ["fp32", "bf16"])
        if self.cp_attention == "ring":
            yield "backend.cp_attention=ring was removed: use auto, that is heads if their number allows it, or gather"
        else:
            yield from one_of("backend.cp_attention", self.cp_attention, ["auto", "heads", "gather"])
        yield from not_negative("backend", self, "prefetch")
        yield from positive("backend", self, "ep")

    def axes(self) -> dict[str, int | None]:
        """Return the requested size of each axis of the layout."""
        return {"replicate": self.replicate, "shard": self.shard, "cp": self.cp, "tp": self.tp}

    @property
    def experts_over(self) -> int:
        """Number of ranks among which the experts of a mixture are divided."""
        return self.ep


@dataclass
class TPConfig(FSDPConfig):
    """Tensor parallel (Megatron) with sequence-parallel norms, combined with FSDP across the remaining ranks."""

    name: str = "TP"
    """Name of the backend; set by train.backend."""
    tp: int | None = None
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""


@dataclass
class PPConfig(FSDPConfig):
    """Pipeline parallel: each rank holds a stage of consecutive blocks, and micro-batches flow through the stages."""

    pipeline: ClassVar[bool] = True

    name: str = "PP"
    """Name of the backend; set by train.backend."""
    pp: int | None = None
    """Number of ranks in a pipeline; null: all remaining ranks."""
    replicate: int = -1
    """Number of pipeline replicas, each with different data; -1: all remaining ranks."""
    shard: int = 1
    """Number of ranks across which each stage's parameters, gradients and optimizer state are sharded."""
    schedule: str = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble."""
    stages_per_rank: int = 2
    """Virtual stages per rank in interleaved schedules."""
    microbatches: int | None = None
    """Number of micro-batches per micro-step; null: one per rank of the pipeline if possible."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from one_of("backend.schedule", self.schedule, SCHEDULES)
        yield from positive("backend", self, "stages_per_rank", "microbatches")

    def axes(self) -> dict[str, int | None]:
        """Return the requested size of each axis of the layout."""
        return {"pp": self.pp, **super().axes()}

    @property
    def zero_bubble(self) -> bool:
        """Whether gradients of weights are computed later than those of activations."""
        return self.schedule in ZERO_BUBBLE

    def stages(self, pp: int) -> int:
        """Return the number of stages; with ZBVZeroBubble they form a V, and each rank has one in each half of it."""
        if self.schedule == "ZBVZeroBubble":
            return 2 * pp
        return pp * self.stages_per_rank if self.schedule in INTERLEAVED else pp

    def microbatches_of(self, batch_size: int, pp: int) -> int:
        """Return the option, or one micro-batch per rank of the pipeline if possible."""
        return self.microbatches or math.gcd(batch_size, pp)


@dataclass
class ThreeDConfig(PPConfig):
    """Pipeline x data x tensor parallel."""

    name: str = "3D"
    """Name of the backend; set by train.backend."""
    pp: int | None = 2
    """Number of ranks in a pipeline."""
    replicate: int = 1
    """Number of replicas of the sharded model; for DDP across pipelines use replicate=-1 shard=1."""
    shard: int = -1
    """Number of ranks across which each stage's parameters, gradients and optimizer state are sharded; -1: all
    remaining ranks."""
    tp: int | None = 2
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""


@dataclass
class DeepSpeedConfig(BackendConfig):
    """DeepSpeed's engine: data parallel, with the training state sharded across ranks (ZeRO stages 0 to 3)."""

    own_engine: ClassVar[bool] = True
    always_shown: ClassVar[tuple[str, ...]] = ("stage",)

    name: str = "deepspeed"
    """Name of the backend; set by train.backend."""
    stage: int = 1
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory and run the optimizer on the CPU; stages 1 to 3."""
    offload_params: bool = False
    """Keep parameter shards in host memory; stage 3."""
    bucket_elements: int | None = None
    """Bucket size for gradients and parameters, in elements; null: DeepSpeed's default, 500 million."""
    keep_below: int | None = None
    """At stage 3, do not shard parameters with fewer elements than this; null: DeepSpeed's default, 100,000."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with the backward pass; null: DeepSpeed's default for the stage."""
    config: str | None = None
    """A ds_config file (JSON) with further settings; a file that contradicts the run's options is rejected."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("backend", self, "bucket_elements")
        yield from not_negative("backend", self, "keep_below")
        if not 0 <= self.stage <= 3:
            yield f"backend.stage={self.stage} should be 0, 1, 2 or 3"
        if self.offload_optimizer and self.stage == 0:
            yield "backend.offload_optimizer=true needs sharded optimizer state: backend.stage=1 to 3"
        if self.offload_params and self.stage != 3:
            yield f"backend.offload_params=true needs sharded parameters: use backend.stage=3, not {self.stage}"

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if cfg.lora_rank:
            yield (
                f"model.lora_rank={cfg.lora_rank} does not work with DeepSpeed, whose checkpoints hold all "
                "weights: use train.backend=FSDP or DDP"
            )
        if cfg.train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip does not work with DeepSpeed, whose engine takes every step: "
                "use train.on_nonfinite=rollback"
            )
        if cfg.train.compile is True and self.stage == 3:
            yield (
                "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
                "use train.compile=false, backend.stage=2, or train.backend=FSDP"
            )


@dataclass
class DilocoConfig(BackendConfig):
    """DiLoCo, for slow links: islands of ranks train alone, and exchange weights every backend.sync_every steps."""

    independent: ClassVar[bool] = True

    name: str = "diloco"
    """Name of the backend; set by train.backend."""
    inner: str = "DDP"
    """The backend within each island: DDP or FSDP."""
    inner_options: dict[str, Any] = field(default_factory=dict)
    """Options of the inner backend, such as {reshard_after_forward: false}; see backend.KEY of DDP and FSDP."""
    islands: int | None = None
    """Number of islands, each of consecutive ranks; null: one per node or, on a single node, one per rank."""
    sync_every: int = 30
    """Steps between two exchanges of the same weights."""
    outer_lr: float = 0.7
    """Learning rate of the outer steps, in which the islands' mean change of the weights is the gradient."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer steps; 0: none."""
    fragments: int = 1
    """Divide the weights into this many fragments of whole blocks, exchanged at different steps (streaming DiLoCo)."""

    @property
    def one_module(self) -> bool:
        """Whether nothing runs between the blocks, as with DDP within the islands."""
        return self.inner.upper() == "DDP"

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("backend", self, "islands", "sync_every", "fragments")
        yield from above_zero("backend", self, "outer_lr")
        yield from fractions("backend", self, "outer_momentum")
        if self.fragments > self.sync_every:
            yield (
                f"backend.fragments={self.fragments} are exchanged at different steps, and backend.sync_every="
                f"{self.sync_every} has fewer: use at most {self.sync_every}"
            )
        try:
            inside = self.inside()
        except ConfigError as error:
            yield str(error)
            return
        yield from (self.of_inner(problem) for problem in inside.problems())
        wanted = {**inside.axes(), "ep": inside.experts_over}
        divided = [f"{axis}: {value_text(wanted[axis])}" for axis in ("tp", "cp", "ep") if wanted.get(axis, 1) != 1]
        if divided:
            yield (
                f"backend.inner_options={{{', '.join(divided)}}}: the islands of "
                "train.backend=diloco have no tensor, context or expert parallelism: use replicate and shard only"
            )

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if cfg.train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip needs all ranks to agree on each step, and train.backend=diloco has islands "
                "that take steps by themselves: use train.on_nonfinite=rollback"
            )
        if DTYPES.get(cfg.train.dtype) == "fp16":
            yield "train.dtype=fp16 would scale losses differently on each island: use train.dtype=bf16 or fp32"

    def inside(self) -> BackendConfig:
        """Return the options of the inner backend.

        Raises:
            ConfigError: it is neither DDP nor FSDP, or does not have the options.
        """
        kinds: dict[str, type[BackendConfig]] = {"DDP": DDPConfig, "FSDP": FSDPConfig}
        kind = kinds.get(self.inner.upper())
        if kind is None:
            raise ConfigError(
                f"backend.inner={self.inner}: islands train with DDP or FSDP: use backend.inner=DDP, or FSDP if the "
                "model does not fit on one device"
            )
        types = _types(kind)  # type: ignore[arg-type]
        for name, value in self.inner_options.items():
            if name not in types or name == "name":
                raise ConfigError(
                    f"backend.inner_options.{name}: {kind().name} has no such option{nearest(name, types)}"
                )
            if not _fits(value, types[name]):
                expected = getattr(types[name], "__name__", types[name])
                raise ConfigError(f"backend.inner_options.{name}={value} should be of type {expected}")
        return kind(**self.inner_options)

    def of_inner(self, problem: str) -> str:
        """Return a message about the inner backend's options with the names that they have here."""
        return problem.replace("backend.", "backend.inner_options.")

    def count(self, ranks: int, per_node: int) -> int:
        """Return the number of islands of ``ranks`` ranks, ``per_node`` to a node.

        Raises:
            ConfigError: they do not divide the ranks.
        """
        wanted = self.islands or (ranks if per_node >= ranks else max(1, ranks // per_node))
        if ranks % wanted:
            fits = sorted((n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: abs(n - wanted))[:2]
            raise ConfigError(
                f"backend.islands={wanted} does not divide {ranks} ranks: use {' or '.join(map(str, sorted(fits)))}"
            )
        return wanted


ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that fill the bubble with the gradients of weights, computed later than those of activations."""
INTERLEAVED = ("Interleaved1F1B", *ZERO_BUBBLE)
"""Schedules in which a rank has several virtual stages."""
SCHEDULES = ("GPipe", "1F1B", *INTERLEAVED)


@dataclass
class OptimizerConfig(Section):
    """Options of every optimizer."""

    name: str = "adamw"
    """Name of the optimizer; set by optimizer=NAME."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up; the schedule determines the rest."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norms, biases) are not decayed."""
    grad_clip: float = 1.0
    """Maximum gradient norm over the full model; 0: no clipping."""
    decay_lr: bool = True
    """Deprecated: decay_lr=false means schedule=constant; accepted until the next release."""
    warmup_iters: int = 100
    """Number of linear warm-up steps."""
    lr_decay_iters: int | None = None
    """Step at which the schedule reaches min_lr; null: train.max_iters."""
    min_lr: float | None = None
    """Final learning rate; null: a tenth of learning_rate."""
    scale_lr: str = "none"
    """Scale learning_rate by the number of data-parallel ranks (linear), by its square root (sqrt), or not (none)."""
    gas: int | None = None
    """Gradient accumulation: micro-steps per optimizer step; null: 1, or as required by train.global_batch_size."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("optimizer", self, "gas", "lr_decay_iters")
        yield from not_negative("optimizer", self, "warmup_iters", "grad_clip", "weight_decay", "min_lr")
        yield from above_zero("optimizer", self, "learning_rate")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            yield f"optimizer.min_lr={self.min_lr} is above optimizer.learning_rate={self.learning_rate}"
        yield from one_of("optimizer.scale_lr", self.scale_lr, ["none", "sqrt", "linear"])

    def width_powers(self) -> tuple[float, float] | None:
        """Return the powers of the width with which muP scales the learning rates of hidden matrices and of all other
        parameters; None: they are not known for this optimizer.
        """
        return None

    def state_values(self, *, hidden: bool) -> tuple[int, int] | None:
        """Return how many values the optimizer keeps for each weight, and for each tensor; None: not known, so that
        memory cannot be planned.

        Args:
            hidden: of the hidden matrices, which Muon steps; False: of all other parameters.
        """
        return None


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay."""

    beta1: float = 0.9
    """Decay rate of the running mean of the gradients."""
    beta2: float = 0.99
    """Decay rate of the running mean of the squared gradients."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *fractions("optimizer", self, "beta1", "beta2")]

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return two means for each weight, and a step count for each tensor."""
        return 2, 1

    def width_powers(self) -> tuple[float, float]:
        """Return the powers of the width in the learning rates of hidden matrices and of all other parameters."""
        return -1.0, 0.0


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    name: str = "sgd"
    """Name of the optimizer; set by optimizer=NAME."""
    momentum: float = 0.9
    """Momentum factor; 0: no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from fractions("optimizer", self, "momentum")
        if self.nesterov and not self.momentum:
            yield "optimizer.nesterov=true needs momentum: set optimizer.momentum=0.9, or nesterov=false"

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight, if there is momentum."""
        return int(self.momentum != 0), 0

    def width_powers(self) -> tuple[float, float]:
        """Return the powers of the width in the learning rates of hidden matrices and of all other parameters."""
        return 0.0, 1.0


@dataclass
class LionConfig(OptimizerConfig):
    """Lion: each step has the sign of a mean of the gradients, and so the same size for all parameters."""

    name: str = "lion"
    """Name of the optimizer; set by optimizer=NAME."""
    learning_rate: float = 2e-4
    """Peak learning rate, reached at the end of the warm-up; a third to a tenth of AdamW's."""
    weight_decay: float = 0.5
    """Weight decay of matrices; larger than AdamW's by the factor by which the learning rate is smaller."""
    beta1: float = 0.9
    """Weight of the running mean in the step; the rest is the current gradient's."""
    beta2: float = 0.99
    """Decay rate of the running mean of the gradients."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *fractions("optimizer", self, "beta1", "beta2")]

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight."""
        return 1, 0

    def width_powers(self) -> tuple[float, float]:
        """Return the powers of the width in the learning rates of hidden matrices and of all other parameters."""
        return -1.0, 0.0


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024): hidden matrices take orthogonal steps, computed from a running mean of the gradients.

    AdamW updates the embeddings, the output layer, norms and biases.
    """

    name: str = "muon"
    """Name of the optimizer; set by optimizer=NAME."""
    adamw_lr: float | None = None
    """Peak learning rate of AdamW; follows the same schedule as learning_rate. null: learning_rate."""
    adamw_weight_decay: float = 0.0
    """Weight decay of the embeddings and the output layer; weight_decay is that of the hidden matrices."""
    beta1: float = 0.9
    """AdamW's decay rate of the running mean of the gradients."""
    beta2: float = 0.99
    """AdamW's decay rate of the running mean of the squared gradients."""
    momentum: float = 0.95
    """Decay rate of Muon's running mean of the gradients."""
    momentum_start: float = 0.85
    """Momentum of the first step, if momentum_warmup is set."""
    momentum_warmup: int = 0
    """Number of steps over which the momentum grows linearly from momentum_start."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations of each step; more make the matrices closer to orthogonal."""
    ns_coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.775, 2.0315])
    """Coefficients a, b, c of a Newton-Schulz iteration, a X + b (X X') X + c (X X')^2 X: three numbers for all
    iterations, or three for each."""
    precision: str = "auto"
    """Precision of the Newton-Schulz iterations: fp32, bf16, or auto (bf16 on accelerators, fp32 on CPUs)."""
    split: str = "qkv"
    """What is orthogonalized where a matrix holds several: qkv (queries, keys and values separately), heads (also each
    head) or none (the matrix as it is stored)."""
    scale: str = "adamw"
    """Factor of the steps of a matrix of n rows and m columns: adamw (0.2 sqrt(max(n, m)), as large as AdamW's typical
    steps, so that its learning rates can be kept) or spectral (sqrt(max(1, n / m)), for learning rates about 0.02)."""
    cautious: bool = False
    """Decay only those weights of hidden matrices that the step moves towards 0."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from fractions("optimizer", self, "beta1", "beta2", "momentum", "momentum_start")
        yield from positive("optimizer", self, "ns_steps")
        yield from not_negative("optimizer", self, "momentum_warmup", "adamw_weight_decay")
        if self.adamw_lr is not None:
            yield from above_zero("optimizer", self, "adamw_lr")
        yield from one_of("optimizer.precision", self.precision, ["auto", "fp32", "bf16"])
        yield from one_of("optimizer.split", self.split, ["qkv", "heads", "none"])
        yield from one_of("optimizer.scale", self.scale, ["adamw", "spectral"])
        if len(self.ns_coefficients) not in (3, 3 * self.ns_steps):
            yield (
                f"optimizer.ns_coefficients has {len(self.ns_coefficients)} numbers: use 3, or 3 for each of the "
                f"optimizer.ns_steps={self.ns_steps} iterations"
            )

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight of hidden matrices, and what AdamW keeps for the others."""
        return (1, 0) if hidden else (2, 1)

    def width_powers(self) -> tuple[float, float]:
        """Return the powers of the width in the learning rates of hidden matrices and of all other parameters.

        The steps of scale=spectral have the same spectral norm at every width, and those of adamw grow with its root.
        """
        return -0.5 if self.scale == "adamw" else 0.0, 0.0

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if cfg.backend.own_engine:
            yield (
                "optimizer=muon needs whole matrices, but train.backend=deepspeed flattens and shards them inside its "
                "engine: use train.backend=FSDP or DDP"
            )


@dataclass
class ScheduleConfig(Section):
    """The learning rate after the warm-up: cosine (half a cosine down to optimizer.min_lr) or constant."""

    name: str = "cosine"
    """Name of the schedule; set by schedule=NAME."""


@dataclass
class LinearScheduleConfig(ScheduleConfig):
    """Constant after the warm-up, then linear decay to optimizer.min_lr (WSD: warm-up, stable, decay)."""

    name: str = "linear"
    """Name of the schedule; set by schedule=NAME."""
    decay_iters: int | None = None
    """Number of decay steps; null: all steps after the warm-up, or decay_fraction of them."""
    decay_fraction: float | None = None
    """Fraction of the steps after the warm-up in which the learning rate decays, instead of decay_iters."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("schedule", self, "decay_iters")
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            yield f"schedule.decay_fraction={self.decay_fraction} should be above 0 and at most 1"
        if None not in (self.decay_iters, self.decay_fraction):
            yield (
                f"schedule.decay_iters={self.decay_iters} and schedule.decay_fraction={self.decay_fraction} both set "
                "the decay: omit one"
            )


CHECKPOINTING = re.compile(r"none|full|selective|0*[1-9]\d*|full:\d+|(full:\d+\+)?selective:\d+")
"""The values of train.activation_checkpointing."""


def checkpointing_of(setting: str, block: int) -> str:
    """Return what the value ``setting`` of train.activation_checkpointing means for the block of this number.

    Returns:
        none, selective or full.
    """
    if setting.isdecimal():
        return "none" if block % int(setting) else "full"
    if ":" not in setting:
        return setting
    for part in setting.split("+"):
        kind, _, count = part.partition(":")
        if block < int(count):
            return kind
        block -= int(count)
    return "none"


@dataclass
class TrainConfig(Section):
    """Steps, batch size, precision, evaluation, samples and checkpoints."""

    backend: str = "DDP"
    """Parallelization backend: DDP, FSDP, TP, PP, 3D, deepspeed or diloco."""
    max_iters: int = 2000
    """Number of optimizer steps."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; sets optimizer.gas."""
    batch_ramp: list[str] = field(default_factory=list)
    """Other global batch sizes at the start, as STEP:SEQUENCES: [100:16,300:32] takes 16 sequences per step until step
    100, then 32 until step 300, then global_batch_size."""
    eval_interval: int = 250
    """Steps between evaluations; 0: never."""
    eval_iters: int | None = 50
    """Number of validation batches per evaluation, each as large as the global batch, taken at even distances from the
    validation data; null: all validation data."""
    log_interval: int = 10
    """Steps between logged metrics."""
    sample_interval: int = 500
    """Steps between generated samples; 0: only at the end."""
    sample_tokens: int = 200
    """Tokens to generate per sample; 0: no samples."""
    sample_prompt: str = "\n"
    """Prompt for the samples; if it has no tokens, they begin with the end-of-text token. With data=pairs they are
    answers to it, by default to the first validation prompt."""
    suggest: bool = True
    """Suggest commands for the next step when the run has finished."""
    report: bool = True
    """Draw the plots and write report.html when the run ends; wordrun report also writes the page later."""
    temperature: float = 0.8
    """Sampling temperature; lower is more deterministic."""
    top_k: int | None = 200
    """Sample from the k most likely tokens; null: from all tokens."""
    dtype: str = "auto"
    """Compute precision: fp32, bf16, fp16, or auto (bf16 if the device supports it at full speed, else fp32)."""
    float8: str = "none"
    """Linear layers of the blocks that multiply in float8, with train.dtype=bf16: none, or tensorwise or rowwise, which
    scale each matrix by one factor or each of its rows by its own; for NVIDIA GPUs of the Ada or Hopper generation or
    later."""
    compile: bool | str = False
    """Compile the model with torch.compile: faster steps, up to minutes of extra startup time. auto: measure some steps
    without and with it, and keep what is faster, if enough of the run is left for that to pay off."""
    compile_scope: str = "blocks"
    """What is compiled as one graph: blocks (each block, and the loss; all blocks share their code, and DDP overlaps
    its communication with them) or model (the complete model: takes longer to compile, a few percent faster)."""
    chunked_loss: bool | None = None
    """Compute the logits chunk by chunk, each turned into its gradient at once, so that they exist only in the compute
    precision, which takes less memory. null: for more than 2^24 logits in a micro-step."""
    activation_checkpointing: str = "none"
    """What to recompute in the backward pass to save memory: none, full (every block), a number n (every n-th block),
    selective (everything in a block except matrix products and attention), or for how many blocks from the first one
    on: full:4+selective:8 (4 blocks full, the next 8 selective, none of the others)."""
    memory_budget_gb: float | None = None
    """Memory in GB (10^9 bytes) that each rank may need by the plan's estimate: sets activation_checkpointing so that
    no more is recomputed than this requires; null: no budget."""
    activation_offload: bool = False
    """Keep what blocks save for the backward pass in host memory; for accelerators."""
    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda or xpu."""
    seed: int = 1337
    """Random seed for weights, data order, dropout and samples."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs with the same options on the same number of ranks, devices
    and versions have equal losses and weights, bit by bit; slower."""
    check_memory: bool = True
    """Refuse to start a run whose estimated memory is more than a rank has."""
    timeout_s: int = 1800
    """Timeout of collectives in seconds: the run is aborted if a rank does not take part in time."""
    hang_s: int = 120
    """Seconds without progress after which the run reports where each rank is and whom the others wait for, and
    continues; start-up, the first step, samples and saves may take five times as long; 0: never."""
    checkpoint_interval: int = 1000
    """Steps between checkpoints, in addition to one after the last step; 0: no checkpoints."""
    keep_checkpoints: int = 2
    """Number of recent checkpoints to keep, in addition to the best one."""
    memory_checkpoint_interval: int = 0
    """Steps between checkpoints in the nodes' memory (/dev/shm), of which each node also keeps a copy of another node's
    share: a run that is relaunched after a failure resumes from the newest one. 0: none."""
    save_best: bool = True
    """Also write a checkpoint whenever train.best_metric is the best so far."""
    best_metric: str = "val_loss"
    """Metric of an evaluation by which checkpoints are compared, such as val_accuracy."""
    best_mode: str = "auto"
    """Which values of train.best_metric are better: min, max, or auto (known from its name)."""
    async_save: bool = True
    """Write checkpoints in the background: only the device-to-host copy blocks training."""
    on_save_error: str = "continue"
    """What to do if a checkpoint cannot be written: continue (with a warning) or stop."""
    on_nonfinite: str = "stop"
    """What to do if gradients are non-finite: stop, skip (the step), or rollback (to the last checkpoint, continuing
    with the data that comes next)."""
    resume: str | None = None
    """Run directory or checkpoint to resume from, or auto: the newest checkpoint in this run directory if there is
    one, else a new run; null: auto if the job was requeued, chained or retried, else a new run."""
    init_from: str | None = None
    """Where a new run loads its initial weights from: a run directory, a checkpoint, or a Hugging Face model
    (hf:DIRECTORY or hf:NAME). A resumed run ignores it."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("train", self, "max_iters", "eval_iters", "log_interval", "top_k", "timeout_s")
        yield from positive("train", self, "keep_checkpoints")
        yield from not_negative("train", self, "eval_interval", "sample_interval", "sample_tokens", "seed")
        yield from not_negative("train", self, "checkpoint_interval", "memory_checkpoint_interval", "hang_s")
        yield from above_zero("train", self, "temperature")
        for name, most in (("seed", 2**62), ("timeout_s", 10**8), ("hang_s", 10**8)):
            if getattr(self, name) > most:
                yield f"train.{name}={getattr(self, name)} should be at most {most}"
        yield from one_of("train.dtype", self.dtype, DTYPES)
        yield from one_of("train.device", self.device, ["auto", "cpu", "cuda", "xpu"])
        yield from one_of("train.float8", self.float8, ["none", "tensorwise", "rowwise"])
        if self.compile not in (True, False, "auto"):
            yield f"train.compile={self.compile} should be true, false or auto"
        yield from one_of("train.compile_scope", self.compile_scope, ["blocks", "model"])
        yield from metric_of("train.best_metric", self.best_metric, self.best_mode, "train.best_mode")
        yield from one_of("train.on_save_error", self.on_save_error, ["continue", "stop"])
        yield from one_of("train.on_nonfinite", self.on_nonfinite, ["stop", "skip", "rollback"])
        checkpointing = self.activation_checkpointing
        if not CHECKPOINTING.fullmatch(checkpointing):
            known = ["none", "full", "selective", "N", "full:N", "selective:N", "full:N+selective:N"]
            yield from one_of("train.activation_checkpointing", checkpointing, known)
        yield from above_zero("train", self, "memory_budget_gb") if self.memory_budget_gb is not None else ()
        if self.memory_budget_gb is not None and checkpointing != "none":
            yield (
                f"train.memory_budget_gb={self.memory_budget_gb:g} chooses what to recompute, and so does "
                f"train.activation_checkpointing={checkpointing}: omit one of the two"
            )
        yield from self._offload_problems()
        ramp = ",".join(self.batch_ramp)
        try:
            steps = [step for step, _ in self.ramp()]
        except ValueError:
            yield f"train.batch_ramp=[{ramp}] should be a list of STEP:SEQUENCES, such as [100:16,300:32]"
        else:
            if steps != sorted(set(steps)) or min(steps, default=1) < 1:
                yield f"train.batch_ramp=[{ramp}] should have rising steps, from 1 up"
        if not self.sample_prompt:
            yield "train.sample_prompt is empty: set a prompt, such as a line break"
        if self.on_nonfinite == "rollback" and not self.checkpoint_interval:
            yield "train.on_nonfinite=rollback needs checkpoints: set train.checkpoint_interval"

    def _offload_problems(self) -> Iterable[str]:
        """Return what rules out activation_offload."""
        for is_conflict, other, reason in (
            (self.activation_checkpointing != "none", "activation_checkpointing", "recomputes what this would keep"),
            (self.memory_budget_gb is not None, "memory_budget_gb", "estimates recomputation, not offloading"),
            (self.compile is not False, "compile", "leaves to the compiler what is saved"),
            (self.device == "cpu", "device", "has no other memory"),
        ):
            if self.activation_offload and is_conflict:
                value = value_text(getattr(self, other))
                yield f"train.activation_offload=true: train.{other}={value} {reason}: omit one of the two"

    def ramp(self) -> list[tuple[int, int]]:
        """Return the entries of batch_ramp: until which step, how many sequences.

        Raises:
            ValueError: an entry is not STEP:SEQUENCES.
        """
        pairs = [entry.split(":") for entry in self.batch_ramp]
        return [(int(step), int(sequences)) for step, sequences in pairs]


@dataclass
class TrackerConfig(Section):
    """metrics.jsonl and samples.txt in the run directory; every run writes these."""


@dataclass
class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    mode: str = "auto"
    """auto (online if there is an API key and network access, else offline), online or offline."""
    project: str = "wordrun"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the API key's default."""
    group: str | None = None
    """W&B group of runs."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    probe_s: float = 3.0
    """Seconds to wait for the server before recording offline (mode=auto)."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from one_of("tracker.wandb.mode", self.mode, ["auto", "online", "offline"])
        yield from not_negative("tracker.wandb", self, "probe_s")


@dataclass
class TensorBoardConfig(TrackerConfig):
    """TensorBoard's event files, in tensorboard/ in the run directory."""

    flush_s: float = 10.0
    """Maximum number of seconds until logged values are written to the file."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from not_negative("tracker.tensorboard", self, "flush_s")


@dataclass
class MlflowConfig(TrackerConfig):
    """MLflow."""

    uri: str | None = None
    """Tracking server or database; null: $MLFLOW_TRACKING_URI, or MLflow's own default in the working directory."""
    experiment: str = "wordrun"
    """MLflow experiment."""


@dataclass
class TrackioConfig(TrackerConfig):
    """Hugging Face's Trackio."""

    project: str = "wordrun"
    """Trackio project."""
    space_id: str | None = None
    """Hugging Face Space that shows the run, such as user/space; null: a database on this machine."""


@dataclass
class HookConfig(Section):
    """Options of a hook, which the trainer calls between steps."""

    @property
    def metric_needed(self) -> str:
        """The metric that evaluations have to report for the hook, such as val_accuracy; empty: none."""
        return ""


@dataclass
class EarlyStopConfig(HookConfig):
    """End the run when a metric of the evaluations no longer improves."""

    metric: str = "val_loss"
    """Metric of an evaluation, such as val_accuracy."""
    mode: str = "auto"
    """Which values of the metric are better: min, max, or auto (known from its name)."""
    patience: int = 5
    """Number of consecutive evaluations without improvement after which the run ends."""
    min_delta: float = 0.0
    """Smallest change of the metric that counts as an improvement; the loss of text is in nats per token."""

    @property
    def metric_needed(self) -> str:
        """The metric that has to improve."""
        return self.metric

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from positive("hooks.early_stop", self, "patience")
        yield from not_negative("hooks.early_stop", self, "min_delta")
        yield from metric_of("hooks.early_stop.metric", self.metric, self.mode, "hooks.early_stop.mode")

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if not cfg.train.eval_interval:
            yield "hooks=[early_stop] needs evaluations, but train.eval_interval=0: set it above 0"


@dataclass
class EMAConfig(HookConfig):
    """Exponential moving average of the weights, kept beside the model and saved in checkpoints."""

    decay: float = 0.999
    """Fraction of the average that each update keeps; at most (1 + n) / (10 + n) in update n, to forget the first."""
    interval: int = 1
    """Steps between updates."""
    evaluate: bool = True
    """Also evaluate the averaged weights: ema_val_loss, and each metric as ema_val_NAME."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*fractions("hooks.ema", self, "decay"), *positive("hooks.ema", self, "interval")]

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if cfg.backend.own_engine:
            yield (
                "hooks=[ema] cannot average the weights of train.backend=deepspeed, which are flattened and sharded "
                "inside its engine: use train.backend=DDP or FSDP"
            )
        if cfg.backend.independent:
            yield (
                f"hooks=[ema] averages the weights of all ranks, and train.backend={cfg.train.backend} has others on "
                "each island: omit it, since the outer weights are already an average, or use train.backend=DDP or FSDP"
            )


@dataclass
class StatisticsConfig(HookConfig):
    """Statistics of the gradients and the activations of each layer."""

    interval: int = 100
    """Steps between measurements."""
    gradients: bool = True
    """Norm and largest absolute value of each layer's gradients, before clipping."""
    activations: bool = True
    """Root mean square and largest absolute value of each block's output."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return positive("hooks.statistics", self, "interval")

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        if self.gradients and cfg.backend.own_engine:
            yield (
                "hooks=[statistics] cannot read the gradients of train.backend=deepspeed, which its engine flattens: "
                "use hooks.statistics.gradients=false, or train.backend=DDP or FSDP"
            )
        if self.activations and cfg.train.compile is True:
            yield (
                "hooks=[statistics] cannot read activations inside compiled blocks: use "
                "hooks.statistics.activations=false, or train.compile=false"
            )


@dataclass
class CoordinatesConfig(HookConfig):
    """How large the activations of each layer are, and how much they have changed since the first step.

    wordrun study coord compares them across widths.
    """

    interval: int = 1
    """Steps between measurements."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return positive("hooks.coordinates", self, "interval")


@dataclass
class SpikesConfig(HookConfig):
    """How many standard deviations the training loss is above its mean over the preceding steps."""

    window: int = 128
    """Number of preceding steps; there is no score until there are as many."""
    threshold: float = 6.0
    """Score from which a step counts as a spike, which is logged."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from above_zero("hooks.spikes", self, "threshold")
        if self.window < 2:
            yield f"hooks.spikes.window={self.window} should be at least 2"


@dataclass
class LRRangeConfig(HookConfig):
    """Learning-rate range test: raise the learning rate geometrically, find where the loss falls fastest, and end."""

    lowest: float = 1e-6
    """First learning rate."""
    highest: float = 1.0
    """Last learning rate, unless the loss diverges before."""
    steps: int = 100
    """Number of steps from the first to the last learning rate."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from above_zero("hooks.lr_range", self, "lowest", "highest")
        if self.lowest >= self.highest:
            yield f"hooks.lr_range.lowest={self.lowest:g} should be below hooks.lr_range.highest={self.highest:g}"
        if self.steps < 10:
            yield f"hooks.lr_range.steps={self.steps} should be at least 10"

    def conflicts(self, cfg: Config) -> Iterable[str]:
        """Return where the other options of ``cfg`` contradict these."""
        for option, what in (("checkpoint_interval", "saved"), ("eval_interval", "evaluated")):
            if getattr(cfg.train, option):  # the hook's file sets 0, which an experiment overrides
                yield (
                    f"hooks=[lr_range] trains until the model diverges, which should not be {what}: use "
                    f"train.{option}=0"
                )
        if self.steps > cfg.train.max_iters:
            yield (
                f"hooks.lr_range.steps={self.steps} is more than train.max_iters={cfg.train.max_iters}: raise "
                "train.max_iters, or take fewer steps"
            )


@dataclass
class MetricConfig(Section):
    """Options of a metric, which evaluations report besides the loss."""


@dataclass
class AccuracyConfig(MetricConfig):
    """Fraction of targets that are the likeliest class (or, for text, token)."""


@dataclass
class TopKConfig(MetricConfig):
    """Fraction of targets that are among the likeliest classes (or, for text, tokens)."""

    k: int = 5
    """How many of the likeliest count."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return positive("metrics.top5", self, "k")


@dataclass
class ProfilerConfig(Section):
    """Profiling of the run."""

    name: str = "none"
    """Name of the profiler."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile; each writes its own files under profile/ in the run directory."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        if min(self.ranks, default=0) < 0:
            yield f"profiler.ranks={self.ranks} should not be negative"


@dataclass
class PyinstrumentConfig(ProfilerConfig):
    """Sampling profile of the Python code, as HTML and text."""

    name: str = "pyinstrument"
    """Name of the profiler."""
    interval_s: float = 0.001
    """Sampling interval in seconds."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *above_zero("profiler", self, "interval_s")]


@dataclass
class ScheduledProfilerConfig(ProfilerConfig):
    """Options of profilers that record a few steps."""

    wait: int = 10
    """Number of steps before the profiler starts."""
    warmup: int = 2
    """Number of warm-up steps: profiled but discarded, because profiler start-up distorts them."""
    active: int = 3
    """Number of steps to record."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from not_negative("profiler", self, "wait", "warmup")
        yield from positive("profiler", self, "active")


@dataclass
class TorchProfilerConfig(ScheduledProfilerConfig):
    """Trace of operators and kernels over a few steps, by torch.profiler, and a table of the slowest."""

    name: str = "torch"
    """Name of the profiler."""
    shapes: bool = False
    """Also record the shapes of inputs."""
    stacks: bool = False
    """Also record the Python stacks, which slows the recorded steps down."""


@dataclass
class SpansProfilerConfig(ProfilerConfig):
    """A timeline of all ranks: when each is in which phase of a step."""

    name: str = "spans"
    """Name of the profiler."""
    ranks: list[int] = field(default_factory=list)
    """Ranks in the timeline; []: all."""
    wait: int = 10
    """Number of steps before the first that is recorded, at least 1."""
    active: int = 10
    """Number of steps to record."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *positive("profiler", self, "wait", "active")]


@dataclass
class MemoryProfilerConfig(ScheduledProfilerConfig):
    """What allocates memory: on CUDA a snapshot, also when memory runs out; on CPUs a table of operations."""

    name: str = "memory"
    """Name of the profiler."""
    entries: int = 100_000
    """On CUDA: number of allocations and frees to keep, the last ones."""
    rows: int = 30
    """On CPUs: number of operations in the table."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *positive("profiler", self, "entries", "rows")]


@dataclass
class Config:
    """Everything that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=CharTokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tracker: dict[str, TrackerConfig] = field(default_factory=lambda: {"jsonl": TrackerConfig()})
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    hooks: dict[str, HookConfig] = field(default_factory=dict)
    metrics: dict[str, MetricConfig] = field(default_factory=dict)
    run_dir: str = ""
    """Where the run writes; comes from hydra.run.dir=DIR."""

    @property
    def transformer(self) -> TransformerConfig:
        """The model's options, for code about transformers."""
        assert isinstance(self.model, TransformerConfig)
        return self.model

    @property
    def text_model(self) -> TextModelConfig:
        """The model's options, for code about models of text."""
        assert isinstance(self.model, TextModelConfig)
        return self.model

    @property
    def lora_rank(self) -> int:
        """The rank of LoRA's adapters; 0: there are none."""
        return self.model.lora_rank if isinstance(self.model, TransformerConfig) else 0

    @property
    def text(self) -> TextConfig:
        """The data's options, for code about text."""
        assert isinstance(self.data, TextConfig)
        return self.data


TRAIN = {"default": Part(TrainConfig, "wordrun.train.trainer:Trainer")}


def schemas(group: str) -> dict[str, Part]:
    """Return the parts whose dataclasses are the schemas of a config group, by the name of the schema.

    An option file under conf/GROUP begins with one of them.
    """
    if group == "train":
        return TRAIN
    found = parts(group)
    if group != "data":
        return found
    text = found["file"]  # the texts have one schema, of which data.kind is an option
    return {"text": text, **{name: part for name, part in found.items() if part.declared != text.declared}}


def value_text(value: Any) -> str:
    """Return ``value`` as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


RENAMED: dict[str, str] = {
    "data.ahead": "data.prefetch",
    "schedule.decay_share": "schedule.decay_fraction",
    **{f"tracker.{f.name}": f"tracker.wandb.{f.name}" for f in fields(WandbConfig)},
}
"""Options that have a better name now, old to new; the old names are accepted until the next release."""

SECTIONS = tuple(f.name for f in fields(Config) if f.name != "run_dir")
SEVERAL = ("tracker", "hooks", "metrics")
"""Sections of which a run can have several parts: mappings from the name of a part to its options."""


def parts_in(cfg: Any) -> dict[str, Any]:
    """Return the options of each part by the prefix of their names, such as ``model`` and ``tracker.wandb``.

    ``cfg`` is a Config, or a composed tree that becomes one.
    """
    found = {section: getattr(cfg, section) for section in SECTIONS}
    for section in SEVERAL:
        found |= {f"{section}.{name}": options for name, options in found.pop(section).items()}
    return found


def to_plain(cfg: Config) -> dict[str, dict[str, Any]]:
    """Return ``cfg`` as dictionaries for JSON, each part of it with the name of its schema."""

    def plain(section: str, options: Section) -> dict[str, Any]:
        schema = next((name for name, part in schemas(section).items() if part.configures(options)), None)
        if schema is None:
            part_of(section, options)  # raises
        return {"schema": schema, **asdict(options)}  # type: ignore[call-overload]

    return {
        section: {name: plain(section, options) for name, options in getattr(cfg, section).items()}
        if section in SEVERAL
        else plain(section, getattr(cfg, section))
        for section in SECTIONS
    }


def from_plain(plain: dict[str, dict[str, Any]]) -> Config:
    """Return the Config that ``to_plain`` converted; newer options have their defaults, and removed ones are left out.

    Raises:
        UserError: it has options that this version does not know, or values of the wrong type.
    """
    cfg = Config()
    for section, values in plain.items():
        if section not in SEVERAL:
            setattr(cfg, section, _section_from(section, section, values))
        elif "schema" in values:  # until 0.1 there was one tracker, and its name was one of the options
            name = values["schema"]
            values = {key: value for key, value in values.items() if key != "name"}
            getattr(cfg, section)[name] = _section_from(section, f"{section}.{name}", values)
        else:
            parts = {name: _section_from(section, f"{section}.{name}", each) for name, each in values.items()}
            setattr(cfg, section, parts)
    return cfg


def _section_from(section: str, prefix: str, values: dict[str, Any]) -> Section:
    values = {RENAMED.get(f"{prefix}.{name}", name).rpartition(".")[2]: value for name, value in values.items()}
    values = {name: value for name, value in values.items() if f"{prefix}.{name}" not in GONE}
    schema = values.pop("schema")
    known = schemas(section) if section in SECTIONS else {}
    if known and schema not in known:
        raise UserError(
            f"the config has {section}={schema}, which is not registered here{nearest(schema, known)}: use a version "
            "of wordrun that has it, or, for a part of your own, run in its project's folder or install its package"
        )
    cls = known[schema].options if known else None
    unknown = set(values) - {f.name for f in fields(cls)} if cls else {"*"}
    if cls is None or unknown:
        raise UserError(
            f"the config has {', '.join(f'{prefix}.{name}' for name in sorted(unknown))}, which this version of "
            "wordrun does not know: use the one that wrote it, or a newer one"
        )
    kinds = _types(cls)  # type: ignore[arg-type]
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            kind = kinds[name].__name__ if isinstance(kinds[name], type) else kinds[name]
            raise UserError(f"the config has {prefix}.{name}={value!r:.100}, which should be of type {kind}")
    options: Section = cls(**values)
    return options


@cache
def _types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether ``value``, which was read from JSON, has the type ``kind``; types that JSON lacks all fit."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    kind = get_origin(kind) or kind
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind or kind not in (bool, int, str, list, dict, type(None))
