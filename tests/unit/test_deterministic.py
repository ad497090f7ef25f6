"""train.deterministic: what it sets, what it gives back, what it cannot do; and steps that do not wait for a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wordrun
from wordrun.backend.clipping import total_norm
from wordrun.common.errors import ConfigError, UserError
from wordrun.train import rng
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]


def flags() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(autouse=True)
def _given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(rng.WORKSPACE, "")  # restored at the end
    monkeypatch.delenv(rng.WORKSPACE)
    before = flags()
    yield
    assert flags() == before


def test_a_run_uses_deterministic_algorithms_and_no_longer_when_it_is_closed(small: Words, tmp_path: Path) -> None:
    torch.backends.cudnn.benchmark = True
    try:
        before = flags()
        with Trainer(
            wordrun.compose(small("train.deterministic=true", f"hydra.run.dir={tmp_path / 'run'}"))
        ) as trainer:
            assert flags() == (True, False, False, False)
            assert os.environ[rng.WORKSPACE] == ":4096:8"
            trainer.train()
        assert flags() == before
    finally:
        torch.backends.cudnn.benchmark = False


def test_a_run_that_cannot_start_leaves_nothing_set(small: Words, tmp_path: Path) -> None:
    words = small("train.deterministic=true", "train.compile=true", f"hydra.run.dir={tmp_path / 'run'}")
    cfg = wordrun.compose(small("train.deterministic=true", f"hydra.run.dir={tmp_path / 'run'}"))
    cfg.train.compile = True
    with pytest.raises(ConfigError, match=r"does not cover torch.compile.*: use train.compile=false"):
        Trainer(cfg)
    with pytest.raises(ConfigError, match=r"does not cover torch.compile"):
        wordrun.compose(words)


def test_it_comes_too_late_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before CUDA"):
        rng.deterministic().__enter__()
    monkeypatch.setenv(rng.WORKSPACE, ":16:8")
    with rng.deterministic():
        assert os.environ[rng.WORKSPACE] == ":16:8"


def test_an_operation_without_a_deterministic_algorithm_is_named(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(wordrun.compose(small("train.deterministic=true", f"hydra.run.dir={tmp_path / 'run'}"))) as trainer:

        def losses(*args: Any) -> torch.Tensor:
            return torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))

        monkeypatch.setattr(trainer.backend.parts[0], "losses", losses)
        with pytest.raises(UserError, match=r"train.deterministic=true cannot train this model: put_ does not"):
            trainer.train()


class Recorded(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class OneRank:
    """A mesh of one rank."""

    def __getitem__(self, axis: str) -> OneRank:
        return self

    def size(self) -> int:
        return 1


def test_the_norm_of_all_gradients_copies_nothing_to_the_device() -> None:
    """A copy from the host waits for the device at every step."""
    device = torch.device("meta")
    with Recorded() as recorded:
        norm = total_norm([torch.ones(3, device=device)], OneRank(), device)  # type: ignore[arg-type]
    assert norm.device == device
    assert not [name for name in recorded.names if "copy" in name]
    assert total_norm([torch.full((4,), 3.0)], OneRank(), torch.device("cpu")).item() == 6  # type: ignore[arg-type]
