"""The settled config: what is saved is what the parts of a run were built with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import wordrun
from wordrun.backend.mixed_precision import TORCH_DTYPES
from wordrun.common.errors import ConfigError
from wordrun.config.schema import as_dict
from wordrun.dist import torch_private
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]


def trained(words: list[str]) -> Trainer:
    with Trainer(wordrun.compose(words)) as trainer:
        trainer.train()
    return trainer


def saved(run: Path) -> list[dict[str, object]]:
    """Return the options of config.yaml and of each checkpoint."""
    manifests = [json.loads(path.read_text())["config"] for path in run.glob("checkpoints/step-*/manifest.json")]
    assert manifests
    return [OmegaConf.to_container(OmegaConf.load(run / "config.yaml")), *manifests]


@pytest.mark.parametrize("fast", [True, False], ids=["fast at bf16", "not"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_the_saved_dtype_and_device_are_those_of_the_model(
    dtype: str, fast: bool, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "cpu_is_fast_at_bf16", lambda: fast)
    words = [word for word in small(f"train.dtype={dtype}") if word not in ("train.dtype=fp32", "train.device=cpu")]
    trainer = trained([*words, "train.dtype=" + dtype, f"hydra.run.dir={tmp_path}"])
    record = json.loads((tmp_path / "run.json").read_text())
    for options in saved(tmp_path):
        assert TORCH_DTYPES[options["train"]["dtype"]] == trainer.backend.dtype
        assert options["train"]["device"] == trainer.backend.device.type
        assert record["dtype"] == str(trainer.backend.dtype).removeprefix("torch.")


def test_the_saved_recomputation_is_that_of_the_blocks(small: Words, tmp_path: Path) -> None:
    """What each block does shows in the tensors that it keeps for the backward pass."""

    def kept(words: list[str], run: Path) -> tuple[str, int]:
        with Trainer(wordrun.compose([*words, f"hydra.run.dir={run}"])) as trainer:
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda each: sizes.append(each.numel()) or each, lambda x: x):
                trainer.backend.parts[0].losses(trainer._micro_batches()[0])
            trainer.train()
        (setting,) = {options["train"]["activation_checkpointing"] for options in saved(run)}
        return setting, sum(sizes)

    words = small("train.max_iters=1", "model.n_layer=3", "model.batch_size=8")
    sizes = {}
    for setting in ("none", "selective:1", "full"):
        found, sizes[setting] = kept([*words, f"train.activation_checkpointing={setting}"], tmp_path / setting)
        assert found == setting
    assert len(set(sizes.values())) == 3
    needs = []
    with pytest.raises(ConfigError) as refused:
        wordrun.Trainer(wordrun.compose([*words, "train.memory_budget_gb=1e-9", f"hydra.run.dir={tmp_path}/no"]))
    needs = re.findall(r"needs at least ([\d.e-]+) GB", str(refused.value))
    setting, size = kept([*words, f"train.memory_budget_gb={float(needs[0]) * 1.001}"], tmp_path / "least")
    assert setting != "none"
    assert size < sizes["none"]
    again, same = kept([*words, f"train.activation_checkpointing={setting}"], tmp_path / "again")
    assert (again, same) == (setting, size)


def test_a_run_on_the_sample_says_so(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDRUN_DATA_HOME", str(tmp_path / "empty"))
    words = [word for word in small() if not word.startswith("data")]
    trainer = trained([*words, "data=shakespeare", "data.url=http://127.0.0.1:9/none", f"hydra.run.dir={tmp_path}/run"])
    for options in saved(tmp_path / "run"):
        assert (options["data"]["name"], options["data"]["kind"]) == ("sample", "sample")
    assert trainer.task.corpus.banner or trainer.task.banner


def test_the_options_of_a_run_cannot_be_changed(small: Words, tmp_path: Path) -> None:
    cfg = wordrun.compose(small(f"hydra.run.dir={tmp_path}"))
    with Trainer(cfg) as trainer:
        for change in (
            "trainer.cfg.train.max_iters = 5",
            "trainer.cfg.model = None",
            "trainer.task.cfg.train.seed = 5",
        ):
            with pytest.raises(AttributeError, match="has already been built with these options"):
                exec(change)
        assert trainer.cfg.train.dtype == "fp32"
        with pytest.raises(AttributeError, match="has already been built with"):
            trainer.cfg.tracker["jsonl"].name = "other"
    cfg.train.max_iters = 5  # the caller's own
    assert replace(trainer.cfg.train, max_iters=7).max_iters == 7


def test_a_secret_is_used_and_not_saved(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "qzx")
    monkeypatch.setenv("PLACE", "Lincoln")
    words = [
        "train.sample_prompt=${oc.env:PLACE}-${oc.env:MY_API_KEY}",
        "data.name=${oc.env:PLACE}",
        "data.text_key=${train.sample_prompt}",
        "train.sample_tokens=0",
    ]
    cfg = wordrun.compose([*small(), *words, f"hydra.run.dir={tmp_path}"])
    assert cfg.train.sample_prompt == "Lincoln-qzx"
    trainer = trained([*small(), *words, f"hydra.run.dir={tmp_path}"])
    assert trainer.cfg.train.sample_prompt == "Lincoln-qzx"
    for options in saved(tmp_path):
        assert options["train"]["sample_prompt"] == "${oc.env:PLACE}-${oc.env:MY_API_KEY}"
        assert options["data"]["text_key"] == "${train.sample_prompt}"
        assert options["data"]["name"] == "Lincoln"
    texts = [path for path in tmp_path.rglob("*") if path.is_file() and b"qzx" in path.read_bytes()]
    assert texts == []
    tags = wordrun.compose(["data=sample", "tracker=[jsonl,wandb]", "tracker.wandb.tags=[a,'${oc.env:MY_API_KEY}']"])
    assert tags.tracker["wandb"].tags == ["a", "qzx"]
    assert as_dict(tags)["tracker"]["wandb"]["tags"] == ["a", "${oc.env:MY_API_KEY}"]
    # It is known again when the run is resumed.
    assert trained([*small(), *words, "train.resume=auto", "train.max_iters=5", f"hydra.run.dir={tmp_path}"]).step == 5


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("GITHUB_PAT", "qzx", "${oc.env:GITHUB_PAT}"),
        ("DB_PASSWD", "qzx", "a-${oc.env:DB_PASSWD}"),
        ("STORE", "s3://u:qzx@host/b", "${oc.env:STORE}"),
        ("PART", "qzx", "s3://u:${oc.env:PART}@host"),
    ],
)
def test_secrets_are_recorded_as_written(name: str, value: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PLACE", "Lincoln")
    cfg = wordrun.compose(["data=sample", f"train.sample_prompt='{written}'", "data.name=${oc.env:PLACE}"])
    assert "qzx" in cfg.train.sample_prompt
    assert (as_dict(cfg)["train"]["sample_prompt"], as_dict(cfg)["data"]["name"]) == (written, "Lincoln")


@pytest.mark.parametrize("name", ["../../..", "..", ".", "a/b", "/a", "''", "' '", "'-a'", "'a\nb'", "'a\tb'"])
@pytest.mark.parametrize("key", ["data.name", "model.name"])
def test_a_name_cannot_leave_the_folder_of_runs(key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}='.*' is part of the run directory's path"):
        wordrun.compose(["data=sample", f"{key}={name}"])
    assert wordrun.compose(["data=sample", f"{key}='..a b-c.1é'"]).data.name in ("sample", "..a b-c.1é")
