"""Studies of widths and sizes: the fits find what synthetic data contain, and a small study runs for real."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun.commands.study import main
from wordrun.common.errors import ConfigError
from wordrun.study import coord, isoflop
from wordrun.study.fits import minimum, power_law
from wordrun.study.points import DONE, IMPOSSIBLE
from wordrun.track import metrics_jsonl

SIZES = [1e4, 2e4, 4e4, 8e4, 1.6e5]


def losses(best: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    """Return the losses of SIZES around a known minimum of 2."""
    scatter = np.random.default_rng(seed).normal(0, noise, len(SIZES)) if noise else np.zeros(len(SIZES))
    return [2 + 0.05 * math.log(n / best) ** 2 + e for n, e in zip(SIZES, scatter, strict=True)]


@pytest.mark.parametrize("best", [2.3e4, 5e4, 1.3e5])
def test_an_exact_parabola_has_its_minimum(best: float) -> None:
    found = minimum(SIZES, losses(best))
    assert found is not None
    assert (found.x, found.y, found.inside) == (pytest.approx(best), pytest.approx(2), True)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.at(7e4) == pytest.approx(2 + 0.05 * math.log(7e4 / best) ** 2)


def test_the_error_of_a_minimum_is_that_of_repeated_studies() -> None:
    found = [minimum(SIZES, losses(4e4, noise=0.004, seed=seed)) for seed in range(400)]
    logs, errors = zip(*((math.log(each.x), each.error) for each in found if each), strict=True)
    assert len(logs) == 400
    assert np.mean(logs) == pytest.approx(math.log(4e4), abs=0.01)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(logs), rel=0.15)


def test_a_minimum_that_the_sizes_do_not_contain_is_marked() -> None:
    assert minimum(SIZES[:2], [2.0, 2.1]) is None
    assert minimum(SIZES, [-y for y in losses(4e4)]) is None
    found = minimum(SIZES, losses(1e6))
    assert found is not None
    assert not found.inside
    three = minimum(SIZES[:3], losses(2e4)[:3])
    assert three is not None
    assert three.error is None, "a parabola goes through three points exactly"


def test_a_power_law_is_found_with_its_error() -> None:
    flops = [1e17, 3e17, 1e18, 3e18, 1e19]
    exact = power_law(flops, [0.3 * c**0.49 for c in flops])
    assert (exact.factor, exact.exponent) == (pytest.approx(0.3), pytest.approx(0.49))
    assert exact.at(1e20) == pytest.approx(0.3 * 1e20**0.49)
    draw = np.random.default_rng(1)
    many = [power_law(flops, [c**0.5 * math.exp(draw.normal(0, 0.1)) for c in flops], [0.1] * 5) for _ in range(300)]
    spread = float(np.std([law.exponent for law in many]))
    assert np.median([law.error or 0.0 for law in many]) == pytest.approx(spread, rel=0.15)
    assert power_law(flops[:2], [1.0, 2.0]).error is None
    # A point with a large error hardly counts.
    off = power_law(flops, [c**0.5 * (100 if c == 1e19 else 1) for c in flops], [0.01] * 4 + [100])
    assert off.exponent == pytest.approx(0.5, abs=0.01)


def isoflop_rows(noise: float = 0.0) -> list[dict[str, str]]:
    """Return the rows of a study whose best sizes are C^0.5 / 8."""
    rows = []
    for i, flops in enumerate((1e10, 1e11, 1e12)):
        for n, loss in zip(SIZES, losses(flops**0.5 / 8, noise, i), strict=True):
            cells = {"n": n, "tokens": flops / (6 * n), "val_loss": loss, "budget": flops}
            rows.append({"state": DONE, **{name: f"{value:.9g}" for name, value in cells.items()}})
    return rows


def test_an_isoflop_study_finds_the_law_in_its_points(tmp_path: Path) -> None:
    found = isoflop.budgets(isoflop_rows())
    assert [each.best.x for each in found if each.best] == pytest.approx(
        [flops**0.5 / 8 for flops in (1e10, 1e11, 1e12)]
    )
    laws = isoflop.fitted(found)
    assert laws["n"].exponent == pytest.approx(0.5)
    assert laws["tokens"].exponent == pytest.approx(0.5)
    assert found[1].tokens == pytest.approx(1e11 / (6 * 1e11**0.5 / 8))
    noisy = isoflop.fitted(isoflop.budgets(isoflop_rows(0.005)))["n"]
    assert noisy.error is not None
    assert abs(noisy.exponent - 0.5) < 3 * noisy.error < 0.3
    # Without the largest sizes, the minimum of the largest budget is a guess.
    few = [row for row in isoflop_rows() if row["budget"] != "1e+12" or float(row["n"]) < 5e4]
    assert [bool(each.best and each.best.inside) for each in isoflop.budgets(few)] == [True, True, False]


def coord_rows(powers: dict[str, dict[str, float]]) -> list[dict[str, str]]:
    """Return the rows of a coordinate check in which the layers grow with these powers of the width."""
    return [
        {"parametrization": kind, "width": str(width), **{name: str(width**power) for name, power in each.items()}}
        for kind, each in powers.items()
        for width in (64, 256, 1024)
    ]


def test_the_verdict_of_a_coordinate_check() -> None:
    flat = {"activation/a": 0.0, "activation/logits": -0.5, "change/a": 0.1, "change/logits": -0.1}
    rows = coord_rows({"standard": flat | {"change/logits": 0.5}, "mup": flat})
    slopes = coord.slopes_of(rows, ["a", "logits"])
    assert slopes["mup"]["activation"]["logits"] == pytest.approx(-0.5)
    assert coord.verdict(slopes["mup"]).startswith("flat (")
    wrong = "not flat (the change of logits has the power +0.50)"
    assert coord.verdict(slopes["standard"]) == wrong
    growing = coord.slopes_of(coord_rows({"mup": flat | {"activation/a": 0.3}}), ["a", "logits"])
    assert coord.verdict(growing["mup"]) == "not flat (the activation of a has the power +0.30)"


def test_sizes_may_have_several_options() -> None:
    assert isoflop._sizes("model.depth=2,4") == [["model.depth=2"], ["model.depth=4"]]
    both = isoflop._sizes("model.n_embd=64:model.n_head=2,model.n_embd=128:model.n_head=4")
    assert both == [["model.n_embd=64", "model.n_head=2"], ["model.n_embd=128", "model.n_head=4"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["isoflop", "--budgets", "1e9", "--sizes", "model.n_embd=8", "train.max_iters=9"], r"sets this itself"),
        (["isoflop", "--budgets", "1e9", "--sizes", "width=4", "model=resnet18", "data=digits"], "transformers, whose"),
        (["coord", "--widths", "64"], "two or more whole numbers"),
        (["coord", "model.n_embd=64"], "model.n_embd=64: the study sets this itself"),
        (["coord", "tracker=wandb", "train.compile=False"], "tracker=wandb: the study sets this itself"),
        (["coord", "model=resnet18", "data=digits"], "transformers, whose layers are measured"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str, capsys: Any, tmp_path: Path) -> None:
    assert main([*words, "--out", str(tmp_path / "out")]) == ConfigError.exit_status
    assert says in capsys.readouterr().err


def test_a_study_of_sizes_runs_and_continues(small: Any, tmp_path: Path, capsys: Any) -> None:
    words = [each for each in small() if not each.startswith(("train.max_iters", "tracker", "train.sample"))]
    study = ["isoflop", "--budgets", "1e6,6e6", "--sizes", "model.n_embd=8", "--out", str(tmp_path), *words]
    assert main(study) == 0
    with (tmp_path / "points.csv").open() as file:
        small_one, done = csv.DictReader(file)
    assert (small_one["state"], done["state"]) == (IMPOSSIBLE, DONE)
    assert "1e+06 FLOPs are" in small_one["reason"]
    assert float(done["flops"]) == pytest.approx(6e6, rel=0.02)
    # 12 C^2 weights of the block, C x 30 characters of the output layer, and the attention of 8 tokens.
    assert (int(done["n"]), int(done["flops_per_token"])) == (768 + 8 * 30, 6 * (768 + 8 * 30) + 12 * 8 * 8)
    assert 1 < float(done["val_loss"]) < 4
    assert "too few sizes" in (tmp_path / "report.md").read_text()
    assert main(study) == 0, "finished points are not run again"
    assert "0 points, 0 at a time; not run: 1 impossible, 1 finished" in capsys.readouterr().out


def test_models_of_every_width_are_alike() -> None:
    args = coord._parse(["--out", "x", "--widths", "64,128", "--transfer", "1e-3", "model=llama_debug"])
    points = {point.name: point for point in coord._points(args, wordrun.compose(args.overrides))}
    assert list(points) == [f"{k}-{w}{x}" for w in (64, 128) for k in ("standard", "mup") for x in ("", "-lr-0.001")]
    assert {"model.n_hidden=176", "model.mup_base_width=64"} <= {*points["mup-64"].overrides}
    assert {"model.n_hidden=352", "model.mup_base_width=64"} <= {*points["mup-128"].overrides}


def test_the_hook_measures_the_columns_of_the_study(small: Any, tmp_path: Path) -> None:
    words = small(
        "hooks=[coordinates]", "train.max_iters=2", "train.checkpoint_interval=0", f"hydra.run.dir={tmp_path}"
    )
    with wordrun.Trainer(wordrun.compose(words)) as trainer:
        trainer.train()
        batch, _ = trainer.task.validation_set(trainer.cfg.model.batch_size)[0]
        with torch.no_grad():
            logits = trainer.backend.parts[0].eval()(batch.tokens)
    found = metrics_jsonl.read(tmp_path).other
    assert {name for name in found.columns if "/" in name} == {*coord.columns_of(trainer.cfg.transformer)}
    assert found.last("activation/logits") == pytest.approx(float(logits.abs().mean()), rel=1e-5)
    first, last = (x for x in found["change/blocks.0"] if math.isfinite(x))  # one line is the evaluation's
    assert 0 < first < last, "the first step is taken at half the learning rate"
    with pytest.raises(ConfigError, match=r"compiled blocks: use train\.compile=false"):
        wordrun.Trainer(wordrun.compose([*words[:-1], "train.compile=true"]))
