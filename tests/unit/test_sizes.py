"""With how many ranks a run can continue under ``launch --elastic MIN``."""

from __future__ import annotations

import pytest

import wordrun
from wordrun import sizes
from wordrun.config import Config
from wordrun.errors import ConfigError


def begun(monkeypatch: pytest.MonkeyPatch, least: int, most: int, *words: str, per_node: int = 0) -> Config:
    """Return the config of a run that began with ``most`` ranks and needs ``least``."""
    monkeypatch.setenv(sizes.VARIABLE, f"{least} {most} {per_node or most}")
    return wordrun.compose(["data=sample", "train.dtype=fp32", *words], ranks=most, per_node=per_node or None)


def test_without_min_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sizes.VARIABLE, raising=False)
    cfg = wordrun.compose(["data=sample"])
    assert sizes.accepted(cfg) is None
    assert sizes.fit(cfg, 3) is cfg


@pytest.mark.parametrize(
    ("words", "least", "expected"),
    [
        ((), 1, [1, 2, 4]),  # 4 x 4 sequences
        (("model.batch_size=3",), 1, [1, 2, 3, 4]),  # 4 x 3 = 3 x 4
        (("optimizer.gas=3",), 2, [2, 3, 4]),
        (("train.global_batch_size=8", "model.batch_size=2"), 1, [1, 2, 4]),
        (("train.backend=FSDP",), 1, [2, 4]),  # nothing to shard on one rank
        (("train.backend=TP", "backend.tp=2"), 1, [2, 4]),
        (("train.backend=diloco",), 1, [1, 2, 4]),
        (("train.batch_ramp=[10:8]", "train.global_batch_size=16", "model.batch_size=2"), 1, [1, 2, 4]),
    ],
)
def test_sizes_that_keep_the_global_batch(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], least: int, expected: list[int]
) -> None:
    cfg = begun(monkeypatch, least, 4, "model.batch_size=4", *words)
    assert sizes.accepted(cfg) == expected
    whole = cfg.train.global_batch_size or cfg.model.batch_size * 4 * (cfg.optimizer.gas or 1)
    if cfg.train.backend in ("TP",):
        whole //= 2
    for ranks in expected[:-1]:
        made = sizes.fit(cfg, ranks)
        assert made.train.global_batch_size == whole
        assert sizes.fit(made, ranks) == made
        assert sizes.accepted(made) == expected


@pytest.mark.parametrize(
    ("words", "least", "message"),
    [
        (("train.backend=TP", "backend.tp=4"), 1, "start 8 ranks, which can continue with 4, or leave MIN out"),
        (("train.backend=TP", "backend.tp=4"), 1, "--elastic 1: the run cannot continue with 1 to 3 of its 4 ranks"),
        ((), 3, "--elastic 3: the run cannot continue with 3 of its 4 ranks (16 sequences per step cannot be "
         "divided among 3 data-parallel ranks): use --elastic 2, since 1 or 2 would work"),
        (("optimizer.scale_lr=linear",), 1, "optimizer.scale_lr=linear changes the learning rate with the ranks"),
        (("train.backend=deepspeed",), 1, "train.backend=deepspeed resumes on the same number of ranks only"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_shrink_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], least: int, message: str
) -> None:
    cfg = begun(monkeypatch, least, 4, "model.batch_size=4", *words)
    with pytest.raises(ConfigError) as refused:
        sizes.accepted(cfg)
    assert message in str(refused.value)
