"""profiler=pyinstrument: where the time of the run went, for people and for browsers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import wordrun


def test_pyinstrument_writes_html_and_text(small: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small("profiler=pyinstrument", f"hydra.run.dir={tmp_path}/run", "train.max_iters=30")
    with wordrun.Trainer(wordrun.compose(words)) as trainer:
        trainer.train()
    text = (tmp_path / "run" / "profile" / "pyinstrument.txt").read_text()
    assert "train_step" in text
    assert "trainer.py" in text
    html = (tmp_path / "run" / "profile" / "pyinstrument.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert "train_step" in html
    assert "pyinstrument.html" in (tmp_path / "run" / "log.txt").read_text()


def test_without_a_profiler_there_is_no_profile(small: Callable[..., list[str]], tmp_path: Path) -> None:
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert not (tmp_path / "run" / "profile").exists()
