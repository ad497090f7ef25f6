"""muP: nothing changes at the base width, and elsewhere each scale is that of table 8 of Yang et al. 2022."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import wordrun
from wordrun import model as models
from wordrun.backend.base import BackendSpec
from wordrun.backend.param_groups import NamedParameters, set_learning_rate
from wordrun.checkpoint.load import find
from wordrun.commands.export import main
from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part, part_of, parts
from wordrun.config.rules import check
from wordrun.data.tokenizers.char import CharTokenizer
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model import mup
from wordrun.model.attention import causal_attention
from wordrun.model.options import GPTConfig, LlamaConfig, ModernConfig, TransformerConfig
from wordrun.study.fits import power_law
from wordrun.train.optim.options import OptimizerConfig

V = 31
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 2, "block_size": 16}
MODELS = {
    "gpt": GPTConfig(**SHAPE, n_embd=32, bias=True),
    "llama": LlamaConfig(**SHAPE, n_embd=32, n_hidden=96, qk_norm=True),
    "modern": ModernConfig(**SHAPE, n_embd=32, mlp="relu2", embed_norm=True, zero_init=False),
}
OPTIMIZERS = {
    "adamw": ["optimizer=adamw"],
    "lion": ["optimizer=lion"],
    "sgd": ["optimizer=sgd"],
    "muon": ["optimizer=muon"],
    "muon-spectral": ["optimizer=muon", "optimizer.scale=spectral"],
}


composed = functools.cache(lambda *words: wordrun.compose(words))


def made(cfg: TransformerConfig, words: list[str]) -> tuple[models.Transformer, torch.optim.Optimizer]:
    """Return the model and the optimizer as a backend makes it."""
    model, whole = models.build(cfg, V, seed=1), replace(composed(*words), model=cfg)
    make = lambda p: part_of("optimizer", whole.optimizer).build(whole.optimizer, p)  # noqa: E731
    spec = BackendSpec(whole, World(), Layout(), None, make)  # type: ignore[arg-type]
    return model, spec.optimizer(NamedParameters(model.named_parameters(), model.matrices()))


def trained(cfg: TransformerConfig, words: list[str], steps: int = 3) -> list[torch.Tensor]:
    """Return the logits after a few steps and the weights."""
    model, optimizer = made(cfg, words)
    tokens = torch.randint(V, (4, 17), generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [model(tokens[:, :-1]), *model.parameters()]


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("words", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_changes_at_the_base_width(cfg: TransformerConfig, words: list[str]) -> None:
    plain, scaled = trained(cfg, words), trained(replace(cfg, mup=True, mup_base_width=32), words)
    assert all(a.equal(b) for a, b in zip(plain, scaled, strict=True))
    wide = trained(replace(cfg, mup=True, mup_base_width=16), words)
    assert not wide[0].equal(plain[0])


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_hidden_matrices_start_smaller_and_others_do_not(cfg: TransformerConfig) -> None:
    plain = models.build(cfg, V, seed=1).state_dict()
    wide = models.build(replace(cfg, mup=True, mup_base_width=8), V, seed=1).state_dict()
    for name, weight in plain.items():
        factor = 0.5 if name.startswith("blocks.") and weight.dim() == 2 else 1.0
        torch.testing.assert_close(wide[name], weight * factor)


RATES = {  # of hidden matrices, and of all others, at 4 times the base width
    "adamw": (1 / 4, 1.0),
    "lion": (1 / 4, 1.0),
    "sgd": (1.0, 4.0),
    "muon": (1 / 2, 1.0),
    "muon-spectral": (1.0, 1.0),
}


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_parameter_has_its_rate_and_the_same_decay(cfg: TransformerConfig, name: str) -> None:
    plain, wide = made(cfg, OPTIMIZERS[name]), made(replace(cfg, mup=True, mup_base_width=8), OPTIMIZERS[name])

    def by_name(pair: tuple[models.Transformer, torch.optim.Optimizer]) -> dict[str, tuple[float, float]]:
        groups = {id(p): group for group in pair[1].param_groups for p in group["params"]}
        found = {n: groups[id(p)] for n, p in pair[0].named_parameters()}
        return {n: (group["lr_ratio"], group["lr"] * group["weight_decay"]) for n, group in found.items()}

    before, after = by_name(plain), by_name(wide)
    hidden = plain[0].matrices()
    for parameter, (ratio, decay) in before.items():
        wanted = ratio * RATES[name][0 if parameter in hidden else 1]
        assert after[parameter] == pytest.approx((wanted, decay)), parameter


def test_attention_is_scaled_by_the_inverse_of_the_head_size() -> None:
    cfg = GPTConfig(n_head=2, n_embd=64, mup=True, mup_base_width=16)
    assert mup.attention_scale(cfg) == pytest.approx(math.sqrt(8) / 32)  # 1 / sqrt(8) at the base
    assert mup.attention_scale(replace(cfg, mup_base_head_size=32)) is None  # more heads rather than larger ones
    assert mup.attention_scale(LlamaConfig(head_size=24, n_embd=256, mup=True)) is None
    assert mup.attention_scale(ModernConfig(depth=8, mup=True)) is None  # heads of 128 at every depth
    assert mup.attention_scale(ModernConfig(n_embd=256, mup=True)) == pytest.approx(math.sqrt(32) / 64)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    scores = (0.2 * q @ k.mT).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    whole = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(causal_attention(q, k, v, 0.0, scale=0.2), whole)
    torch.testing.assert_close(causal_attention(q, k, v, 1e-9, scale=0.2), whole)
    first = causal_attention(q, k, v, 0.0, (30, 10), scale=0.2)
    torch.testing.assert_close(first[:, :, :30], whole[:, :, :30])


def test_the_depth_dial_keeps_the_rates_of_the_base_width() -> None:
    deep = {mup: wordrun.compose(["model=modern", "model.depth=24", f"model.mup={mup}"]) for mup in ("true", "false")}
    muon = {
        mup: wordrun.compose(["model=modern", "model.depth=24", f"model.mup={mup}", "optimizer=muon"]) for mup in deep
    }
    ratio = muon["false"].model.n_embd / 128  # type: ignore[attr-defined]
    scaled = muon["true"].optimizer.learning_rate * ratio**-0.5
    assert scaled == pytest.approx(muon["false"].optimizer.learning_rate)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.mup_base_width=64"],
            "model.mup_base_width=64 has no effect without model.mup=true: set that, or omit this",
        ),
        (["model.mup=true", "model.mup_base_width=0"], "model.mup_base_width=0 should be at least 1"),
        (
            ["model.mup=true", "model.lora_rank=4", "train.init_from=run"],
            "export the model, and fine-tune the result with model.mup=false",
        ),
    ],
)
def test_wrong_options_are_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(wordrun.compose(words))


def test_an_optimizer_without_known_rates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(wordrun.compose(["model.mup=true", "model.n_embd=256"]), optimizer=OptimizerConfig("mine"))
    monkeypatch.setitem(parts("optimizer"), "mine", Part(OptimizerConfig, torch.optim.SGD, "optimizer", "mine"))
    with pytest.raises(ConfigError, match="which optimizer=mine does not state: add the method width_powers"):
        check(cfg)
    check(replace(cfg, model=replace(cfg.model, n_embd=128)))


TEXT = "The quick brown fox jumps over the lazy dog.\n"
EXPORTED = {
    "gpt": ["model.bias=true"],
    "llama": ["model=llama_debug", "model.n_kv_head=1"],
    "qwen3": ["model=llama_debug", "model.qk_norm=true", "model.tie=true"],
}
SaveRun = Callable[..., models.Transformer]


@pytest.mark.parametrize("words", EXPORTED.values(), ids=EXPORTED)
def test_transformers_and_plain_models_compute_the_same(words: list[str], save_run: SaveRun) -> None:
    ours = save_run(Path("run"), *words, "model.mup=true", "model.mup_base_width=4", text=TEXT)
    assert main(["run=run", "out=folder"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("folder").eval()
    tokens = torch.from_numpy(CharTokenizer(TEXT).encode(TEXT))[None, : ours.cfg.block_size]
    with torch.no_grad():
        expected = ours(tokens)
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        plain = replace(ours.cfg, mup=False, mup_base_width=None)
        model = models.build(plain, ours.vocab_size)
        weights = mup.suited(find(Path("run")).weights(), ours.cfg, plain)
        model.load_state_dict(dict(weights), strict=False)
        torch.testing.assert_close(model.eval()(tokens), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"computes different logits than model\.mup=true here"):
        mup.suited({}, plain, ours.cfg)


def test_what_cannot_be_folded_is_refused(save_run: SaveRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=modern", "model.norm_weights=false"]
    save_run(Path("run"), *words, "model.mup=true", "model.mup_base_width=4", text=TEXT)
    assert main(["run=run", "out=folder"]) == 1
    assert "other forms need model.norm_weights=true" in capsys.readouterr().err


def test_weights_of_another_parametrization_are_refused(small: Callable[..., list[str]], save_run: SaveRun) -> None:
    save_run(Path("plain"), text=TEXT)
    words = small("model.mup=true", "model.mup_base_width=4", "hydra.run.dir=new", "train.init_from=plain")
    with pytest.raises(ConfigError, match=r"the weights are of a model with model\.mup=false"):
        wordrun.Trainer(wordrun.compose(words))


@pytest.mark.parametrize(
    ("model", "optimizer", "rate"),
    [("gpt", "adamw", 2e-3), ("llama", "lion", 5e-4), ("gpt", "sgd", 0.5), ("modern", "muon", 2e-3)],
)
def test_what_is_learned_does_not_depend_on_the_width(model: str, optimizer: str, rate: float) -> None:
    widths, tokens = (32, 64, 128), torch.randint(V, (8, 17), generator=torch.Generator().manual_seed(5))

    def change(width: int, scaled: bool) -> float:
        """Return the mean absolute change of the logits in four steps."""
        cfg = replace(MODELS[model], n_embd=width, mup=scaled, mup_base_width=32 if scaled else None)
        cfg = cfg if model == "gpt" else replace(cfg, n_hidden=3 * width)
        ours, stepper = made(cfg, OPTIMIZERS[optimizer])
        before = ours(tokens[:, :-1]).detach()
        for _ in range(4):
            F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            set_learning_rate(stepper, rate)
            stepper.step()
            stepper.zero_grad()
        return float((ours(tokens[:, :-1]) - before).abs().mean().detach())

    scaled, plain = (power_law(widths, [change(w, m) for w in widths]).exponent for m in (True, False))
    assert abs(scaled) < 0.2
    assert plain > 0.4
