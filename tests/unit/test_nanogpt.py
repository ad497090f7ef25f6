"""Checkpoints of nanoGPT are read into model=nano, with the same logits."""

from __future__ import annotations

import math
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

import wordrun
from wordrun import model as models
from wordrun.common.errors import ConfigError, UserError
from wordrun.model.nanogpt import open_weights
from wordrun.model.options import GPTConfig

ARGS: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 11, "dropout": 0.1}


def checkpoint(path: Path, *, bias: bool, prefix: str = "", **more: Any) -> dict[str, Tensor]:
    """Write a checkpoint with random weights, as nanoGPT does, and return them by nanoGPT's names."""
    width, rng = ARGS["n_embd"], torch.Generator().manual_seed(1)
    shapes = {"transformer.wte.weight": (11, width), "transformer.wpe.weight": (6, width)}
    for layer in range(ARGS["n_layer"]):
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes |= {f"transformer.h.{layer}.{name}.weight": (rows, columns)}
            shapes |= {f"transformer.h.{layer}.{name}.bias": (rows,)} if bias else {}
    for norm in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        shapes |= {f"transformer.{norm}.{kind}": (width,) for kind in ("weight", "bias")[: 1 + bias]}
    state = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    content = {"model": {prefix + name: tensor for name, tensor in state.items()}, "model_args": {**ARGS, "bias": bias}}
    torch.save({**content, "iter_num": 7, **more}, path)
    return state


def logits(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of nanoGPT's model, written with torch's functions alone."""

    def layer(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"))

    heads, size = ARGS["n_head"], ARGS["n_embd"] // ARGS["n_head"]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][: len(tokens)]
    for number in range(ARGS["n_layer"]):
        block = f"transformer.h.{number}"
        q, k, v = layer(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(ARGS["n_embd"], dim=-1)
        q, k, v = (each.view(-1, heads, size).transpose(0, 1) for each in (q, k, v))
        scores = (q @ k.mT / math.sqrt(size)).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        x = x + layer((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{block}.attn.c_proj")
        x = x + layer(gelu(layer(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f"), state["lm_head.weight"])


@pytest.mark.parametrize(("bias", "prefix"), [(False, ""), (True, "_orig_mod.")])
def test_logits_are_those_of_nanogpt(tmp_path: Path, bias: bool, prefix: str) -> None:
    state = checkpoint(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    cfg = GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=6, bias=bias, gelu="none")
    model = models.build(cfg, 11, seed=0).eval()
    model.load_state_dict(dict(open_weights(str(tmp_path / "ckpt.pt"), cfg, 11)))
    tokens = torch.tensor([3, 1, 10, 0, 7, 7])
    torch.testing.assert_close(model(tokens[None])[0], logits(state, tokens), atol=1e-5, rtol=1e-5)


class Code:
    """Something that pickle can only read by running code."""


def test_other_options_and_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    checkpoint(path, bias=False)
    words = ["model=nano", "data=sample", "train.device=cpu", "tracker=jsonl", f"train.init_from=nanogpt:{path}"]
    with pytest.raises(ConfigError, match=r"model\.block_size=6 model\.n_layer=2 model\.n_head=2 model\.n_embd=8"):
        wordrun.Trainer(wordrun.compose([*words, "model.block_size=8"]))
    with pytest.raises(ConfigError, match="is not a file: name a checkpoint of nanoGPT"):
        open_weights(str(tmp_path / "none.pt"), GPTConfig())
    checkpoint(path, bias=False, config=Code())
    with pytest.raises(UserError, match="is not a checkpoint of nanoGPT that can be read without running code"):
        open_weights(str(path), GPTConfig())
    torch.save({"model": {}, "model_args": UserDict.fromkeys(ARGS).data}, path)
    with pytest.raises(UserError, match="is not a checkpoint of nanoGPT"):
        open_weights(str(path), GPTConfig())
    torch.save({"model": {}, "model_args": {**ARGS, "bias": True, "activation": "swiglu"}}, path)
    with pytest.raises(ConfigError, match="has activation='swiglu' in model_args"):
        open_weights(str(path), GPTConfig())
