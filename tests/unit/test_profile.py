"""Profilers: what each writes, when, and on which ranks."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import wordrun
from wordrun import dist
from wordrun.common import log
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.registry import Part, parts
from wordrun.dist import World, torch_private
from wordrun.train.options import ProfilerConfig
from wordrun.train.profile import Profiler, build


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


def test_torch_records_the_steps_of_its_schedule(small: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small("profiler=torch", "profiler.wait=1", "profiler.warmup=1", "profiler.active=2", "train.max_iters=6")
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        trainer.train()
    folder = tmp_path / "run" / "profile"
    (file,) = (folder / "traces").iterdir()
    assert file.name == "rank-0.pt.trace.json.gz"  # a form of names that TensorBoard's plugin asks for
    names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert {name for name in names if str(name).startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "aten::mm" in names
    summary = (folder / "summary.txt").read_text()
    assert "Self CPU" in summary
    assert "aten::mm" in summary
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.index("step 6/6") < log.index(f"trace: {file}; open it at https://ui.perfetto.dev")
    assert f"tensorboard --logdir {file.parent}\n" in log


def test_the_first_chosen_rank_names_its_file(
    small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = wordrun.compose(small("profiler=pyinstrument", "profiler.ranks=[1,3]", f"hydra.run.dir={tmp_path}/run"))
    (tmp_path / "run").mkdir()
    for rank in range(4):
        handle = log.start(rank)
        try:
            with build(cfg, World(rank=rank, size=4)):
                pass
        finally:
            handle.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert f"[rank 1] profile: {tmp_path}/run/profile/pyinstrument-rank-1.html" in line


@pytest.mark.parametrize("profiler", ["torch", "memory", "pyinstrument", "spans"])
def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    profiler: str, small: Callable[..., list[str]], tmp_path: Path
) -> None:
    schedule = {"torch": "wait=0 warmup=1 active=1", "memory": "wait=0 warmup=1 active=1", "spans": "wait=1 active=1"}
    options = [f"profiler.{option}" for option in schedule.get(profiler, "").split()]
    words = small(f"profiler={profiler}", *options, "train.max_iters=4", "train.device=cpu")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to("/proc")  # a folder in which nobody can write
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        assert trainer.train().steps == 4
    assert (tmp_path / "run" / "log.txt").read_text().count("cannot write the profile to") == 1


def test_a_full_disk_does_not_end_the_run(small: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "run/profile").mkdir(parents=True)
    (tmp_path / "run/profile/summary.txt").symlink_to("/dev/full")
    words = small("profiler=torch", "profiler.wait=0", "profiler.warmup=1", "profiler.active=1", "train.max_iters=4")
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        assert trainer.train().steps == 4
    assert "No space left on device; the run continues" in (tmp_path / "run" / "log.txt").read_text()


def test_memory_is_a_table_of_operations_on_cpus(small: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small("profiler=memory", "profiler.wait=1", "profiler.warmup=1", "profiler.rows=5", "train.device=cpu")
    with wordrun.Trainer(wordrun.compose([*words, "train.max_iters=6", f"hydra.run.dir={tmp_path}/run"])) as trainer:
        trainer.train()
    table = (tmp_path / "run" / "profile" / "memory.txt").read_text()
    assert "Self CPU Mem" in table
    assert sum("aten::" in line for line in table.splitlines()) >= 3


class Recorder(Profiler):
    """Notes what it is told."""

    calls: ClassVar[list[str]] = []

    def start(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append(f"stop {self.file('x.txt').name}")


@pytest.mark.parametrize(("rank", "name"), [(0, "x.txt"), (2, "x-rank-2.txt")])
def test_a_profiler_runs_on_the_ranks_that_it_is_asked_for(
    rank: int, name: str, small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(ProfilerConfig, f"{__name__}:Recorder")
    monkeypatch.setitem(parts("profiler"), "none", part)
    monkeypatch.setattr(Recorder, "calls", [])
    cfg = wordrun.compose(small(f"hydra.run.dir={tmp_path}/run", f"profiler.ranks=[{rank}]"))
    (tmp_path / "run").mkdir()
    for each in range(3):
        with build(cfg, dist.World(rank=each, size=3)) as profiler:
            profiler.step()
    assert Recorder.calls == ["start", "step", f"stop {name}"]
    with pytest.raises(
        ConfigError, match=r"profiler\.ranks=\[\d\] contains a rank that does not exist: this run has 0 ranks"
    ):
        build(cfg, dist.World(rank=0, size=0))
    with pytest.raises(ConfigError, match=r"profiler\.ranks=\[-1\] should not be negative"):
        wordrun.compose(["profiler.ranks=[-1]"])


def test_the_trainer_starts_steps_and_stops_it(
    small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parts("profiler"), "none", Part(ProfilerConfig, f"{__name__}:Recorder"))
    monkeypatch.setattr(Recorder, "calls", [])
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert Recorder.calls == ["start", *["step"] * 4, "stop x.txt"]


def test_without_a_profiler_there_is_no_profile(small: Callable[..., list[str]], tmp_path: Path) -> None:
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert not (tmp_path / "run" / "profile").exists()


class Hungry(torch.nn.Module):
    """Runs out of a device's memory in the third step."""

    def __init__(self, real: torch.nn.Module) -> None:
        super().__init__()
        self.real, self.steps = real, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.real(x)


@pytest.mark.parametrize(
    ("steps", "fails", "written"),
    [
        (6, False, ["memory.pickle"]),
        (2, False, ["memory.pickle"]),  # the run ends before the steps to record
        (6, True, ["out_of_memory.pickle"]),
    ],
    ids=["recorded", "short", "out of memory"],
)
def test_the_order_of_calls_for_a_snapshot_of_cudas_memory(
    steps: int,
    fails: bool,
    written: list[str],
    small: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only when recording begins, what is written when, and that recording ends: the rest needs a GPU."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_private, "record_memory", lambda entries: calls.append(f"record {entries}"))
    monkeypatch.setattr(torch_private, "dump_memory", lambda file: calls.append(file.name))
    words = small("profiler=memory", "profiler.wait=2", "profiler.warmup=1", "profiler.active=1", "train.device=cpu")
    cfg = wordrun.compose([*words, f"train.max_iters={steps}", "optimizer.gas=1", f"hydra.run.dir={tmp_path}/run"])
    ends = pytest.raises(UserError, match="out of memory on") if fails else contextlib.nullcontext()
    with ends, wordrun.Trainer(cfg) as trainer:
        if fails:
            block = trainer.backend.parts[0].blocks["0"]
            block.mlp = Hungry(block.mlp)
        trainer.train()
    assert calls == ["record 100000", *written, "record 0"]
