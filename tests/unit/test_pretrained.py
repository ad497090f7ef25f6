"""Weights from folders that transformers writes: the same logits, read one at a time, and what is wrong is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from wordrun import Trainer, compose
from wordrun.common.errors import ConfigError, UserError
from wordrun.model.construction import meta_model
from wordrun.model.huggingface_files import fetch, read_config
from wordrun.model.options import GPTConfig, LlamaConfig, TransformerConfig
from wordrun.model.pretrained import model_config, open_weights

V = 61
GPT = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, bias=True, gelu="tanh")
LLAMA = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, block_size=24, rope_theta=5e5)


def theirs(kind: Any, **options: Any) -> Any:
    """Return transformers' configuration with the sizes of LLAMA, where ``options`` has no others."""
    sizes = {"vocab_size": V, "max_position_embeddings": 24, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5e5}
    return kind(**(sizes | heads | options))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
THEIRS: dict[str, tuple[TransformerConfig, Any]] = {
    "gpt2": (GPT, transformers.GPT2Config(vocab_size=V, n_positions=24, n_embd=32, n_layer=2, n_head=4)),
    "llama": (LLAMA, theirs(transformers.LlamaConfig, rms_norm_eps=1e-5)),
    "llama 3.2": (
        replace(LLAMA, tie=True, rope_factor=32.0),
        theirs(transformers.LlamaConfig, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_scaling=LLAMA3_ROPE),
    ),
    "qwen3": (
        replace(LLAMA, head_size=12, qk_norm=True, norm_eps=1e-6),
        theirs(transformers.Qwen3Config, head_dim=12),
    ),
    "qwen2": (
        replace(LLAMA, qkv_bias=True, tie=True, norm_eps=1e-6),
        theirs(transformers.Qwen2Config, tie_word_embeddings=True),
    ),
    "mistral": (
        replace(LLAMA, head_size=12, norm_eps=1e-6, window=7),
        theirs(transformers.MistralConfig, head_dim=12, sliding_window=7),
    ),
}
Folders = Callable[[str], Path]


def their_model(kind: str) -> Any:
    """Return transformers' model, with random weights everywhere."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(THEIRS[kind][1])
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Folders:
    """Write one of ``THEIRS`` as transformers does."""

    def write(kind: str) -> Path:
        their_model(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return write


@torch.no_grad()
def check_logits(weights: Mapping[str, torch.Tensor], cfg: TransformerConfig, theirs: Any) -> None:
    ours = meta_model(cfg, V)
    ours.load_state_dict(dict(weights), assign=True)
    tokens = torch.randint(V, (2, cfg.block_size), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["10GB", "16KB"], ids=["one file", "many files"])
@pytest.mark.parametrize("kind", THEIRS)
def test_logits_are_those_of_transformers(kind: str, size: str, tmp_path: Path) -> None:
    cfg, _ = THEIRS[kind]
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "16KB")
    weights = open_weights(tmp_path, cfg, V)
    assert list(weights) == list(meta_model(cfg, V).state_dict())
    check_logits(weights, cfg, theirs)
    assert replace(model_config(tmp_path, read_config(tmp_path)), name=cfg.name) == replace(cfg, vocab_size=V)


def test_a_file_of_torch_is_read_too(tmp_path: Path) -> None:
    """As OpenAI's GPT-2 was published: without the first word of the names, with masks, without the output layer."""
    theirs = their_model("gpt2")
    theirs.config.save_pretrained(tmp_path)
    state = {
        name.removeprefix("transformer."): x for name, x in theirs.state_dict().items() if name != "lm_head.weight"
    }
    torch.save(state | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, tmp_path / "pytorch_model.bin")
    check_logits(open_weights(tmp_path, GPT, V), GPT, theirs)


def test_nothing_is_read_before_it_is_asked_for(folder: Folders) -> None:
    path = folder("llama") / "model.safetensors"
    weights = open_weights(path.parent, LLAMA, V)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with path.open("r+b") as file:
        file.seek(header)
        file.write(bytes(len(content) - header))
    assert all(not weight.any() for weight in weights.values())


def test_a_shorter_gpt_takes_the_first_positions(folder: Folders) -> None:
    theirs = their_model("gpt2")
    short = replace(GPT, block_size=10)
    weights = open_weights(folder("gpt2"), short, V)
    assert weights["positions.weight"].shape == (10, 32)
    check_logits(weights, short, theirs)


def test_a_gpt_without_biases_takes_those_that_are_0(folder: Folders) -> None:
    path = folder("gpt2")
    file = load_file(path / "model.safetensors")
    save_file({name: x * (not name.endswith("bias")) for name, x in file.items()}, path / "model.safetensors")
    weights = open_weights(path, replace(GPT, bias=False), V)
    assert set(weights) == set(meta_model(replace(GPT, bias=False), V).state_dict())
    save_file(file, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has model.bias=true, but model=nano has false\n.*: model.bias=true$"):
        open_weights(path, replace(GPT, bias=False), V)


def refused(path: Path, cfg: TransformerConfig, vocab_size: int | None = V) -> str:
    with pytest.raises(UserError) as caught:
        open_weights(path, cfg, vocab_size)
    return str(caught.value)


def test_all_options_that_differ_are_named_at_once(folder: Folders) -> None:
    path = folder("llama")
    wrong = replace(LLAMA, n_layer=3, n_kv_head=4, rope_theta=1e4, norm_eps=1e-6, tie=True, block_size=99)
    assert refused(path, wrong, 65).splitlines() == [
        f"{path} has model.n_layer=2, but model=llama_debug has 3",
        f"{path} has model.vocab_size=61, but model=llama_debug has 65",
        f"{path} has model.n_kv_head=2, but model=llama_debug has null",
        f"{path} has model.rope_theta=500000.0, but model=llama_debug has 10000.0",
        f"{path} has model.norm_eps=1e-05, but model=llama_debug has 1e-06",
        f"{path} has model.tie=false, but model=llama_debug has true",
        "use the options of these weights: model.n_layer=2 model.vocab_size=61 model.n_kv_head=2 "
        "model.rope_theta=500000.0 model.norm_eps=1e-05 model.tie=false",
    ]
    longer = refused(folder("gpt2"), replace(GPT, block_size=25, gelu="none"))
    assert longer.endswith("model.block_size=24 model.gelu=tanh")


def test_another_model_is_named_with_the_options_that_make_it(folder: Folders) -> None:
    path = folder("gpt2")
    said = refused(path, LLAMA)
    assert f"{path} holds a GPT-2, but model=llama_debug is not one\n" in said
    assert said.endswith(
        "model=gpt2 model.block_size=24 model.n_layer=2 model.n_head=4 model.n_embd=32 model.vocab_size=61 "
        "model.bias=true model.gelu=tanh"
    )
    assert "holds a LLaMA, but model=nano is not one" in refused(folder("llama"), GPT)


def test_a_window_matters_only_if_sequences_exceed_it(folder: Folders) -> None:
    path = folder("mistral")
    mine = replace(THEIRS["mistral"][0], window=None)
    assert refused(path, mine).endswith("use the options of these weights: model.window=7")
    assert open_weights(path, replace(mine, block_size=7), V)
    assert open_weights(path, replace(mine, block_size=6, window=6), V)


def test_weights_that_are_not_those_of_config_json_are_named(folder: Folders) -> None:
    path = folder("llama")
    file = load_file(path / "model.safetensors")
    del file["model.norm.weight"]
    file["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 30)
    file["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
    save_file(file, path / "model.safetensors")
    assert refused(path, replace(LLAMA, n_layer=5)).splitlines()[2:] == [
        f"{path}: model.layers.1.mlp.up_proj.weight (our blocks.1.mlp.up.weight) has the shape (48, 30) in the "
        "checkpoint, but (48, 32) in model=llama_debug",
        f"{path}: the checkpoint has model.layers.2.mlp.up_proj.weight, but model=llama_debug does not",
        f"{path}: the checkpoint has no model.norm.weight, but model=llama_debug does",
    ]


def test_without_config_json_the_weights_decide(folder: Folders) -> None:
    path = folder("llama")
    (path / "config.json").unlink()
    assert len(open_weights(path, LLAMA, V)) == len(meta_model(LLAMA, V).state_dict())
    wrong = "(our tokens.weight) has the shape (61, 32) in the checkpoint, but (65, 32) in model="
    assert wrong in refused(path, LLAMA, 65)
    assert "but (24, 32)" not in refused(path, replace(LLAMA, n_layer=1))


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gpt2", {"model_type": "mamba"}, "of type mamba; wordrun's own models are gpt2 (GPT-2), llama (LLaMA), q"),
        ("gpt2", {"activation_function": "relu"}, "activation_function=relu, but model=gpt2 supports only activat"),
        ("gpt2", {"n_inner": 100, "layer_norm_epsilon": 1e-6}, "n_inner=100, but model=gpt2 supports only n_inner=128"),
        ("gpt2", {"n_inner": 100, "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06, but model=gpt2 supports"),
        ("llama", {"attention_bias": True}, "attention_bias=True, but model=llama_debug supports only"),
        ("llama", {"head_dim": 16}, "has model.head_size=16, but model=llama_debug has null"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn"}},
            "supports only rope_parameters={'rope_type': 'default'} "
            "or {'rope_type': 'llama3', 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embed",
        ),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "supports only"),
        ("qwen2", {"use_sliding_window": True}, "has use_sliding_window=True, but model=llama_debug supports only u"),
        (
            "gpt2",
            {"model_type": "gemma3_text"},
            "mixtral (Mixtral), mistral (Mistral): for any other, use model=hf model.path=",
        ),
        ("llama", {"hidden_size": None}, "lacks the required key 'hidden_size'"),
    ],
)
def test_models_that_wordrun_does_not_have_are_refused(
    kind: str, change: dict[str, Any], says: str, folder: Folders
) -> None:
    path = folder(kind)
    facts = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    assert says in refused(path, THEIRS[kind][0])


BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": V,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": 128,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 128,
        "n_inner": None,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": V,
        "_num_labels": 1,
        "pruned_heads": {},
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "output_past": True,
        "xla_device": None,
    },
    "llama 2": BASE | {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None, "max_sequence_length": 64},
    "llama 3.1": BASE
    | {
        "model_type": "llama",
        "mlp_bias": False,
        "attention_bias": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "smollm": BASE
    | {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "unsloth_fixed": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "unsloth_version": "2024.9",
    },
    "qwen2.5": BASE
    | {
        "model_type": "qwen2",
        "max_window_layers": 2,
        "sliding_window": 128,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen3": BASE
    | {
        "model_type": "qwen3",
        "head_dim": 24,
        "max_window_layers": 3,
        "sliding_window": None,
        "layer_types": 3 * ["full_attention"],
    },
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
    },
    "mixtral": BASE
    | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
    "mistral": BASE | {"model_type": "mistral", "head_dim": None, "sliding_window": 32},
}
"""The keys of files on the hub, with small sizes."""


def config_of(name: str, change: dict[str, Any], without: str = "") -> TransformerConfig:
    facts = {key: value for key, value in (PUBLISHED[name] | change).items() if key != without}
    return model_config(Path("DIR"), facts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    cfg = config_of(name, {})
    assert (cfg.n_layer, cfg.n_embd, cfg.block_size) == (3, 64, 128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\).*dequantize"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization="),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        (
            {"logits_scaling": 8.0, "embedding_multiplier": 12, "residual_multiplier": 1.0},
            "has logits_scaling=8.0, embedding_multiplier=12, which wordrun does not use",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "supports"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "supports only rope_scaling"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, "supports only rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling="),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"n_shared_experts": 1}, "n_shared_experts=1"),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer_types="),
        ({"no_rope_layers": [0, 1, 1]}, "no_rope_layers="),
        ({"is_causal": False}, "is_causal=false"),
        ({"hidden_act": "relu2"}, "hidden_act=relu2"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map="),
        ({"num_attention_heads": "four"}, "has a value of the wrong type"),
        ({"num_attention_heads": 0}, "has a value of the wrong type"),
    ],
)
def test_a_key_that_is_not_used_is_rejected_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of("llama 2", change)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "gpt2"])
@pytest.mark.parametrize("key", ["num_key_value_heads", "rms_norm_eps", "rope_theta", "sliding_window", "head_dim"])
def test_a_key_that_a_file_lacks_has_the_value_of_transformers(name: str, key: str) -> None:
    """Of all that a file may lack, only these differ between the kinds of models."""
    facts = {each: value for each, value in PUBLISHED[name].items() if each != key}
    heads = {"num_attention_heads": 64, "hidden_size": 4096}
    theirs = transformers.AutoConfig.for_model(**facts | heads)
    ours: Any = model_config(Path("DIR"), facts | heads)
    assert (ours.n_kv_head or 64) == (theirs.num_key_value_heads or 64)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.window == theirs.sliding_window if hasattr(theirs, "sliding_window") else ours.window is None
    assert (ours.head_size or 64) == (getattr(theirs, "head_dim", None) or 64)


def test_damaged_folders_are_named(folder: Folders, tmp_path: Path) -> None:
    path = folder("gpt2")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(path, GPT).startswith(f"{file} is damaged, or is not a weights file: ")
    file.unlink()
    assert refused(path, GPT).startswith(f"{path} has no weights: neither model.safetensors nor pytorch_model.bin")
    (path / "pytorch_model.bin").write_bytes(b"nothing")
    assert "pytorch_model.bin is damaged" in refused(path, GPT)
    their_model("gpt2").save_pretrained(path, max_shard_size="16KB")
    shards = sorted(path.glob("model-*.safetensors"))
    shards[1].unlink()
    assert refused(path, GPT) == f"{path} lacks {shards[1].name}, which model.safetensors.index.json lists"


# Where the folder comes from


def test_a_folder_is_what_it_is(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert fetch(str(tmp_path / "model.safetensors")) == tmp_path


def test_what_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="hf:/no/such/folder is not a folder: name one with config"):
        fetch("/no/such/folder")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # before the first import of the library, or set on it
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"hf:openai/gpt2 is not a folder, and cannot be downloaded .* hf download openai/"
    ):
        fetch("openai/gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs: pip install 'wordrun\[hf\]'"):
        fetch("openai/gpt2")


def test_a_mismatch_is_named_before_the_memory_of_the_model_is_planned(folder: Folders) -> None:
    """And before the data are prepared."""
    words = ["model=mistral_7b", "data=text", "data.path=/no/such/file", "tokenizer=byte", "train.device=cpu"]
    cfg = compose([*words, "tracker=jsonl", f"train.init_from=hf:{folder('llama')}"])
    with pytest.raises(ConfigError, match=r"use the options of these weights: model.n_layer=2 model.n_head=4 "):
        Trainer(cfg)
