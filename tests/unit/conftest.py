"""What the tests of one process share: one thread, and small runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = (
    "tracker=jsonl", "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=8", "model.batch_size=4",
    "train.eval_iters=2", "train.sample_tokens=8", "train.dtype=fp32", "train.device=cpu",
)  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog.\n"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Keep small matrices on one core: on a busy machine, threads that wait for each other cost 50 times the work."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text, so that tests need not tokenise the sample."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT * 40)
    return path


Words = Callable[..., list[str]]


@pytest.fixture(scope="session")
def small(text_file: Path) -> Words:
    """Return the words of a command line that trains a very small model, with further words behind them."""

    def words(*more: str) -> list[str]:
        return [*SMALL, "data=text", "tokenizer=char", f"data.path={text_file}", "train.max_iters=4", *more]

    return words
