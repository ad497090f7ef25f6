"""``model=hf``: transformers' causal language models, with tiny random configs, beside a plain loop in one process."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from wordrun.config.compose import compose

pytestmark = pytest.mark.timeout(1800)
V, T, STEPS = 61, 16, 10
SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {**LLAMA, "tie_word_embeddings": True, "attention_bias": True}),
    "gpt2": ("gpt2", {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "sliding_window": 5, "output_router_logits": True}),
}
LAYOUTS = {
    "DDP": ["train.backend=DDP", "train.activation_checkpointing=selective"],
    "FSDP": ["train.backend=FSDP", "train.activation_checkpointing=full"],
}
ROPE = {"rope_theta": 1e4}
SHORT = {"original_max_position_embeddings": 8, "factor": 4.0, **ROPE}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}
YARN = {"rope_type": "yarn", **SHORT}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**LLAMA, **EXPERTS, **MLA, "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3 scaling": (
        "llama",
        {**LLAMA, "rope_parameters": {**LLAMA3, **ROPE, "original_max_position_embeddings": 8}},
    ),
    "llama, linear scaling": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
    "llama, dynamic scaling": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5, "head_dim": 12}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2 moe": ("qwen2_moe", {**LLAMA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3, yarn": ("qwen3", {**LLAMA, "head_dim": 12, "rope_parameters": YARN}),
    "qwen3 moe": ("qwen3_moe", {**LLAMA, **EXPERTS, "num_experts": 4, "head_dim": 8}),
    "qwen3 next": (
        "qwen3_next",
        {
            **LLAMA,
            **EXPERTS,
            **GATED,
            "num_experts": 4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 24,
        },
    ),
    "gemma": ("gemma", {**LLAMA, "head_dim": 12}),
    "gemma 2": ("gemma2", {**LLAMA, **KINDS, "head_dim": 12}),
    "gemma 3": ("gemma3_text", {**LLAMA, **KINDS, "head_dim": 12}),
    "phi 3": ("phi3", {**LLAMA, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "gpt neox": ("gpt_neox", {**SIZES, "intermediate_size": 48, "max_position_embeddings": 32, "rotary_pct": 0.5}),
    "olmo 2": ("olmo2", LLAMA),
    "olmo 3": ("olmo3", {**LLAMA, **KINDS}),
    "smollm 3": ("smollm3", {**LLAMA, "pad_token_id": 0}),
    "granite": ("granite", {**LLAMA, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "deepseek v2": ("deepseek_v2", {**DEEPSEEK, "topk_method": "greedy", "n_shared_experts": 1}),
    "deepseek v3": ("deepseek_v3", {**DEEPSEEK, "n_group": 2, "topk_group": 1}),
    "stablelm": ("stablelm", {**LLAMA, "partial_rotary_factor": 0.5}),
    "falcon": ("falcon", {**SIZES, "multi_query": True, "max_position_embeddings": 32}),
    "bloom": ("bloom", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("opt", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32}),
    "mamba": ("mamba", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "mamba 2": (
        "mamba2",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "head_dim": 8,
            "num_heads": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "jamba": (
        "jamba",
        {**LLAMA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    ),
}
"""Run besides, with WORDRUN_TEST_FAMILIES=all, as by bin/test --all."""
if os.environ.get("WORDRUN_TEST_FAMILIES") == "all":
    FAMILIES |= ALL
SCRIPT = """
import json, pickle, sys
from functools import partial
from pathlib import Path
import torch
from wordrun import backend, dist
from wordrun.backend.step_timer import StepTimer
from wordrun.config.registry import part_of
from wordrun.config.rules import check
from wordrun.data.batch import Batch
from wordrun.dist.collectives import all_mean
from wordrun.model.construction import new_model

torch.set_num_threads(1)
tokens = torch.load("tokens.pt")
with dist.session(device="cpu") as world:
    for name, (cfg, start) in pickle.loads(Path(sys.argv[1]).read_bytes()).items():
        layout, losses = check(cfg, world.size), []
        optimizer = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
        make = partial(new_model, cfg.model, vocab_size=tokens.max() + 1)
        weights = None if start else make().own_weights()
        made = backend.build(backend.BackendSpec(cfg, world, layout, make, optimizer, weights))
        if start:
            made.load(Path(start), json.loads(Path(start, "facts.json").read_text()))
        first = made.logits(tokens[0][:, :-1])
        for step in range(5 if start else 0, len(tokens)):
            mine = tokens[step].chunk(layout.dp)[layout.dp_index(world.rank)]
            loss = made.train_step([Batch(mine[:, :-1], mine[:, 1:])], 1e-2, StepTimer(made.device)).loss
            losses.append(all_mean(loss[None]).item())
            if step == 4 and not start:
                save, folder = made.begin_save({}), Path(f"saved-{name}")
                folder.mkdir(exist_ok=True)
                torch.distributed.barrier()
                save.write(folder)
                torch.distributed.barrier()
                if world.rank == 0:
                    save.finish(folder)
                    (folder / "facts.json").write_text(json.dumps(save.facts))
        last = made.logits(tokens[0][:, :-1])
        if world.rank == 0:
            torch.save((first, last), f"logits-{name}.pt")
            print(json.dumps({name: losses}), flush=True)
            if start:
                made.parts[0].write_huggingface(Path(f"out-{name}"), 10**9)
        made.close()
"""


def tiny(family: str) -> Path:
    """Write a folder with a random model of the ``family``, every weight of which matters, and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, facts = FAMILIES[family]
    config = AutoConfig.for_model(kind, **facts)
    stream = torch.Generator().manual_seed(3)
    net = AutoModelForCausalLM.from_config(config)
    for _, p in sorted(net.named_parameters()):
        p.data += 0.1 * torch.randn(p.shape, generator=stream)
    folder = Path(f"model-{family}".replace(",", "").replace(" ", "-"))
    net.save_pretrained(folder)
    return folder.resolve()


def plain(folder: Path, tokens: Any, optimizer: Any) -> tuple[list[float], Any]:
    """Return the losses of a plain loop, and the logits that it begins with.

    Raises:
        AssertionError: the steps do not change the losses.
    """
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    stepped = torch.optim.AdamW(net.parameters(), 1e-2, (optimizer.beta1, optimizer.beta2), weight_decay=0)
    with torch.no_grad():
        first = net(tokens[0][:, :-1]).logits[:, -1]
        before = [F.cross_entropy(net(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()).item() for x in tokens]
    for batch in tokens:
        made = net(batch[:, :-1])
        loss = F.cross_entropy(made.logits.flatten(0, 1), batch[:, 1:].flatten())
        if getattr(made, "aux_loss", None) is not None:
            loss = loss + net.router_aux_loss_coef * made.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepped.step()
        stepped.zero_grad()
        losses.append(loss.item())
    assert max(abs(after / untrained - 1) for after, untrained in zip(losses, before, strict=True)) > 5e-3
    return losses, first


def config_of(folder: Path, *words: str) -> Any:
    from dataclasses import replace

    from wordrun.model.construction import settled_options

    cfg = compose(
        [
            *("model=hf", f"model.path={folder}", "tokenizer=byte", "data=sample", "tracker=jsonl", "train.dtype=fp32"),
            *("train.device=cpu", f"model.block_size={T}", "optimizer.weight_decay=0", "optimizer.grad_clip=1.0"),
            *words,
        ]
    )
    return replace(cfg, model=settled_options(cfg.model))


def ran(ranks: Any, n: int, runs: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of each of ``runs`` on ``n`` ranks."""
    Path("script.py").write_text(SCRIPT)
    Path(f"runs-{n}").write_bytes(pickle.dumps(runs))
    done = ranks(n, "script.py", f"runs-{n}", under="fork", timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def test_families_train_load_resume_and_export_like_a_plain_loop(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    tokens = torch.randint(V, (STEPS, 4, T + 1), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, "tokens.pt")
    two, one, expected = {}, {}, {}
    for family in FAMILIES:
        folder = tiny(family)
        for backend, words in LAYOUTS.items():
            two[f"{folder.name}-{backend}"] = config_of(folder, *words, "model.batch_size=2"), None
        alone = config_of(folder, "model.batch_size=4")
        one[folder.name] = alone, f"saved-{folder.name}-FSDP"
        expected[folder.name] = plain(folder, tokens, alone.optimizer)
    found, resumed = ran(ranks, 2, two), ran(ranks, 1, one)
    for name, (losses, first) in expected.items():
        for backend in LAYOUTS:
            assert found[f"{name}-{backend}"] == pytest.approx(losses, rel=1e-5), (name, backend)
            torch.testing.assert_close(torch.load(f"logits-{name}-{backend}.pt")[0], first, rtol=1e-4, atol=1e-5)
        assert resumed[name] == pytest.approx(losses[5:], rel=1e-5), name
        net = AutoModelForCausalLM.from_pretrained(f"out-{name}", dtype=torch.float32).eval()
        with torch.no_grad():
            again = net(tokens[0][:, :-1]).logits[:, -1]
        torch.testing.assert_close(again, torch.load(f"logits-{name}.pt")[1], rtol=1e-4, atol=1e-5)
