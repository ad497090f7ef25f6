"""A config composed of what an earlier one chose is the one that Hydra composes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from wordrun import composer, refusals, registry, tree
from wordrun.errors import ConfigError
from wordrun.tree import Tree, composed_tree


def by_hydra(overrides: list[str]) -> DictConfig:
    composer.register()
    return tree._by_hydra(overrides, Tree())


def content(cfg: DictConfig) -> str:
    plain = OmegaConf.to_container(cfg)
    assert isinstance(plain, dict)
    del plain["hydra"]["overrides"], plain["hydra"]["job"]  # the record of the overrides
    return str(plain)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.n_layer=3", "model=llama_debug", "model.n_embd=32", "model.n_layer=2"],
        ["train.backend=FSDP", "train.max_iters=7", "backend.prefetch=0", "optimizer=muon", "optimizer.momentum=0.5"],
        ["data=text", "data.path='a, b.txt'", "hydra.run.dir=/tmp/a run", "train.init_from=null"],
        ["tracker=[jsonl,wandb]", "tracker.wandb.project=p", "hooks=[ema]", "hooks.ema.decay=0.9", "+train.typo=3"],
        ["experiment=shakespeare", "train.max_iters=3", "model.n_head=${model.n_layer}", "model.n_layer=2"],
        ["model.n_head=4", "model.n_head=${model.n_layer}", "~profiler"],
    ],
)
def test_it_is_the_one_of_hydra(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composer.register()
    expected = content(by_hydra(overrides))
    assert content(composed_tree(overrides, Tree())) == expected
    assert content(composed_tree(overrides, Tree())) == expected  # from what is kept
    monkeypatch.chdir(tmp_path.parent)  # which Hydra's record has
    assert content(composed_tree(overrides, Tree())) == content(by_hydra(overrides)) != expected


@pytest.mark.parametrize(
    "wrong",
    ["train.max_iters=abc", "train.max_iter=3", "train.max_iters=1,2", "train.max_iters=[", "model=gpt3", "a.b=1"],
)
def test_what_is_wrong_is_refused_as_by_hydra(wrong: str) -> None:
    composed_tree(["data=sample"], Tree())
    with pytest.raises(refusals.REFUSALS) as theirs:
        by_hydra(["data=sample", wrong])
    with pytest.raises(refusals.REFUSALS) as ours:
        composed_tree(["data=sample", wrong], Tree())
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


def test_a_change_of_one_config_stays_out_of_the_next() -> None:
    first, second = (composed_tree(["data=sample"], Tree()) for _ in range(2))
    first.model.n_layer = 99
    assert second.model.n_layer != 99
    assert composed_tree(["data=sample"], Tree()).model.n_layer == second.model.n_layer


def test_hydra_composes_again_only_where_files_or_parts_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    by_hydra = tree._by_hydra
    monkeypatch.setattr(tree, "_by_hydra", lambda *arguments: calls.append(arguments) or by_hydra(*arguments))
    tree._kept.cache_clear()
    for steps in range(3):
        assert composer.compose(["data=sample", f"train.max_iters={steps + 1}"]).train.max_iters == steps + 1
    assert len(calls) == 1
    preset = tmp_path / "conf" / "model" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    for layers in (2, 3):  # the project's own files
        preset.write_text(f"defaults: [/schema/model/gpt@_here_]\nname: mine\nn_layer: {layers}\n")
        assert composer.compose(["data=sample", "model=mine"]).model.n_layer == layers
    monkeypatch.chdir("/")
    monkeypatch.setattr(tree, "_changed", lambda: 1)  # a file of wordrun's
    composer.compose(["data=sample"])
    assert len(calls) == 4
    part = registry.Part("wordrun.config:ScheduleConfig", "wordrun.train.schedule:cosine", "schedule", "own", "here")
    monkeypatch.setitem(registry._parts["schedule"], "own", part)
    for _ in range(2):
        composer.compose(["data=sample"])
    assert len(calls) == 6


def test_a_changed_file_of_the_checkout_is_seen() -> None:
    before = tree._changed()
    newest = max(
        Path(os.path.dirname(__file__), "../../conf").resolve().glob("*/*.yaml"), key=lambda f: f.stat().st_mtime
    )
    assert before == newest.stat().st_mtime_ns


def test_an_error_names_each_wrong_override_after_a_good_config() -> None:
    composer.compose(["data=sample"])
    with pytest.raises(ConfigError) as error:
        composer.compose(["data=sample", "train.max_iter=3", "model.n_layers=2"])
    assert len(str(error.value).splitlines()) == 2
