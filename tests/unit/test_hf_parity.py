"""The models beside transformers' own, with the same weights: the same logits, and nothing lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from wordrun import model as models
from wordrun.common.errors import ConfigError, UserError
from wordrun.model import huggingface_files, pretrained
from wordrun.model.construction import materialize, new_model, settled_options
from wordrun.model.huggingface import huggingface_config, match, to_huggingface, to_ours
from wordrun.model.options import GPTConfig, HFConfig, LlamaConfig, MoEConfig, TransformerConfig

V = 61
SHAPES: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 48}
GPT = GPTConfig(**SHAPES, bias=True, gelu="tanh")
LLAMA = LlamaConfig(**SHAPES, n_kv_head=2, n_hidden=96)
MODELS = {
    "gpt2": GPT,
    "gpt without biases": GPTConfig(**SHAPES),
    "llama": LLAMA,
    "llama, one head of keys": replace(LLAMA, n_kv_head=1),
    "llama, as many heads of keys": replace(LLAMA, n_kv_head=None, norm_eps=1e-3),
    "llama 3": replace(LLAMA, rope_theta=500_000.0),
    "qwen3": replace(LLAMA, head_size=24, qk_norm=True, rope_theta=1_000_000.0, norm_eps=1e-6),
    "qwen2.5": replace(LLAMA, qkv_bias=True, rope_theta=1_000_000.0, norm_eps=1e-6),
    "qwen3, tied": replace(LLAMA, qk_norm=True, tie=True),
    "mistral": replace(LLAMA, window=11, n_layer=2),
    # 100 times as many tokens as usual here, so that rotations are stretched, mixed and left alone.
    "llama 3.2": replace(LLAMA, rope_theta=500_000.0, rope_factor=32.0, tie=True, n_layer=1, block_size=4800),
}


def from_huggingface(state: dict[str, torch.Tensor], cfg: TransformerConfig) -> dict[str, torch.Tensor]:
    """Return our model's state dict for the weights of transformers' model."""
    names, problems = match(state, {name: tensor.shape for name, tensor in state.items()}, cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    return {name: to_ours(name, state[theirs], cfg) for name, theirs in names.items()}


def random_model(cfg: TransformerConfig) -> models.Transformer:
    """Return a model all of whose weights, those of the norms included, are far from their first values."""
    model = models.build(cfg, V, seed=3)
    stream = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(std=0.15, generator=stream))
    return model.eval()


def their_model(cfg: TransformerConfig, state: dict[str, torch.Tensor]) -> Any:
    """Return transformers' model with the weights ``state``."""
    options = huggingface_config(cfg, V)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**options))
    assert [type(theirs).__name__] == options["architectures"]
    theirs.load_state_dict(state)
    return theirs.eval()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_logits_are_those_of_transformers(cfg: TransformerConfig) -> None:
    ours = random_model(cfg)
    theirs = their_model(cfg, to_huggingface(ours.state_dict(), cfg))
    tokens = torch.randint(V, (1, cfg.block_size), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5  # or any two models would agree
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_weights_come_back_as_they_went(cfg: TransformerConfig) -> None:
    state = random_model(cfg).state_dict()
    there = to_huggingface(state, cfg)
    assert same(from_huggingface(there, cfg), dict(state))
    assert all(tensor.is_contiguous() for tensor in there.values())  # or safetensors refuses them
    theirs = dict(their_model(cfg, there).state_dict())
    assert same(to_huggingface(from_huggingface(theirs, cfg), cfg), theirs)


@pytest.mark.parametrize("cfg", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_parts_of_a_pipeline_make_the_whole_file(cfg: TransformerConfig) -> None:
    whole = random_model(cfg).state_dict()
    parts = [models.meta_model(cfg, V, layers).state_dict() for layers in (range(1), range(1, 3))]
    together = [to_huggingface({name: whole[name] for name in part}, cfg) for part in parts]
    assert same(together[0] | together[1], to_huggingface(whole, cfg))


def test_a_tied_llama_needs_no_output_layer() -> None:
    tied = replace(LLAMA, tie=True)
    state = random_model(tied).state_dict()
    file = to_huggingface(state, tied)
    del file["lm_head.weight"]
    assert same(from_huggingface(file, tied), dict(state))


@pytest.mark.parametrize(
    ("written", "read", "says"),
    [
        (LLAMA, replace(LLAMA, n_layer=2), "has model.layers.2.mlp.up_proj.weight, but model=llama_debug does not"),
        (replace(LLAMA, n_layer=2), LLAMA, "has no model.layers.2.mlp.up_proj.weight, but model=llama_debug does"),
        (LLAMA, replace(LLAMA, n_kv_head=4), "(32, 64) in the checkpoint, but (64, 64) in model=llama_debug"),
        (LLAMA, replace(LLAMA, tie=True), "lm_head.weight is not tied to the embedding"),
        (GPT, replace(GPT, bias=False), "has transformer.h.0.mlp.c_fc.bias, but model=nano does not"),
        (GPT, LLAMA, "has no model.embed_tokens.weight"),
    ],
)
def test_weights_of_another_model_are_refused(written: TransformerConfig, read: TransformerConfig, says: str) -> None:
    file = to_huggingface(random_model(written).state_dict(), written)
    with pytest.raises(ConfigError) as caught:
        from_huggingface(file, read)
    assert says in str(caught.value)


EXPERTS = MoEConfig(**SHAPES, n_kv_head=2, qk_norm=True, n_hidden=24, n_experts=6, n_active=2, norm_eps=1e-6)
MIXTRAL = replace(EXPERTS, qk_norm=False)
MIXTURES = {
    "Qwen3Moe": EXPERTS,
    "Qwen3Moe, options": replace(EXPERTS, head_size=24, normalize_weights=False),
    "Mixtral": MIXTRAL,
    "Mixtral, options": replace(MIXTRAL, window=11, n_active=3),
}


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_experts_in_files_of_transformers(name: str, stacked: bool, tmp_path: Path) -> None:
    """Its files have the matrices separately or stacked, and its model stacked, so files are compared."""
    torch.manual_seed(0)
    cfg = MIXTURES[name]
    options = transformers.AutoConfig.for_model(**huggingface_config(cfg, V))
    theirs = transformers.AutoModelForCausalLM.from_config(options).eval()
    assert type(theirs).__name__ == f"{name.partition(',')[0]}ForCausalLM"
    for p in theirs.parameters():
        p.add_(torch.empty_like(p).normal_(std=0.15))
    theirs.save_pretrained(tmp_path / "theirs", **({"save_original_format": False} if stacked else {}))
    ours = models.build(cfg, V).eval()
    weights = pretrained.open_weights(tmp_path / "theirs", cfg, V)
    described = pretrained.model_config(tmp_path, huggingface_files.read_config(tmp_path / "theirs"))
    assert replace(described, name=cfg.name, vocab_size=None) == cfg
    assert ours.load_state_dict(dict(weights), strict=False).unexpected_keys == []
    tokens = torch.randint(V, (2, cfg.block_size), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/config.json").write_text(json.dumps(huggingface_config(cfg, V)))
    save_file(to_huggingface(ours.state_dict(), cfg), tmp_path / "ours/model.safetensors", {"format": "pt"})
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    assert again.eval()(tokens).logits.equal(expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "supports only rope_scaling={'rope_type': 'default'}"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu, but model=mixtral_8x7b supports only hidden_act=silu"),
        ({"num_local_experts": None}, "lacks the required key 'num_"),
        ({"sliding_window": 11}, "has model.window=11, but model=moe_debug has null"),
    ],
)
def test_mixtrals_that_wordrun_does_not_have_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    facts = huggingface_config(MIXTRAL, V) | change
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    save_file(to_huggingface(models.build(MIXTRAL, V).state_dict(), MIXTRAL), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        pretrained.open_weights(tmp_path, MIXTRAL, V)
    assert says in str(caught.value)


def test_what_transformers_mixtures_lack_is_not_exported() -> None:
    model = models.build(EXPERTS, V)
    model.routers[0].bias[1] = 0.001
    with pytest.raises(UserError, match=r"no router biases.* train with model\.balance_rate=0"):
        to_huggingface(model.state_dict(), EXPERTS)
    with pytest.raises(
        UserError, match=r"only a model with model\.n_shared=0 model\.window=null can be exported as Qwen3-MoE"
    ):
        huggingface_config(replace(EXPERTS, n_shared=1, window=11), V)
    with pytest.raises(UserError, match=r"only a model with model\.normalize_weights=true can be exported as Mixtral"):
        huggingface_config(replace(MIXTRAL, normalize_weights=False), V)


# model=hf: what cannot be trained, in one message with its remedy; tests/dist/test_hf.py trains what can be.

TINY = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BAD = {
    "a name without a network": (None, {}, "hf download who/what --local-dir DIR; then use model.path=DIR"),
    "no config.json": ({}, {}, r"config.json cannot be read"),
    "a sequence-to-sequence model": ({"model_type": "t5"}, {}, "maps one sequence to another"),
    "a vision-language model": (
        {"model_type": "llava", "vision_config": {"hidden_size": 768}},
        {},
        "not for text alone",
    ),
    "no causal language model": ({"model_type": "vit"}, {}, "is not a causal language model of transformers"),
    "an unknown type": ({"model_type": "what"}, {}, "knows no model_type=what: install a newer version"),
    "quantized weights": (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        {},
        r"use the original model, or write one with model.dequantize\(\).save_pretrained",
    ),
    "code": (
        {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "mine.Net"}},
        {},
        r"Python code \(mine.Net\).*model.trust_remote_code=true runs it, or \+model.config.auto_map=null",
    ),
    "too few tokens": ({"model_type": "llama", **TINY}, {"vocab_size": 99}, r"\+model.config.vocab_size=99"),
    "too few positions": (
        {"model_type": "llama", **TINY, "max_position_embeddings": 8},
        {},
        "use model.block_size=8",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_trained_is_one_message(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, options, message = BAD[what]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if facts:
        (tmp_path / "config.json").write_text(json.dumps(facts))
    path = "who/what" if facts is None else str(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        new_model(settled_options(HFConfig(path=path, block_size=16)), vocab_size=options.get("vocab_size", V))
    assert "\n" not in str(error.value)


def test_a_model_from_its_config_is_initialized_by_the_librarys_rules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    cfg = settled_options(HFConfig(path=str(tmp_path), config={"num_hidden_layers": 2, "initializer_range": 0.5}))
    model = new_model(cfg, vocab_size=V)
    assert model.own_weights() is None
    assert [*model.named_blocks()] == ["net.model.layers.0", "net.model.layers.1"]
    assert len(model.matrices()) == 14
    assert all(name.startswith("net.model.layers.") for name in model.matrices())
    made, again = (materialize(new_model(cfg, vocab_size=V), 7, "cpu") for _ in range(2))
    for (name, p), q in zip(made.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p.detach().std() == pytest.approx(0.5 if p.dim() == 2 else 0, rel=0.2), name
    first, second = (made.get_parameter(f"net.model.layers.{n}.mlp.up_proj.weight") for n in (0, 1))
    assert not torch.equal(first, second)


def test_a_frequency_table_is_not_lost_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    cfg = settled_options(HFConfig(path=str(tmp_path)))
    made, loaded = materialize(new_model(cfg, vocab_size=V), 7, "cpu"), new_model(cfg, vocab_size=V)
    loaded.load_state_dict(made.state_dict(), assign=True)
    loaded.fill_buffers(torch.device("cpu"))
    tokens = torch.arange(16)[None]
    assert torch.equal(loaded.eval()(tokens), made.eval()(tokens))
