"""DeepSpeed's engine on one device, at each stage."""

from __future__ import annotations

import pytest
from gpu_runs import Train


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_ddp(train: Train, stage: int) -> None:
    """And a resumed run goes on as if it had not stopped."""
    words = ["model.vocab_size=null", "train.dtype=fp32", "train.global_batch_size=24", "train.checkpoint_interval=10"]
    engine = [*words, "train.backend=deepspeed", f"backend.stage={stage}"]
    alone, whole = train("ddp", *words), train("whole", *engine)
    assert whole.losses == pytest.approx(alone.losses, rel=1e-4)
    resumed = train("resumed", *engine, f"train.resume={whole.folder}/checkpoints/step-00000010")
    assert resumed.record["resumed_from"]["step"] == 10
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(train: Train, dtype: str, only_on_device: None) -> None:
    half = train("half", "train.backend=deepspeed", "backend.stage=2", f"train.dtype={dtype}")
    single = train("single", "train.dtype=fp32")
    # DeepSpeed's weights themselves are in half precision, and its first steps in fp16 find the scale.
    assert half.losses[-1] == pytest.approx(single.losses[-1], rel=0.1 if dtype == "fp16" else 0.03)
