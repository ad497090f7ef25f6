"""What the tests of one process share: one thread, and small runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forked

if TYPE_CHECKING:
    from wordrun.model.transformer import Transformer

SMALL = tuple(
    shlex.split("""
    model=nano
    tracker=jsonl model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=8 model.batch_size=4
    train.eval_iters=2 train.sample_tokens=8 train.dtype=fp32 train.device=cpu
""")
)
TEXT = "The quick brown fox jumps over the lazy dog.\n"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Keep small matrices on one core: on a busy machine, threads that wait for each other cost 50 times the work."""
    import torch

    torch.set_num_threads(1)


Draws = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[Draws]:
    """Draw plots and the report at the end of a run only in this context."""
    with forked.undrawn() as drawing:
        yield drawing


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text, so that tests need not tokenize the sample."""
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


SaveRun = Callable[..., "Transformer"]


@pytest.fixture(scope="session")
def save_run() -> SaveRun:
    """Write a checkpoint of a model that ``words`` describe into a run directory, and return the model.

    Its weights are far from their first values: it is sure of what follows.
    """
    import os

    import torch

    import wordrun
    from wordrun import model as models
    from wordrun.checkpoint import folder as folders, shards
    from wordrun.config.schema import to_plain
    from wordrun.data.tokenizers.char import CharTokenizer

    def save(run: Path, *words: str, step: int = 100, text: str = TEXT) -> Transformer:
        tokenizer = CharTokenizer(text)
        cfg = wordrun.compose([*SMALL, *words])
        model = models.build(cfg.model, tokenizer.vocab_size, seed=step).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(8) if p.dim() > 1 else p.add_(torch.linspace(-0.3, 0.3, len(p)))
        run.mkdir(parents=True, exist_ok=True)
        draft = folders.Draft(run, step)
        draft.begin(tokenizer.to_json())
        own = [shards.shard_of(f"model.{name}", p) for name, p in model.weights()]
        shards.write(draft.path, own)
        shards.write_index(draft.path)
        draft.publish(
            {
                "files": folders.describe(draft.path, os.listdir(draft.path)),
                "config": to_plain(cfg),
                "vocab_size": tokenizer.vocab_size,
                "backend": {"kind": "shards"},
                "shards": 0,
            }
        )
        return model

    return save


@pytest.fixture(scope="session")
def seal() -> Callable[..., None]:
    """Write a checkpoint's manifest anew, with the sizes and checksums of what is in its folder now."""
    import json
    import os

    from wordrun.checkpoint import folder as folders

    def write(folder: Path, **changes: Any) -> None:
        manifest = json.loads((folder / folders.MANIFEST).read_text())
        del manifest["crc32"]
        names = [name for name in os.listdir(folder) if name != folders.MANIFEST]
        folders.write_manifest(folder, {**manifest, "files": folders.describe(folder, names), **changes})

    return write
