"""train.dtype=auto on a CPU: what is measured, and that a resumed run keeps what was chosen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wordrun
from wordrun.backend import mixed_precision
from wordrun.backend.mixed_precision import GAIN, bf16_gain
from wordrun.dist import torch_private
from wordrun.train.metrics import evaluate
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]


def _product_s(dtype: torch.dtype) -> float:
    """Return the least processor time of a product of this dtype [s], of all threads."""
    x, weight = torch.ones(256, 384, dtype=dtype), torch.ones(384, 1536, dtype=dtype)
    times = []
    for _ in range(9):
        begin = time.process_time()
        torch.mm(x, weight)
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.skipif(not torch_private.cpu_is_fast_at_bf16(), reason="would emulate bf16")
def test_the_measurement_is_clear_and_leaves_no_trace() -> None:
    """Whatever it says: Zen 4 gains 2, and a Xeon with AVX512_BF16 whose host hides AMX loses as much."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    gains = [bf16_gain(384) for _ in range(2)]
    assert not any(1 / GAIN <= gain <= GAIN for gain in gains), "near the bound, each start could choose another"
    assert [gain > GAIN for gain in gains] == [_product_s(torch.float32) > _product_s(torch.bfloat16)] * 2
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)


def test_other_load_does_not_change_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it makes most products take three times as long in bf16, and some in fp32."""
    slowed = [(1, 3), (1, 3), (3, 1), (1, 3), (1, 3), (3, 3), (1, 3), (1, 3)]
    now, times = 0.0, []
    for fp32, bf16 in slowed:
        for seconds in (2.0 * fp32, 1.0 * bf16):
            times += [now, now + seconds]
            now += seconds
    monkeypatch.setattr(mixed_precision.time, "thread_time", iter(times).__next__)
    assert bf16_gain(256) == 2


class Casts(TorchDispatchMode):
    """Counts casts of matrices, as weights are; activations have three axes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


def test_an_evaluation_casts_each_weight_once(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_is_fast_at_bf16", lambda: True)
    words = [word for word in small("train.dtype=bf16") if word != "train.dtype=fp32"]
    counts = []
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        for batches in (1, 3):
            with Casts() as casts:
                evaluate(trainer.backend, trainer.evaluation.validation, batches=batches)
            counts.append(casts.count)
    assert counts[0] == counts[1] > 4


def test_bf16_has_to_gain_and_a_resumed_run_keeps_it(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "cpu_is_fast_at_bf16", lambda: True)
    words = [word for word in small("train.dtype=auto") if word != "train.dtype=fp32"]
    for gain, dtype in ((0.9 * GAIN, "fp32"), (1.1 * GAIN, "bf16")):
        # When a product in fp32 begins and ends, and one in bf16.
        monkeypatch.setattr(time, "thread_time", cycle([0.0, gain, 0.0, 1.0]).__next__)
        folder = tmp_path / dtype
        with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"])) as trainer:
            trainer.train()
        assert trainer.backend.dtype == mixed_precision.TORCH_DTYPES[dtype]
    monkeypatch.setattr(time, "thread_time", lambda: 1 / 0)
    again = wordrun.compose([*words, f"hydra.run.dir={tmp_path}/bf16", "train.resume=auto", "train.max_iters=5"])
    with Trainer(again) as trainer:
        trainer.train()
    assert trainer.backend.dtype == torch.bfloat16
    manifest = json.loads((tmp_path / "bf16/checkpoints/step-00000005/manifest.json").read_text())
    assert manifest["dtype"] == "bf16"


def test_without_instructions_nothing_is_measured(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "cpu_is_fast_at_bf16", lambda: False)
    monkeypatch.setattr(time, "thread_time", lambda: 1 / 0)
    words = [word for word in small("train.dtype=auto") if word != "train.dtype=fp32"]
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        assert trainer.backend.dtype == torch.float32
