"""What the tests on an accelerator share: runs in this process, because starting another takes seconds.

``WORDRUN_GPU_TESTS=cpu`` runs them on a machine without an accelerator, as far as they go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gpu_runs import DRY, SMALL, Ran, Train, ran

import forked

# cuBLAS reads it once, when CUDA starts; train.deterministic=true needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if TYPE_CHECKING:
    import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Report warnings at the end instead of failing: drivers and libraries differ from machine to machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def _share_data(data_home: Path, _clean_surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the sample text once."""
    monkeypatch.setenv("WORDRUN_DATA_HOME", str(data_home))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    import torch

    found = torch.device("cpu") if DRY else torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, None if DRY else 0)


@pytest.fixture
def only_on_device(device: torch.device) -> None:
    """Skip in a dry run."""
    if device.type == "cpu":
        pytest.skip("needs an accelerator")


@pytest.fixture(scope="session", autouse=True)
def _undrawn() -> Iterator[None]:
    with forked.undrawn():
        yield


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train in this process, into the folder ``name``; a later word takes precedence over an earlier one."""
    from wordrun import compose
    from wordrun.train.trainer import Trainer

    def run(name: str, *words: str) -> Ran:
        with Trainer(compose([*SMALL, *words, f"hydra.run.dir={tmp_path / name}"])) as trainer:
            trainer.train()
        return ran(tmp_path / name)

    return run


@pytest.fixture
def one_rank_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sharding backends run on one rank, which users are advised against, with ``fully_shard`` and all."""
    from wordrun.backend.fsdp import Splitter
    from wordrun.backend.options import FSDPConfig

    monkeypatch.setattr(FSDPConfig, "conflicts_on", lambda *_: [])
    monkeypatch.setattr(Splitter, "sharded", property(lambda self: not self.options.zero_bubble))


@pytest.fixture
def wordrun_words(tmp_path: Path) -> Callable[..., list[str]]:
    """Return the words of a small run in a process of its own, into the folder ``name``."""

    def words(name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "wordrun", *SMALL, *more, f"hydra.run.dir={tmp_path / name}"]

    return words
