"""Checkpoints of an accelerator: copies in pinned memory, exact resumption, other layouts and a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gpu_runs import SMALL, Ran, Train
from safetensors.torch import load_file

if TYPE_CHECKING:
    import torch


SAVING = ["train.checkpoint_interval=10", "train.keep_checkpoints=9"]


def at(run: Ran, step: int = 10) -> str:
    return f"train.resume={run.folder}/checkpoints/step-{step:08d}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_exactly_the_same(train: Train, dtype: str) -> None:
    """Dropout's streams are the device's; in fp16 the loss scale is restored, too."""
    words = [f"train.dtype={dtype}", "model.dropout=0.1", "train.deterministic=true", *SAVING]
    whole = train("whole", *words)
    resumed = train("resumed", *words, at(whole))
    assert resumed.record["resumed_from"]["step"] == 10
    assert resumed.losses == whole.losses


def test_without_determinism_it_is_nearly_the_same(train: Train) -> None:
    words = ["train.dtype=bf16", "model.dropout=0.1", *SAVING]
    whole = train("whole", *words)
    assert train("resumed", *words, at(whole)).losses == pytest.approx(whole.losses, rel=1e-3)


def test_writing_in_the_background_stores_the_step_at_which_it_began(train: Train) -> None:
    """Training continues at once and must not change what is being written."""
    words = ["train.dtype=fp32", "model.dropout=0.1", "train.deterministic=true", "model.n_embd=256", *SAVING]
    words += ["train.checkpoint_interval=3"]
    behind, ahead = (
        sorted(train(name, *words, f"train.async_save={name}").folder.glob("checkpoints/step-*/shards-*"))
        for name in ("true", "false")
    )
    assert len(behind) == len(ahead) == 7
    for path, other in zip(behind, ahead, strict=True):
        stored, expected = load_file(path), load_file(other)
        assert stored.keys() == expected.keys()
        assert [name for name, tensor in stored.items() if not tensor.equal(expected[name])] == []


def test_copies_are_in_pinned_memory(device: torch.device) -> None:
    from wordrun import compose
    from wordrun.train.trainer import Trainer

    with Trainer(compose([*SMALL, "train.max_iters=2", "train.checkpoint_interval=1", "hydra.run.dir=run"])) as trainer:
        trainer.train()
        buffers = trainer.backend.copies._buffers  # type: ignore[attr-defined]
        weights = {name: b for name, b in buffers.items() if name.startswith(("model.", "optimizer."))}
        assert len(weights) > 20
        assert all(buffer.device.type == "cpu" for buffer in weights.values())
        if device.type != "cpu":
            assert all(buffer.is_pinned() for buffer in weights.values())
            assert all(batch.tokens.is_pinned() for slot in trainer.loader._builder.free for batch in slot.batches)


@pytest.mark.usefixtures("one_rank_shards")
@pytest.mark.parametrize(("first", "then"), [("DDP", "FSDP"), ("FSDP", "DDP"), ("DDP", "PP"), ("FSDP", "3D")])
def test_another_backend_continues(train: Train, first: str, then: str) -> None:
    words = ["train.dtype=fp32", *SAVING]
    degrees = {"PP": ["backend.pp=1"], "3D": ["backend.pp=1", "backend.tp=1"]}
    whole = train("whole", *words, f"train.backend={first}")
    resumed = train("resumed", *words, f"train.backend={then}", *degrees.get(then, []), at(whole))
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_cpu_and_a_device_continue_each_other(train: Train) -> None:
    words = ["train.dtype=fp32", *SAVING]
    whole = train("whole", *words)
    on_cpu = train("cpu", *words, "train.device=cpu", at(whole))
    assert on_cpu.losses == pytest.approx(whole.losses, rel=1e-4)
    back = train("back", *words, at(on_cpu, 20), "train.max_iters=30")
    assert len(back.losses) == 30
