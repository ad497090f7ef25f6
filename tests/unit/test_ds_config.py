"""A user's ds_config file beside the run's options, and what of DeepSpeed's is checked before a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from wordrun.backend.deepspeed import settings as ds_config
from wordrun.backend.deepspeed.options import DeepSpeedConfig
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.schema import Config

RUN = ["data=sample", "train.backend=deepspeed", "train.dtype=bf16", "model.batch_size=4", "optimizer.gas=3"]


def merged(content: Any, *words: str, dtype: str = "bf16") -> dict[str, Any]:
    """Return the settings for two ranks with a file of ``content``."""
    Path("ds.json").write_text(content if isinstance(content, str) else json.dumps(content))
    cfg: Config = compose([*RUN, "backend.config=ds.json", *words])
    assert isinstance(cfg.backend, DeepSpeedConfig)
    return ds_config.merge(cfg, cfg.backend, dtype, 2, 3)


def test_the_run_decides_and_the_file_adds() -> None:
    settings = merged(
        {
            "train_batch_size": "auto",
            "wall_clock_breakdown": True,
            "bf16": {"enabled": "auto", "check_grad_overflow": True},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1000},
            "optimizer": {"type": "adamw", "params": {"lr": "auto", "betas": [0.9, 0.99], "weight_decay": 0.1}},
        },
        "backend.stage=3",
        "backend.offload_params=true",
        "backend.keep_below=7",
    )
    assert settings == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1000,
            "stage3_param_persistence_threshold": 7,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "none"},
        },
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


CONTRADICTIONS = {
    "train_batch_size": (8, "train.global_batch_size", "24"),
    "train_micro_batch_size_per_gpu": (2, "model.batch_size", "4"),
    "gradient_accumulation_steps": (1, "train.accumulation", "3"),
    "gradient_clipping": (0.3, "optimizer.grad_clip", "1.0"),
    "fp16.enabled": (True, "train.dtype", "false"),
    "bfloat16.enabled": (False, "train.dtype", "true"),
    "zero_optimization.stage": (3, "backend.stage", "1"),
    "zero_optimization.offload_optimizer.device": ("nvme", "backend.offload_optimizer", '"none"'),
    "optimizer.type": ("Lamb", "optimizer", '"adamw"'),
    "optimizer.params.lr": (3e-4, "optimizer.learning_rate", "0.001"),
}


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_contradiction_names_both_values_and_the_remedy(key: str) -> None:
    theirs, option, ours = CONTRADICTIONS[key]
    with pytest.raises(ConfigError) as caught:
        merged(nested(key, theirs))
    known_as = key.replace("bfloat16", "bf16")
    assert str(caught.value) == (
        f"backend.config=ds.json: {known_as}={json.dumps(theirs)}, but {option} makes it {ours}: "
        f'write "auto" into the file, or change {option}'
    )


def test_contradictions_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        merged({"scheduler": {"type": "WarmupLR"}, "gradient_clipping": 0.3, "fp16": True})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert [
        word for word in ("scheduler", "gradient_clipping", "fp16") if not any(word in line for line in lines)
    ] == []


def test_a_precision_that_is_not_known_yet_is_not_compared() -> None:
    assert merged({"fp16": {"enabled": True}}, "train.dtype=auto", dtype="auto")["fp16"] == {"enabled": True}


@pytest.mark.parametrize(("content", "says"), [("{", "is not valid JSON"), ("[]", "should hold one block")])
def test_a_file_that_is_no_ds_config_is_named(content: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.config=ds\.json {says}"):
        merged(content)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["backend.stage=4"], ["backend.stage=4 should be 0, 1, 2 or 3"]),
        (["backend.stage=0", "backend.offload_optimizer=true"], ["backend.offload_optimizer=true", "backend.stage=1"]),
        (["backend.stage=2", "backend.offload_params=true"], ["backend.offload_params=true", "use backend.stage=3"]),
        (["backend.stage=3", "train.compile=true"], ["train.compile=true", "train.compile=false"]),
        (["backend.bucket_elements=7"], ["backend.bucket_elements=7", "use 8"]),
        (
            ["backend.bucket_elements=0", "backend.keep_below=-1"],
            ["backend.bucket_elements=0", "backend.keep_below=-1"],
        ),
    ],
)
def test_impossible_options_are_refused(words: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*RUN, *words])
    assert [text for text in says if text not in str(caught.value)] == []


def test_all_that_is_wrong_with_deepspeed_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError) as caught:
        compose([*RUN, "backend.config=nowhere.json", "train.max_iters=0"], ranks=2)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "train.max_iters=0" in lines[0]
    assert "pip install 'wordrun[deepspeed]'" in lines[1]
    assert lines[2] == "backend.config=nowhere.json cannot be read (No such file or directory): name a ds_config file"


def test_a_config_can_be_looked_at_where_there_is_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert compose(RUN).backend.name == "deepspeed"


def test_a_deepspeed_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wordrun
    from wordrun.common.errors import UserError

    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "deepspeed.py").write_text("raise ImportError('libsomething.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train=smoke", "tracker=jsonl", "train.device=cpu", "train.dtype=fp32"]
    with pytest.raises(UserError, match=r"libsomething\.so is missing.*pip install --force-reinstall"):
        wordrun.Trainer(compose([*RUN, *words]))
