"""A trained language model and its tokenizer in Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wordrun
from wordrun.common.errors import ConfigError, UserError
from wordrun.train.hooks.base import Hook

PAGE = Path(__file__).parents[2] / "docs/generate.md"


class Keep(Hook):
    """Copies the weights, and their averages, after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.averages: dict[str, torch.Tensor] = {}

    def after_step(self, trainer: Any) -> None:
        model = trainer.backend.parts[0]
        self.weights[trainer.step] = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.averages = {name: p.clone() for name, p in trainer.hooks["ema"].averages.items()}


@pytest.fixture(scope="module")
def trained(small: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Keep]:
    """Return a folder with a run in outputs/latest with checkpoints of steps 2 and 4, and of the best one."""
    folder, keep = tmp_path_factory.mktemp("loading"), Keep()
    words = small(
        *shlex.split("""
        hooks=[ema] hooks.ema.decay=0.5 train.eval_interval=1 optimizer.warmup_iters=0 schedule=constant
        optimizer.learning_rate=0.05 train.checkpoint_interval=2 train.keep_checkpoints=9
    """),
        f"hydra.run.dir={folder}/outputs/one",
    )
    with wordrun.Trainer(wordrun.compose(words), hooks=[keep]) as trainer:
        trainer.train()
    (folder / "outputs/latest").unlink(missing_ok=True)
    (folder / "outputs/latest").symlink_to("one")
    return folder, keep


def test_the_model_has_the_weights_of_the_checkpoint(trained: tuple[Path, Keep]) -> None:
    folder, keep = trained
    run = folder / "outputs/latest"
    for checkpoint, step in {"latest": 4, 2: 2}.items():
        model = wordrun.load(run, checkpoint)
        assert isinstance(model, torch.nn.Module)
        assert not model.training
        assert all(p.equal(keep.weights[step][name]) for name, p in model.named_parameters())
    model = wordrun.load(run, weights="ema")
    assert not any(p.equal(keep.weights[4][name]) for name, p in model.named_parameters() if p.dim() > 1)
    assert all(p.equal(keep.averages[name]) for name, p in model.named_parameters() if name in keep.averages)
    with pytest.raises(ConfigError, match=r"weights=average: .* has only model, ema"):
        wordrun.load(run, weights="average")
    with pytest.raises(UserError, match="has no checkpoint 99"):
        wordrun.load(run, 99)


def test_the_example_in_the_docs_generates_text(
    trained: tuple[Path, Keep], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "wordrun.load" in each
    ]
    monkeypatch.chdir(trained[0])
    exec(code.replace("ROMEO:", "The quick"), {})
    assert re.match(r"The quick(.|\n){91}", capsys.readouterr().out)
