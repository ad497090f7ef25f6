"""Converts weights and options to and from Hugging Face's transformers: GPT as GPT2LMHeadModel, Llama as
LlamaForCausalLM, with qk_norm as Qwen3ForCausalLM, or with qkv_bias as Qwen2ForCausalLM; a mixture of experts as
Qwen3MoeForCausalLM. The library is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wordrun.config import GPTConfig, LlamaConfig, ModernConfig, MoEConfig, TransformerConfig, value_text
from wordrun.errors import UserError
from wordrun.model import lora, meta_model
from wordrun.model.base import LazyWeights
from wordrun.model.llama import TRAINED_LENGTH

GPT2_NAMES = {
    "tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
    "blocks": "transformer.h", "norm_1": "ln_1", "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn", "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
}  # fmt: skip
LLAMA_NAMES = {
    "tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "blocks": "model.layers", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
}  # fmt: skip
MOE_NAMES = LLAMA_NAMES | {
    "mlp.router": "mlp.gate", "mlp.experts.gate": "mlp.experts.gate_proj", "mlp.experts.up": "mlp.experts.up_proj",
    "mlp.experts.proj": "mlp.experts.down_proj",
}  # fmt: skip
ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
"""Transformers' files have the matrices of each expert separately."""
BIAS = "router.bias"
NO_WEIGHTS = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Masks and tables that older files contain besides the weights."""

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Without these entries, transformers assumes its own special tokens."""
STRETCH = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED_LENGTH,
}  # fmt: skip
"""Settings of Llama 3.1's rotary embedding besides the factor."""


def to_huggingface(state: Mapping[str, Tensor], cfg: TransformerConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' model for the weights ``state`` of ours, or some of them.

    GPT2LMHeadModel always has biases; any that our model lacks are set to 0.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(BIAS):
            if not tensor.is_meta and tensor.any():
                raise UserError(
                    "transformers' Qwen3-MoE has no biases for the router, which this model has from training with "
                    "model.balance_rate above 0: form=checkpoint exports it, and to transformers only a model trained "
                    "with model.balance_rate=0 and model.balance_loss"
                )
            continue
        if ".experts." in name and isinstance(cfg, MoEConfig):
            module, _, layer = _their_name(name, cfg).partition(".experts.")
            each = tensor.view(cfg.n_experts, -1, tensor.shape[-1]).unbind()
            result |= {f"{module}.experts.{i}.{layer}": matrix.contiguous() for i, matrix in enumerate(each)}
            continue
        result[_their_name(name, cfg)] = _to_theirs(name, tensor, cfg)
        if isinstance(cfg, GPTConfig) and not cfg.bias and ("blocks." in name or name == "norm.weight"):
            bias = name.removesuffix("weight") + "bias"
            result[_their_name(bias, cfg)] = tensor.new_zeros(tensor.shape[0])
    return result


def join_experts(
    theirs: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> tuple[Mapping[str, Tensor], dict[str, torch.Size]]:
    """Return transformers' weights and their shapes with the matrices of all experts of a layer below each other."""
    layers: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        if found := ONE_EXPERT.fullmatch(name):
            layers.setdefault(found[1] + found[3], []).append((int(found[2]), name))
    if not layers:
        return theirs, dict(shapes)
    names = {joined: [name for _, name in sorted(found)] for joined, found in layers.items()}
    rest = {name: shape for name, shape in shapes.items() if not ONE_EXPERT.fullmatch(name)}
    rows = {joined: sum(shapes[name][0] for name in some) for joined, some in names.items()}
    readers = {name: partial(theirs.__getitem__, name) for name in rest}
    joint = {joined: partial(_joined, theirs, some) for joined, some in names.items()}
    sizes = {joined: torch.Size((rows[joined], *shapes[some[0]][1:])) for joined, some in names.items()}
    return LazyWeights({**readers, **joint}), rest | sizes


def _joined(theirs: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([theirs[name] for name in names])


def match(
    theirs: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], cfg: TransformerConfig
) -> tuple[dict[str, str], list[str]]:
    """Match each weight of the model that ``cfg`` describes to one of transformers' weights.

    Args:
        theirs: transformers' weights; only a few small ones are read.
        shapes: shapes of all of them. Positions beyond ``cfg.block_size`` are ignored.
        cfg: shapes; without ``vocab_size`` the embedding has as many rows as theirs.

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
            problems.append(f"lm_head.weight is not the embedding in the checkpoint, but it is in model={cfg.name}")
    state = {name: ours for name, ours in model.state_dict().items() if not name.endswith(BIAS)}
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
            shown = f"{there} in the checkpoint, but {here} in model={cfg.name}"
            problems.append(f"{their_name} is our {name}, {shown}")
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
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "n_positions": cfg.block_size, "n_embd": cfg.n_embd, "n_layer": cfg.n_layer, "n_head": cfg.n_head,
        "activation_function": "gelu_new" if cfg.gelu == "tanh" else "gelu",
        "resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout, "attn_pdrop": cfg.dropout,
    }  # fmt: skip


def _describe_llama(cfg: LlamaConfig) -> dict[str, Any]:
    kind, name = ("qwen3", "Qwen3ForCausalLM") if cfg.qk_norm else ("llama", "LlamaForCausalLM")
    if cfg.qkv_bias:  # transformers' Qwen2 has no option for the size of a head
        kind, name = "qwen2", "Qwen2ForCausalLM"
    return {
        "model_type": kind, "architectures": [name], "head_dim": cfg.attention_width() // cfg.n_head,
        "max_position_embeddings": cfg.block_size, "hidden_size": cfg.n_embd, "intermediate_size": cfg.n_hidden,
        "num_hidden_layers": cfg.n_layer, "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head or cfg.n_head, "tie_word_embeddings": cfg.tie,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {**STRETCH, "factor": cfg.rope_factor} if cfg.rope_factor != 1 else None,
        "rms_norm_eps": cfg.norm_eps, "attention_dropout": cfg.dropout,
    }  # fmt: skip


def _describe_moe(cfg: MoEConfig) -> dict[str, Any]:
    return {
        **_describe_llama(cfg), "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": cfg.n_hidden, "num_experts": cfg.n_experts, "num_experts_per_tok": cfg.n_active,
        "norm_topk_prob": cfg.normalize_weights, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "router_aux_loss_coef": cfg.balance_loss,
    }  # fmt: skip


def adapter(additions: Mapping[str, Tensor], cfg: TransformerConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return LoRA's additions as peft's adapter_config.json and adapter_model.safetensors hold them.

    Args:
        additions: by the names of our model.
        cfg: the model's options.
    """
    tensors, targets = {}, set()
    for name, tensor in additions.items():
        layer, _, part = name.rpartition(".")
        theirs = _their_name(f"{layer}.weight", cfg).removesuffix(".weight")
        # Rows of B are outputs of the layer, ordered as its weight's rows.
        rows = _by_kind(layer, tensor, cfg) if part == lora.B else tensor
        tensors[f"base_model.model.{theirs}.lora_{part[-1].upper()}.weight"] = rows.contiguous()
        targets.add(architecture(cfg).names[layer.split(".", 2)[2]])
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": cfg.lora_rank, "lora_alpha": cfg.lora_alpha,
        "lora_dropout": cfg.lora_dropout, "target_modules": sorted(targets), "bias": "none", "inference_mode": True,
        "fan_in_fan_out": architecture(cfg).transposed,
    }, tensors  # fmt: skip


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
    MoEConfig: Architecture(MOE_NAMES, _describe_moe),
}


def architecture(cfg: TransformerConfig) -> Architecture:
    """Return the transformers model for the model that ``cfg`` describes.

    Raises:
        UserError: there is none.
    """
    if isinstance(cfg, ModernConfig):
        plain = {
            "mlp": "swiglu", "norm_weights": True, "embed_norm": False, "softcap": 0.0, "value_layers": [],
            "ngram_rows": [],
        }  # fmt: skip
        words = [f"model.{key}={value_text(value)}" for key, value in plain.items() if getattr(cfg, key) != value]
        if words:
            raise UserError(
                f"transformers has no architecture with the parts of model={cfg.name}: form=checkpoint exports it, and "
                f"as a LLaMA or Qwen3 only a model trained with {' '.join(words)}"
            )
        cfg_type: type[TransformerConfig] = LlamaConfig
    else:
        cfg_type = type(cfg)
    if isinstance(cfg, MoEConfig):
        theirs = {"qk_norm": True, "qkv_bias": False, "n_shared": 0, "router": "softmax"}
        words = [f"model.{key}={value_text(value)}" for key, value in theirs.items() if getattr(cfg, key) != value]
        if words:
            raise UserError(
                f"transformers' Qwen3-MoE is not model={cfg.name}: form=checkpoint exports it, and to transformers "
                f"only a model trained with {' '.join(words)}"
            )
    if isinstance(cfg, LlamaConfig) and cfg.qkv_bias and (cfg.qk_norm or cfg.attention_width() != cfg.n_embd):
        raise UserError(
            "transformers has no architecture with model.qkv_bias=true and model.qk_norm=true, or with another "
            "model.head_size than n_embd / n_head: form=checkpoint exports it"
        )
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
    return architecture(cfg).transposed and name.startswith("blocks.") and tensor.dim() == 2
