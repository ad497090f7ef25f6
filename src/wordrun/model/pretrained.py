"""Reads the weights of transformers' models into wordrun's own, one tensor at a time: nothing holds all of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.common.errors import ConfigError, first_line
from wordrun.common.section import value_text
from wordrun.model import huggingface_experts, mup
from wordrun.model.base import LazyWeights
from wordrun.model.huggingface import NO_WEIGHTS, STRETCH, architecture, match, to_ours
from wordrun.model.huggingface_files import open_files, read_config
from wordrun.model.options import GPTConfig, LlamaConfig, MoEConfig, TransformerConfig

KINDS = {
    "gpt2": (GPTConfig, "GPT-2", "gpt2"),
    "llama": (LlamaConfig, "LLaMA", "llama_debug"),
    "qwen3": (LlamaConfig, "Qwen3", "qwen3_0_6b"),
    "qwen2": (LlamaConfig, "Qwen2.5", "llama_debug"),
    "qwen3_moe": (MoEConfig, "Qwen3-MoE", "qwen3_30b_a3b"),
    "mixtral": (MoEConfig, "Mixtral", "mixtral_8x7b"),
    "mistral": (LlamaConfig, "Mistral", "mistral_7b"),
}
"""transformers' model types mapped to our options class, a display name and a preset."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
}
"""What transformers assumes for keys that a config.json lacks, where the kinds of models differ."""
NO_EFFECT = re.compile(
    # about the file, tokens and classes
    r"_name_or_path|_commit_hash|architectures|model_type|transformers_version|transformers\.js_config|(torch_)?dtype|"
    r"unsloth_\w+|tokenizer_class|prefix|\w+_token(_id)?|id2label|label2id|_?num_labels|problem_type|finetuning_task|"
    r"task_specific_params|is_llama_config|_pre_quantization_dtype|"
    # what the forward pass returns, and how it is implemented
    r"output_\w+|return_dict\w*|use_return_dict|use_cache|cache_implementation|chunk_size_feed_forward|torchscript|"
    r"_?attn_implementation\w*|_flash_attn_2_enabled|use_flash_attn\w*|gradient_checkpointing|pretraining_tp|"
    r"reorder_and_upcast_attn|is_decoder|n_ctx|model_max_length|max_sequence_length|max_window_layers|"
    # training: dropout and initial values, whose options are wordrun's own
    r"\w*dropout|\w+_pdrop|initializer_(range|factor)|router_aux_loss_coef|summary_\w+|"
    # generating text
    r"(max|min)_(length|new_tokens)|do_sample|early_stopping|num_beam\w+|diversity_penalty|temperature|top_[kp]|"
    r"typical_p|(repetition|length)_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences|"
    r"remove_invalid_values|exponential_decay_length_penalty|(begin_)?suppress_tokens"
)
"""Keys of a config.json that do not change what a model computes from its weights."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), 1),
    **dict.fromkeys(("lm_head_multiplier", "routed_scaling_factor", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "factor", "attention_factor"), 1),
    **dict.fromkeys(("is_causal", "causal", "use_rope", "scale_attn_weights"), True),
}
"""Values with which a key has no effect; for any key, null, false, 0 and empty values have none, either."""
FREE = (
    "name",
    "batch_size",
    "dropout",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    *mup.FIELDS,
    "balance_rate",
    "balance_loss",
)
"""Options of a model that do not depend on its weights."""


def open_weights(folder: Path, cfg: TransformerConfig, vocab_size: int | None = None) -> Mapping[str, Tensor]:
    """Return the weights in ``folder`` by the names of our model's ``state_dict``, each read when it is accessed.

    They keep the dtype of the file. If a GPT has fewer positions than the folder, the first ones are used.

    Args:
        folder: with config.json and weights of one of transformers' models in ``KINDS``.
        cfg: the model that is initialized with them.
        vocab_size: rows of its embedding if ``cfg`` does not set it; None: as many as in the file.

    Raises:
        ConfigError: the weights belong to a different model; the message lists all differences.
        UserError: there are no weights, or a file is damaged.
    """
    files, shapes = open_files(folder)
    described = replace(cfg, vocab_size=cfg.vocab_size or vocab_size)
    problems: list[str] = []
    overrides: list[str] = []
    if mup.scales(cfg):
        problems.append(f"{folder} holds a plain model, which needs model.mup=false")
    if (folder / "config.json").exists():
        facts = read_config(folder)
        described = model_config(folder, facts)
        if isinstance(described, GPTConfig) and not getattr(cfg, "bias", True):
            # transformers' GPT-2 always has biases, 0 if the model was trained without.
            biases = (name for name in files if name.endswith(".bias") and not NO_WEIGHTS.fullmatch(name))
            described = replace(described, bias=any(bool(files[name].any()) for name in biases))
        found, overrides = differences(folder, described, cfg, vocab_size, str(facts["model_type"]))
        problems += found
    if isinstance(described, MoEConfig):
        files, shapes = huggingface_experts.join(files, shapes, architecture(described).names)
    return fitting(folder, (files, shapes), described, cfg, (problems, overrides))


def fitting(
    source: Path,
    weights: tuple[Mapping[str, Tensor], Mapping[str, torch.Size]],
    described: TransformerConfig,
    cfg: TransformerConfig,
    different: tuple[list[str], list[str]],
) -> Mapping[str, Tensor]:
    """Return weights by the names of our model's ``state_dict``, each read when it is accessed.

    Args:
        source: where the weights are, for messages.
        weights: the weights by transformers' names, and the shapes of all of them.
        described: the options of their model.
        cfg: the options of ours.
        different: how the two differ, as ``differences`` returned it.

    Raises:
        ConfigError: they differ, or weights are missing, left over, or have other shapes.
    """
    (files, shapes), (problems, overrides) = weights, different
    names, mismatches = match(files, shapes, described)
    if overrides:
        problems = [*problems, f"use the options of these weights: {' '.join(overrides)}"]
    problems = [*problems, *(f"{source}: {problem}" for problem in mismatches)]
    if problems:
        raise ConfigError("\n".join(problems))
    return LazyWeights({name: partial(_convert, files, name, theirs, cfg) for name, theirs in names.items()})


def _convert(files: Mapping[str, Tensor], name: str, theirs: str, cfg: TransformerConfig) -> Tensor:
    """Return the tensor ``theirs`` of ``files`` as our parameter ``name``."""
    return to_ours(name, files[theirs], cfg)


class Facts(dict[str, Any]):
    """The content of a config.json, which remembers the keys that have been read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.seen = set[str]()

    def __getitem__(self, key: str) -> Any:
        """Return the value of ``key``."""
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default``."""
        self.seen.add(key)
        return super().get(key, default)

    def unused(self) -> dict[str, Any]:
        """Return the keys that have not been read, and whose values may change what the model computes."""
        return {
            key: value
            for key, value in self.items()
            if key not in self.seen and not NO_EFFECT.fullmatch(key) and not is_neutral(key, value)
        }


def is_neutral(key: str, value: Any) -> bool:
    """Return whether ``value`` means that what ``key`` describes is absent."""
    return bool(value == NEUTRAL[key]) if key in NEUTRAL else not value


def model_config(folder: Path, facts: Mapping[str, Any]) -> TransformerConfig:
    """Return our options for the model that a config.json describes.

    Args:
        folder: its folder, for messages.
        facts: its content.

    Raises:
        ConfigError: our models do not support it; the message lists every unsupported value.
    """
    kind = facts.get("model_type")
    if kind not in KINDS:
        known = ", ".join(f"{key} ({name})" for key, (_, name, _) in KINDS.items())
        raise ConfigError(
            f"{folder} holds weights of a model of type {kind}; wordrun's own models are {known}: for any other, use "
            f"model=hf model.path={folder}",
            page="generate.md#start-from-existing-weights",
        )
    content = Facts({**DEFAULTS.get(kind, {}), **facts})
    file = folder / "config.json"
    try:
        cfg, only = (_gpt2 if kind == "gpt2" else _llama)(content)
    except KeyError as error:
        raise ConfigError(f"{file} lacks the required key {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{file} has a value of the wrong type: {first_line(error)}") from None
    problems = [
        f"{folder} has {key}={facts[key]}, but model={KINDS[kind][2]} supports only {key}={value}"
        for key, value in only.items()
        if content.get(key, value) != value
    ]
    unused = content.unused()
    if (quantized := unused.pop("quantization_config", None)) is not None:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        problems.append(
            f"{file} has quantization_config ({method or value_text(quantized)}), but wordrun reads only weights that "
            "are not quantized: use the original model, or write one with transformers' "
            "model.dequantize().save_pretrained(DIR)"
        )
    if unused:
        shown = ", ".join(f"{key}={_short(value)}" for key, value in unused.items())
        problems.append(
            f"{file} has {shown}, which wordrun does not use and which may change what the model computes: use another "
            "model, or remove what has no effect from config.json"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return replace(cfg, name=KINDS[kind][2])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gpt2(facts: Facts) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return our options for a GPT-2's config.json, and the values that its other keys must have if present."""
    cfg = GPTConfig(
        n_layer=facts["n_layer"],
        n_head=facts["n_head"],
        n_embd=facts["n_embd"],
        block_size=facts["n_positions"],
        vocab_size=facts["vocab_size"],
        bias=True,
        gelu="none" if facts.get("activation_function") == "gelu" else "tanh",
    )
    tanh = facts.get("activation_function") in ("gelu_new", "gelu_pytorch_tanh")
    return cfg, {
        "activation_function": facts["activation_function"] if tanh or cfg.gelu == "none" else "gelu_new",
        "n_inner": facts.get("n_inner") and 4 * cfg.n_embd,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _llama(facts: Facts) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return our options for a LLaMA's config.json, and the values that its other keys must have if present."""
    # transformers 5 has one entry for the rotary embedding; older versions keep the base separately.
    name = "rope_parameters" if dict(facts).get("rope_parameters") else "rope_scaling"
    rope = {"rope_theta": facts.get("rope_theta", 10000.0), **(facts.get(name) or {})}
    theta, factor, unknown = _rope(rope)
    n_head, width = facts["num_attention_heads"], facts["hidden_size"]
    shared = facts.get("num_key_value_heads") or n_head
    model = facts["model_type"]
    head_size = facts.get("head_dim") or width // n_head
    # Qwen's files have a sliding_window even with use_sliding_window=false.
    window = None if model == "llama" else facts.get("sliding_window")
    window = None if model.startswith("qwen") else window
    kinds = facts.get("layer_types") or []
    options_of: type[LlamaConfig] = LlamaConfig
    mixture: dict[str, Any] = {}
    if model in ("qwen3_moe", "mixtral"):
        options_of = MoEConfig
        mixture = {
            # Qwen3-MoE's name before transformers 5 is the second.
            "n_experts": facts.get("num_local_experts") or facts["num_experts"],
            "n_active": facts["num_experts_per_tok"],
            "normalize_weights": model == "mixtral" or facts.get("norm_topk_prob", False),
        }
    cfg = options_of(
        n_layer=facts["num_hidden_layers"],
        n_head=n_head,
        n_kv_head=None if shared == n_head else shared,
        head_size=None if head_size * n_head == width else head_size,
        qk_norm=model in ("qwen3", "qwen3_moe"),
        qkv_bias=model == "qwen2",
        n_embd=width,
        window=window,
        n_hidden=facts["moe_intermediate_size" if model == "qwen3_moe" else "intermediate_size"],
        vocab_size=facts["vocab_size"],
        block_size=facts.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_factor=factor,
        norm_eps=facts.get("rms_norm_eps", 1e-6),
        tie=facts.get("tie_word_embeddings", False),
        **mixture,
    )
    only: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        **({"decoder_sparse_step": 1} if model == "qwen3_moe" else {}),
        **({"mlp_only_layers": []} if facts.get("mlp_only_layers") else {}),
        **({name: unknown} if unknown else {}),
    }
    if {*kinds} - {"sliding_attention" if window else "full_attention"}:
        only["layer_types"] = "the same for all layers"
    if model == "qwen3_moe":
        facts.get("intermediate_size")  # of layers without experts
    return cfg, only


def _rope(rope: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return the base and the factor of a rotary embedding and, if its type is unknown, what is supported."""
    rope = dict(rope)
    theta = float(rope.pop("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    allowed = f"{ {'rope_type': 'default'} } or { {**STRETCH, 'factor': '...'} }"
    if kind == "default":
        rope.pop("original_max_position_embeddings", None)
        return theta, 1.0, "" if all(starmap(is_neutral, rope.items())) else allowed
    factor, stretched = rope.pop("factor", 1.0), {key: value for key, value in STRETCH.items() if key != "rope_type"}
    known = kind == STRETCH["rope_type"] and rope == stretched
    return theta, float(factor), "" if known else allowed


def differences(
    folder: Path, described: TransformerConfig, cfg: TransformerConfig, vocab_size: int | None, kind: str
) -> tuple[list[str], list[str]]:
    """Return the differences between ``cfg`` and the model in a folder, one per line, and overrides to fix them.

    ``kind`` is transformers' type of the model.
    """
    _, name, preset = KINDS[kind]
    options = {field.name: getattr(described, field.name) for field in fields(described)}
    for option in FREE:
        options.pop(option, None)
    if type(described) is not type(cfg):
        overrides = [f"model={preset}", *(f"model.{key}={value_text(value)}" for key, value in options.items())]
        return [f"{folder} holds a {name}, but model={cfg.name} is not one"], overrides
    mine = {key: getattr(cfg, key) for key in options}
    mine["vocab_size"] = cfg.vocab_size or vocab_size or described.vocab_size
    if mine.get("n_kv_head") == cfg.n_head:
        mine["n_kv_head"] = None
    if mine.get("head_size") == cfg.n_embd // cfg.n_head:
        mine["head_size"] = None
    if isinstance(cfg, LlamaConfig) and cfg.block_size <= min(cfg.window or math.inf, options["window"] or math.inf):
        del mine["window"]  # sequences do not exceed it
    if isinstance(cfg, LlamaConfig) or cfg.block_size <= described.block_size:
        del mine["block_size"]  # LLaMA has no weights for it, and GPT has enough positions
    different = {key: options[key] for key, value in mine.items() if value != options[key]}
    problems = [
        f"{folder} has model.{key}={value_text(value)}, but model={cfg.name} has {value_text(mine[key])}"
        for key, value in different.items()
    ]
    return problems, [f"model.{key}={value_text(value)}" for key, value in different.items()]
