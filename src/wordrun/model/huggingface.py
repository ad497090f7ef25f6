"""Converts weights and options to and from Hugging Face's transformers.

A GPT becomes a GPT2LMHeadModel, a Llama one of ``FAMILIES``, depending on its options. The library is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wordrun.common.errors import UserError
from wordrun.common.section import value_text
from wordrun.model import huggingface_experts, lora
from wordrun.model.construction import meta_model
from wordrun.model.options import GPTConfig, LlamaConfig, ModernConfig, MoEConfig, TransformerConfig
from wordrun.model.rotary import TRAINED_LENGTH

GPT2_NAMES = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
"""Our names of modules mapped to those of GPT2LMHeadModel; the tables below are those of other models."""
LLAMA_NAMES = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
QWEN3_MOE_NAMES = LLAMA_NAMES | {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.gate_proj",
    "mlp.experts.up": "mlp.experts.up_proj",
    "mlp.experts.proj": "mlp.experts.down_proj",
}
MIXTRAL_NAMES = LLAMA_NAMES | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.w1",
    "mlp.experts.up": "block_sparse_moe.experts.w3",
    "mlp.experts.proj": "block_sparse_moe.experts.w2",
}
NO_WEIGHTS = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Masks and tables that older files contain besides the weights."""

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Without these entries, transformers assumes its own special tokens."""
STRETCH = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED_LENGTH,
}
"""Llama 3.1's settings of the rotary embedding, apart from the factor."""


def to_huggingface(state: Mapping[str, Tensor], cfg: TransformerConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' model for the weights ``state`` of ours, or some of them.

    GPT2LMHeadModel always has biases; any that our model lacks are set to 0.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(huggingface_experts.BIAS):
            huggingface_experts.check_bias(tensor)
            continue
        if ".experts." in name and isinstance(cfg, MoEConfig):
            result |= huggingface_experts.split(_their_name(name, cfg), tensor, cfg.n_experts)
            continue
        result[_their_name(name, cfg)] = _to_theirs(name, tensor, cfg)
        if isinstance(cfg, GPTConfig) and not cfg.bias and ("blocks." in name or name == "norm.weight"):
            bias = name.removesuffix("weight") + "bias"
            result[_their_name(bias, cfg)] = tensor.new_zeros(tensor.shape[0])
    return result


def match(
    theirs: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], cfg: TransformerConfig
) -> tuple[dict[str, str], list[str]]:
    """Match each weight of the model that ``cfg`` describes to one of transformers' weights.

    Args:
        theirs: transformers' weights, which are read on access.
        shapes: shapes of all of them. Positions beyond ``cfg.block_size`` are ignored.
        cfg: the model's options; if ``vocab_size`` is None, the embedding has as many rows as theirs.

    Returns:
        Our names mapped to names in ``theirs``, and the mismatches, one line per weight.
    """
    found = {name: name for name in shapes if not NO_WEIGHTS.fullmatch(name)}
    if isinstance(cfg, GPTConfig):  # the published files omit the prefix
        found = {re.sub(r"^(?!transformer\.|lm_head\.)", "transformer.", name): name for name in found}
        if not cfg.bias:
            found = {key: name for key, name in found.items() if not name.endswith(".bias") or theirs[name].any()}
    embedding = found.get(_their_name("tokens.weight", cfg))
    model = meta_model(cfg, 1 if embedding is None else shapes[embedding][0])
    problems = []
    if model.tied and embedding is not None:  # files of tied models may lack the copy
        copy = found.setdefault("lm_head.weight", embedding)
        if copy != embedding and not theirs[copy].equal(theirs[embedding]):
            problems.append(
                f"lm_head.weight is not tied to the embedding in the checkpoint, but it is in model={cfg.name}"
            )
    state = {name: ours for name, ours in model.state_dict().items() if not name.endswith(huggingface_experts.BIAS)}
    wanted = {_their_name(name, cfg): (name, ours) for name, ours in state.items()}
    problems += [f"the checkpoint has no {name}, but model={cfg.name} does" for name in wanted.keys() - found.keys()]
    problems += [f"the checkpoint has {name}, but model={cfg.name} does not" for name in found.keys() - wanted.keys()]
    names = {}
    for their_name, (name, ours) in wanted.items():
        if their_name not in found:
            continue
        names[name] = found[their_name]
        there, here = tuple(shapes[found[their_name]]), tuple(_to_theirs(name, ours, cfg).shape)
        enough = name == "positions.weight" and there[0] > here[0] and there[1:] == here[1:]
        if there != here and not enough:
            shown = f"has the shape {there} in the checkpoint, but {here} in model={cfg.name}"
            problems.append(f"{their_name} (our {name}) {shown}")
    return names, sorted(problems)


def huggingface_config(cfg: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json from which transformers builds the model that ``cfg`` describes.

    Args:
        cfg: shapes.
        vocab_size: rows of the embedding.
    """
    return {"vocab_size": vocab_size, **architecture(cfg).describe(cfg), **NO_SPECIAL_TOKENS}


def _describe_gpt2(cfg: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": cfg.block_size,
        "n_embd": cfg.n_embd,
        "n_layer": cfg.n_layer,
        "n_head": cfg.n_head,
        "activation_function": "gelu_new" if cfg.gelu == "tanh" else "gelu",
        "resid_pdrop": cfg.dropout,
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.dropout,
    }


def _describe_llama(cfg: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": family(cfg),
        "architectures": [CLASSES[family(cfg) or "llama"]],
        "head_dim": cfg.attention_width() // cfg.n_head,
        "max_position_embeddings": cfg.block_size,
        "hidden_size": cfg.n_embd,
        "intermediate_size": cfg.n_hidden,
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head or cfg.n_head,
        "tie_word_embeddings": cfg.tie,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {**STRETCH, "factor": cfg.rope_factor} if cfg.rope_factor != 1 else None,
        "rms_norm_eps": cfg.norm_eps,
        "attention_dropout": cfg.dropout,
        **({"sliding_window": cfg.window} if cfg.window else {}),
    }


def _describe_mixtral(cfg: MoEConfig) -> dict[str, Any]:
    return {
        **_describe_llama(cfg),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": cfg.n_experts,
        "num_experts_per_tok": cfg.n_active,
        "sliding_window": cfg.window,
        "router_aux_loss_coef": cfg.balance_loss,
    }


def _describe_qwen3_moe(cfg: MoEConfig) -> dict[str, Any]:
    return {
        **_describe_llama(cfg),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": cfg.n_hidden,
        "num_experts": cfg.n_experts,
        "num_experts_per_tok": cfg.n_active,
        "norm_topk_prob": cfg.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": cfg.balance_loss,
    }


def adapter(adapters: Mapping[str, Tensor], cfg: TransformerConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return LoRA's adapters as peft's adapter_config.json and adapter_model.safetensors hold them.

    Args:
        adapters: by the names of our model.
        cfg: the model's options.
    """
    tensors, targets = {}, set()
    for name, tensor in adapters.items():
        layer, _, part = name.rpartition(".")
        theirs = _their_name(f"{layer}.weight", cfg).removesuffix(".weight")
        # Rows of B are outputs of the layer, ordered as its weight's rows.
        rows = _by_kind(layer, tensor, cfg) if part == lora.B else tensor
        tensors[f"base_model.model.{theirs}.lora_{part[-1].upper()}.weight"] = rows.contiguous()
        targets.add(architecture(cfg).names[layer.split(".", 2)[2]])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": cfg.lora_rank,
        "lora_alpha": cfg.lora_alpha,
        "lora_dropout": cfg.lora_dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": architecture(cfg).transposed,
    }, tensors


@dataclass(frozen=True)
class Architecture:
    """How one of our models maps to a transformers model."""

    names: Mapping[str, str]
    """Our module names mapped to theirs."""
    describe: Callable[[Any], dict[str, Any]]
    """Returns the config.json entries for a model with these options."""
    transposed: bool = False
    """Whether transformers stores the matrices of the blocks transposed."""


ARCHITECTURES: dict[type[TransformerConfig], Architecture] = {
    GPTConfig: Architecture(GPT2_NAMES, _describe_gpt2, transposed=True),
    LlamaConfig: Architecture(LLAMA_NAMES, _describe_llama),
    MoEConfig: Architecture(MIXTRAL_NAMES, _describe_mixtral),
}
QWEN3_MOE = Architecture(QWEN3_MOE_NAMES, _describe_qwen3_moe)
FAMILIES = {
    frozenset(): "llama",
    frozenset({"qk_norm"}): "qwen3",
    frozenset({"qkv_bias"}): "qwen2",
    frozenset({"window"}): "mistral",
}
"""transformers' model types, each by the set of our options that distinguish it from LLaMA."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def family(cfg: LlamaConfig) -> str | None:
    """Return transformers' type of the model that ``cfg`` describes; None: it has none."""
    kind = FAMILIES.get(frozenset(_parts(cfg)))
    # transformers' Qwen2 has no option for the size of a head.
    unlike = cfg.global_every or (kind == "qwen2" and cfg.attention_width() != cfg.n_embd)
    return None if unlike else kind


def _parts(cfg: LlamaConfig) -> list[str]:
    """Return the names of the options with which ``cfg`` departs from LLaMA."""
    return [name for name in ("qk_norm", "qkv_bias", "window") if getattr(cfg, name)]


def _require(cfg: TransformerConfig, options: Mapping[str, Any], problem: str, kind: str) -> None:
    """Raise a UserError with the ``problem`` unless ``cfg`` has these ``options``, so that it can be a ``kind``."""
    overrides = [f"model.{key}={value_text(value)}" for key, value in options.items() if getattr(cfg, key) != value]
    if overrides:
        raise UserError(
            f"{problem}: export it with form=checkpoint; only a model with {' '.join(overrides)} can be exported as "
            f"{kind}"
        )


def architecture(cfg: TransformerConfig) -> Architecture:
    """Return the transformers model for the model that ``cfg`` describes.

    Raises:
        UserError: there is none.
    """
    if isinstance(cfg, ModernConfig):
        plain = {
            "mlp": "swiglu",
            "norm_weights": True,
            "embed_norm": False,
            "softcap": 0.0,
            "value_layers": [],
            "ngram_rows": [],
        }
        _require(cfg, plain, f"transformers has no architecture with the parts of model={cfg.name}", "a LLaMA or Qwen3")
        cfg_type: type[TransformerConfig] = LlamaConfig
    else:
        cfg_type = type(cfg)
    if isinstance(cfg, MoEConfig):
        theirs = {
            "qkv_bias": False,
            "n_shared": 0,
            "router": "softmax",
            **({"window": None} if cfg.qk_norm else {"normalize_weights": True}),
        }
        kind = "Qwen3-MoE" if cfg.qk_norm else "Mixtral"
        _require(cfg, theirs, f"transformers' {kind} lacks options of model={cfg.name}", kind)
    if isinstance(cfg, LlamaConfig):
        found = family(cfg)
        if found is None:
            names = [*_parts(cfg), "head_size", "global_every"]
            shown = " ".join(f"model.{name}={value_text(getattr(cfg, name))}" for name in names)
            raise UserError(
                f"transformers has no architecture that combines {shown}: export it with form=checkpoint, or train "
                f"with the options of one of {', '.join(CLASSES)}",
                page="generate.md#export",
            )
        if isinstance(cfg, MoEConfig) and cfg.qk_norm:
            return QWEN3_MOE
    return ARCHITECTURES[cfg_type]


def _their_name(name: str, cfg: TransformerConfig) -> str:
    """Return transformers' name of our parameter ``name``."""
    names = architecture(cfg).names
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        blocks, layer, inner = module.split(".", 2)
        return f"{names[blocks]}.{layer}.{names[inner]}.{kind}"
    return f"{names[module]}.{kind}"


def _to_theirs(name: str, tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """Return our parameter ``name`` in their layout.

    GPT-2's matrices are transposed there, and all rows of q precede all rows of k and v; our rows are ordered by head.
    """
    tensor = _by_kind(name, tensor, cfg)
    return tensor.T.contiguous() if _is_transposed(name, tensor, cfg) else tensor


def _by_kind(name: str, tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """Return ``tensor`` with the rows of q before those of k and v, if it belongs to a layer that has all three."""
    if "attention.qkv" not in name:
        return tensor
    return tensor.reshape(cfg.n_head, 3, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def to_ours(name: str, tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """Return their tensor for our parameter ``name`` in our layout, with at most ``cfg.block_size`` positions."""
    if _is_transposed(name, tensor, cfg):
        tensor = tensor.T.contiguous()
    if ".qkv." in name:
        tensor = tensor.reshape(3, cfg.n_head, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)
    return tensor[: cfg.block_size] if name == "positions.weight" else tensor


def _is_transposed(name: str, tensor: Tensor, cfg: TransformerConfig) -> bool:
    """Return whether transformers stores our parameter ``name`` transposed."""
    return architecture(cfg).transposed and name.startswith("blocks.") and tensor.dim() == 2
