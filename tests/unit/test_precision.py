"""train.dtype=auto on a CPU: what is measured, and that a resumed run keeps what was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wordrun
from wordrun import compat
from wordrun.backend import precision
from wordrun.backend.precision import GAIN, bf16_gain
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]


@pytest.mark.skipif(not compat.cpu_is_fast_at_bf16(), reason="would emulate bf16")
def test_the_measurement_is_clear_and_leaves_no_trace() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    gain = bf16_gain(384)
    assert gain > GAIN
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)


def test_bf16_has_to_gain_and_a_resumed_run_keeps_it(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_is_fast_at_bf16", lambda: True)
    words = [word for word in small("train.dtype=auto") if word != "train.dtype=fp32"]
    for gain, dtype in ((0.9 * GAIN, "fp32"), (1.1 * GAIN, "bf16")):
        monkeypatch.setattr(precision, "bf16_gain", lambda width, gain=gain: gain)
        folder = tmp_path / dtype
        with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"])) as trainer:
            trainer.train()
        assert trainer.backend.dtype == precision.TORCH_DTYPES[dtype]
    monkeypatch.setattr(precision, "bf16_gain", lambda width: 1 / 0)
    again = wordrun.compose([*words, f"hydra.run.dir={tmp_path}/bf16", "train.resume=auto", "train.max_iters=5"])
    with Trainer(again) as trainer:
        trainer.train()
    assert trainer.backend.dtype == torch.bfloat16
    manifest = json.loads((tmp_path / "bf16/checkpoints/step-00000005/manifest.json").read_text())
    assert manifest["dtype"] == "bf16"


def test_without_instructions_nothing_is_measured(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_is_fast_at_bf16", lambda: False)
    monkeypatch.setattr(precision, "bf16_gain", lambda width: 1 / 0)
    words = [word for word in small("train.dtype=auto") if word != "train.dtype=fp32"]
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        assert trainer.backend.dtype == torch.float32
