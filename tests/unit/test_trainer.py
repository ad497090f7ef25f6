"""The trainer in one process: what a run leaves behind, what it promises, and how it fails."""

from __future__ import annotations

import base64
import gc
import json
import logging
import math
import os
import random
import re
import shlex
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.image import imread

import wordrun
from wordrun import cli
from wordrun.backend.ddp import DDPBackend
from wordrun.commands import export, generate
from wordrun.common.errors import ConfigError, WorldError
from wordrun.config.schema import Config
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.tokenizers.subword import GPT2_URLS, _cached_name
from wordrun.dist import torch_private
from wordrun.track import metrics_jsonl
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.track.plots import draw, smooth
from wordrun.train.hooks import standard
from wordrun.train.hooks.base import Hook
from wordrun.train.language import EPOCHS, EPOCHS_WITH_DROPOUT
from wordrun.train.trainer import Summary, Trainer

if TYPE_CHECKING:
    from conftest import Draws, Start

Words = Callable[..., list[str]]
ROOT = Path(__file__).parent.parent.parent


def run(words: list[str], folder: Path) -> tuple[Summary, list[dict[str, Any]]]:
    """Train as ``words`` say into ``folder``; return the summary and the lines of metrics."""
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"])) as trainer:
        summary = trainer.train()
    return summary, read(folder)


def losses(words: list[str], folder: Path) -> list[float]:
    return [line["loss"] for line in run([*words, "train.log_interval=1"], folder)[1] if "loss" in line]


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


# A run that learns, and its directory


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, drawing: Draws) -> tuple[Path, Summary, Config]:
    """A few hundred small steps on the sample."""
    folder = tmp_path_factory.mktemp("learned") / "run"
    words = [
        *shlex.split("""
        model=nano
        data=sample tracker=jsonl model.n_layer=2 model.n_head=2 model.n_embd=32 model.block_size=16
        model.batch_size=16 optimizer.learning_rate=0.01 optimizer.warmup_iters=10 train.max_iters=250
        train.eval_interval=100 train.eval_iters=8 train.sample_interval=100 train.sample_tokens=40
        train.dtype=auto
    """),
        f"hydra.run.dir={folder}",
    ]
    cfg = wordrun.compose(words)
    with drawing(), Trainer(cfg) as trainer:
        summary = trainer.train()
    return folder, summary, cfg


def test_the_loss_falls_far_below_the_entropy_of_characters(learned: tuple[Path, Summary, Config]) -> None:
    counts = Counter(sample_text())
    entropy = -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
    _, summary, _ = learned
    assert summary.val_loss is not None
    assert summary.val_loss < 0.75 * entropy
    assert summary.loss is not None
    assert abs(summary.loss - summary.val_loss) < 0.4


def test_the_run_directory_has_these_files(learned: tuple[Path, Summary, Config]) -> None:
    folder = learned[0]
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert {name for name in files if not name.startswith("checkpoints/")} == set(
        shlex.split("""
        config.yaml run.json metrics.jsonl log.txt samples.txt plots/loss.png plots/throughput.png
        .lock report.html
    """)
    )
    assert "checkpoints/step-00000250/manifest.json" in files


def test_metrics_have_the_names_and_steps_of_the_design(learned: tuple[Path, Summary, Config]) -> None:
    lines = read(learned[0])
    training = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "val_loss" in line]
    names = (
        "step loss lr grad_norm dt dtf dtb dt_data dt_comm dt_optimizer dt_hooks slowest_rank slowest_by "
        "sps sps_per_gpu tps tps_per_gpu mfu spike_score spikes memory memory_peak tokens time"
    )
    assert all(list(line) == names.split() for line in training)
    assert all(list(line) == ["step", "val_loss", "val_perplexity", "val_bpb"] for line in evaluations)
    assert [line["step"] for line in training] == [1, *range(10, 251, 10)]
    assert [line["step"] for line in evaluations] == [100, 200, 250]
    assert [line["tokens"] for line in training] == [line["step"] * 16 * 16 for line in training]
    assert all(line["dt"] >= line["dtf"] + line["dtb"] > 0 for line in training)
    assert all(a["time"] < b["time"] for a, b in pairwise(training))


def test_the_record_says_who_with_what_and_how_it_ended(learned: tuple[Path, Summary, Config]) -> None:
    folder, summary, _ = learned
    told = record(folder)
    assert told["exit_reason"] == "finished"
    assert told["versions"]["torch"] == str(torch.__version__)
    assert told["versions"]["wordrun"] == wordrun.__version__
    assert told["world"]["size"] == 1
    assert told["data"]["origin"].startswith("embedded sample")
    assert told["data"]["banner"] is None
    assert (told["tokens"], told["steps"]) == (250 * 256, 250) == (summary.tokens, summary.steps)
    assert (told["loss"], told["val_loss"]) == (summary.loss, summary.val_loss)
    assert told["best_val_loss"] == min(line["val_loss"] for line in read(folder) if "val_loss" in line)
    assert told["seconds"] > 0
    assert told["start"] <= told["end"]
    assert {"weights", "data"} <= set(told["seeds"])
    assert told["wordrun_commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told["wordrun_commit"])


def test_the_config_can_be_read_back(learned: tuple[Path, Summary, Config]) -> None:
    folder, _, cfg = learned
    content = yaml.safe_load((folder / "config.yaml").read_text())
    assert content["model"]["n_embd"] == 32
    assert content["run_dir"] == cfg.run_dir == str(folder)


def test_samples_come_at_their_steps(learned: tuple[Path, Summary, Config]) -> None:
    text = (learned[0] / "samples.txt").read_text()
    assert re.findall(r"^--- step (\d+) ---$", text, re.MULTILINE) == ["100", "200", "250"]
    parts = re.split(r"--- step \d+ ---\n", text)[1:]
    assert all(len(part) == 1 + 40 + 2 for part in parts)  # the prompt, the tokens, two line breaks
    assert len(set(parts)) == 3


def test_the_log_explains_and_reports(learned: tuple[Path, Summary, Config]) -> None:
    text = (learned[0] / "log.txt").read_text()
    assert "batch: 16 sequences = 1 rank x 16 x 1 accumulation" in text
    assert "step 250/250  loss" in text
    assert f"validation loss {learned[1].val_loss:.4f}" in text
    assert "plots/loss.png" in text


def steps_shown(folder: Path) -> list[int]:
    """Return the steps whose metrics a run's log shows."""
    return [int(step) for step in re.findall(r"INFO step (\d+)/\d+  loss", (folder / "log.txt").read_text())]


def test_the_log_has_a_line_of_metrics_every_few_seconds(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small("train.max_iters=20", "train.log_interval=1")
    monkeypatch.setattr(standard, "LINE_S", 1000)
    _, lines = run(words, tmp_path / "rare")
    assert steps_shown(tmp_path / "rare") == [1, 20]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    monkeypatch.setattr(standard, "LINE_S", 0)
    run(words, tmp_path / "all")
    assert steps_shown(tmp_path / "all") == list(range(1, 21))


def test_the_log_shows_the_last_step_of_a_run_that_stops_early(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Hook):
        def __init__(self) -> None:
            self.step = 0

        def after_step(self, trainer: Any) -> None:
            self.step = trainer.step

        def stop_reason(self) -> str:
            return "enough" if self.step == 7 else ""

    monkeypatch.setattr(standard, "LINE_S", 1000)
    words = small("train.max_iters=20", "train.log_interval=1", f"hydra.run.dir={tmp_path}/run")
    with Trainer(wordrun.compose(words), hooks=[Enough()]) as trainer:
        trainer.train()
    assert steps_shown(tmp_path / "run") == [1, 7]


def test_the_plot_marks_lines_with_more_spikes_than_before(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for step, count in ((10, 0), (20, 2), (30, 2), (40, 1), (50, 2)):  # after step 30, rolled back
        line = {"step": step, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "sps": 1.0, "mfu": None}
        lines += [{**line, "spike_score": None, "spikes": count}, line]
    plots = []
    for some, rows in ((lines[::2], [1, 4]), (lines[1::2], [])):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in some) + '{"step": 6')
        assert metrics_jsonl.read(tmp_path).spikes() == rows
        plots.append(draw(metrics_jsonl.read(tmp_path), "spikes")["loss.png"])
    assert plots[0] != plots[1]


@pytest.mark.parametrize("name", ["loss", "throughput"])
def test_plots_show_something(name: str, learned: tuple[Path, Summary, Config]) -> None:
    picture = imread(learned[0] / "plots" / f"{name}.png")
    assert min(picture.shape[:2]) > 300
    colors, counts = np.unique(picture.reshape(-1, picture.shape[2]).round(2), axis=0, return_counts=True)
    channel = {"loss": 2, "throughput": 1}[name]  # a blue curve, a green one; axes and text are grey
    colored = colors[:, channel] - colors[:, 0] > 0.2
    assert counts[colored].sum() > 300


def test_the_smoothed_curve_begins_with_its_first_value() -> None:
    assert smooth([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]  # too few to smooth
    assert smooth([2.0] * 400) == pytest.approx([2.0] * 400)
    noisy = smooth([2.0 + (-1) ** i for i in range(400)])
    assert noisy[0] == 3.0
    assert max(abs(value - 2) for value in noisy[200:]) < 0.1


# The sample in place of a text that cannot be downloaded


def test_a_run_on_the_sample_is_called_so(small: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*small("data=shakespeare", "data.url=http://127.0.0.1:1/none"), "data.path=missing.txt"]
    assert cli.main(words) == 0
    (file,) = tmp_path.glob("outputs/*/*/*/run.json")
    folder = file.parent
    assert folder.parent.parent.name == "sample"
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["name"] == "sample"
    assert record(folder)["data"]["banner"].startswith("NOT TRAINING ON SHAKESPEARE")
    assert "NOT TRAINING ON SHAKESPEARE" in capsys.readouterr().out
    assert cli.main([*words, "train.max_iters=6", f"train.resume={folder.relative_to(tmp_path)}"]) == 0
    assert record(folder)["steps"] == 6
    assert cli.main([*words, "hydra.run.dir=chosen"]) == 0
    assert (tmp_path / "chosen" / "run.json").exists()


# From Python


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_many_epochs_are_a_warning_that_says_what_to_change(
    dropout: float, small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = small(f"model.dropout={dropout}", "train.max_iters=2000", f"hydra.run.dir={tmp_path / 'run'}")
    most = EPOCHS_WITH_DROPOUT if dropout else EPOCHS
    with Trainer(wordrun.compose(words)) as trainer:
        for epochs in (most, 2 * most):
            trainer.task.announce(epochs * trainer.task.sequences.per_epoch)
    said = capfd.readouterr().out
    change = "a larger model.dropout" if dropout else "model.dropout=0.2"
    assert said.count("may memorize it") == 1
    assert (
        f"WARNING the run makes {2 * most} passes over its training text and may memorize it, so that the validation "
        f"loss rises: use train.max_iters=1000 or fewer, more text, {change} or hooks=[early_stop]"
    ) in said


@pytest.mark.parametrize("name", [None, *sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))])
def test_what_is_shipped_has_not_too_many_epochs(name: str | None) -> None:
    cfg = wordrun.compose([f"experiment={name}"] if name else ["data=shakespeare"])
    if cfg.data.name not in ("shakespeare", "sample"):
        pytest.skip("not a text of a million characters")
    examples = cfg.train.max_iters * (cfg.train.global_batch_size or cfg.model.batch_size)
    epochs = examples * cfg.model.block_size / (0.9 * 1_115_394)
    assert epochs < (EPOCHS_WITH_DROPOUT if cfg.model.dropout else EPOCHS)


def test_from_python(small: Words, tmp_path: Path) -> None:
    with wordrun.Trainer(wordrun.compose(small("hydra.run.dir=here"))) as trainer:
        summary = trainer.train()
        assert trainer.evaluate() == summary.val_loss == trainer.evaluate()
        text = trainer.generate("The fox", 12, seed=1)
        assert text.startswith("The fox")
        assert len(text) == 7 + 12
        widths: list[int] = []
        trainer.backend.parts[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
        trainer.generate("The", 4)
        assert widths == [3, 1, 1, 1], "with a KV cache"
        assert trainer.generate("The fox", 12, seed=1) == text
        assert trainer.generate("The fox", 12, seed=2) != text
        with pytest.raises(ConfigError, match="'Ü'"):
            trainer.generate("Über")
        with pytest.raises(ConfigError, match="prompt=''"):
            trainer.generate("")
    assert summary.steps == 4
    assert (tmp_path / "here" / "run.json").exists()


def surroundings() -> dict[str, Any]:
    logger = logging.getLogger("wordrun")
    return {
        "group": torch.distributed.is_initialized(),
        "handlers": (list(logger.handlers), logger.level, logger.propagate, list(logging.getLogger().handlers)),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "cwd": Path.cwd(),
        "env": dict(os.environ),
        "signals": (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
        "threads": {thread.name for thread in threading.enumerate() if not thread.daemon},
    }


def test_two_trainers_follow_each_other_without_a_trace(small: Words, tmp_path: Path) -> None:
    words = small("model.dropout=0.2")
    losses(words, tmp_path / "warm-up")  # libraries initialize themselves once, matplotlib's variables for example
    before = surroundings()
    first, second = (losses(words, tmp_path / name) for name in "ab")
    after = surroundings()
    assert first == second
    assert len(first) == 4
    assert [name for name in before if before[name] != after[name]] == []


def test_without_a_report_nothing_is_drawn(small: Words, tmp_path: Path, drawing: Draws) -> None:
    with drawing():
        losses(small("train.report=false"), tmp_path / "run")
    assert read(tmp_path / "run")
    assert not {"plots", "report.html"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_a_trainer_that_is_still_open_changes_nothing_in_the_next(small: Words, tmp_path: Path) -> None:
    """As in a notebook: ``trainer = Trainer(...)`` again, and the old one is collected some time later."""
    words = small("model.dropout=0.2")
    expected = losses(words, tmp_path / "alone")
    trainer = Trainer(wordrun.compose([*words, "train.log_interval=1", f"hydra.run.dir={tmp_path}/first"]))
    trainer.train()
    trainer = Trainer(wordrun.compose([*words, "train.log_interval=1", f"hydra.run.dir={tmp_path}/second"]))
    torch.rand(3)  # somebody else draws from the global stream
    trainer.train()
    trainer.close()
    for name in ("first", "second"):
        assert [line["loss"] for line in read(tmp_path / name) if "loss" in line] == expected
        assert "step 4/4  val_loss" in (tmp_path / name / "log.txt").read_text()
    gc.collect()  # the first trainer
    assert logging.getLogger("wordrun").handlers == []


def test_a_second_trainer_on_another_device_is_refused(small: Words, tmp_path: Path) -> None:
    with (
        Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))),
        pytest.raises(WorldError, match="device=cuda, but this process has joined its group with cpu"),
    ):
        Trainer(wordrun.compose(small("train.device=cuda", f"hydra.run.dir={tmp_path}/other")))


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": 0}, {"length": -1}])
def test_impossible_sampling_is_refused(wrong: dict[str, Any], small: Words, tmp_path: Path) -> None:
    with Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        name, value = next(iter(wrong.items()))
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            trainer.generate("The", **wrong)


def test_a_prompt_outside_the_vocabulary_names_its_key(small: Words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.sample_prompt: .*lacks: 'é'.*Leave them out"):
        Trainer(wordrun.compose(small("train.sample_prompt='café'", f"hydra.run.dir={tmp_path}/run")))


def test_a_trainer_that_cannot_be_built_leaves_no_trace(small: Words, tmp_path: Path) -> None:
    cfg = wordrun.compose(small(f"hydra.run.dir={tmp_path}/run", "model.block_size=10_000"))
    before = surroundings()
    with pytest.raises(ConfigError, match=r"model\.block_size=10000 needs at least 20000 tokens"):
        Trainer(cfg)
    after = surroundings()
    assert [name for name in before if before[name] != after[name]] == []
    assert not (tmp_path / "run").exists()


def test_a_run_may_be_closed_twice(small: Words, tmp_path: Path) -> None:
    trainer = Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run")))
    trainer.close()
    trainer.close()
    assert not torch.distributed.is_initialized()


def test_a_config_made_by_hand_is_checked_too(small: Words, tmp_path: Path) -> None:
    cfg = wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))
    with pytest.raises(ConfigError, match=r"train\.max_iters=0"):
        Trainer(replace(cfg, train=replace(cfg.train, max_iters=0)))


# Promises


@pytest.fixture(scope="module")
def baseline(small: Words, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of the small run as it is."""
    return run(small("train.log_interval=1"), tmp_path_factory.mktemp("baseline") / "run")[1]


def of(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def test_accumulation_is_the_large_batch(small: Words, tmp_path: Path) -> None:
    words = small("train.max_iters=20", "optimizer.warmup_iters=2", "train.eval_interval=0", "train.sample_tokens=0")
    whole = losses([*words, "model.batch_size=8"], tmp_path / "whole")
    parts = losses([*words, "model.batch_size=2", "train.global_batch_size=8"], tmp_path / "parts")
    assert len(whole) == 20
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    assert whole[-1] < whole[0] - 0.1


def test_the_seed_decides_the_run(small: Words, tmp_path: Path, baseline: list[dict[str, Any]]) -> None:
    default = losses(small("train.seed=1337"), tmp_path / "same")
    other = losses(small("train.seed=1"), tmp_path / "other")
    assert default == of(baseline, "loss")
    assert not set(other) & set(default)


def test_evaluation_and_samples_change_nothing_else(small: Words, tmp_path: Path) -> None:
    words = small("model.dropout=0.2", "train.max_iters=8")
    busy = losses([*words, "train.eval_interval=1", "train.sample_interval=1"], tmp_path / "busy")
    assert busy == losses([*words, "train.eval_interval=0", "train.sample_tokens=0"], tmp_path / "quiet")


def test_dropout_acts_in_training_and_not_in_evaluation(
    small: Words, tmp_path: Path, baseline: list[dict[str, Any]]
) -> None:
    words = small(f"hydra.run.dir={tmp_path}/run", "train.max_iters=1")
    dropped = losses([*words, "model.dropout=0.5"], tmp_path / "dropped")
    kept = of(baseline, "loss")[0]  # the same weights and the same sequences
    assert dropped[0] != kept
    assert dropped[0] == pytest.approx(kept, rel=0.1)
    with Trainer(wordrun.compose([*words, "model.dropout=0.5"])) as trainer:
        assert trainer.evaluate() == trainer.evaluate()
        assert trainer.backend.parts[0].training


def test_clipping_limits_what_a_step_changes(small: Words, tmp_path: Path, baseline: list[dict[str, Any]]) -> None:
    words = small("train.log_interval=1", "optimizer.grad_clip=1e-9")  # next to Adam's epsilon, so that it shows
    clipped = of(run(words, tmp_path / "run")[1], "grad_norm")
    assert clipped[0] == of(baseline, "grad_norm")[0] > 0.1  # as it was before clipping
    assert clipped[1:] != of(baseline, "grad_norm")[1:]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_a_processor_with_bf16_instructions_is_known_as_one() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    limited = "ONEDNN_MAX_CPU_ISA" in os.environ
    assert torch_private.cpu_is_fast_at_bf16() == (has_bf16 and not limited)


@pytest.mark.parametrize("has_bf16", [True, False], ids=["with bf16", "without bf16"])
@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32", "auto"])
def test_a_precision_that_the_processor_lacks_is_replaced_and_said_once(
    asked: str,
    has_bf16: bool,
    small: Words,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "cpu_is_fast_at_bf16", lambda: has_bf16)
    monkeypatch.setattr(time, "thread_time", cycle([0.0, 2.0, 0.0, 1.0]).__next__)  # a product in fp32, one in bf16
    folder = tmp_path / "run"
    run(small(f"train.dtype={asked}"), folder)
    computed = "bfloat16" if asked in ("bf16", "auto") and has_bf16 else "float32"
    assert record(folder)["dtype"] == computed
    said = capfd.readouterr().out.count(f"train.dtype={asked}: this processor has no fast {asked}")
    assert said == (1 if asked in ("bf16", "fp16") and computed == "float32" else 0)


# How it fails


def main(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command with ``words`` in this process; return its exit status and what it said on stderr."""
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    return status, capfd.readouterr().err


def test_a_run_is_never_overwritten(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(small(), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    status, said = main(small(f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 2
    assert "already contains a run" in said
    assert len(said.partition("\nmore: docs/")[0].splitlines()) == 1
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_an_impossible_run_directory(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    status, said = main(small(f"hydra.run.dir={tmp_path}/file/run"), capfd)
    assert status == 2
    assert f"cannot write to the run directory {tmp_path}/file/run: Not a directory" in said
    assert "hydra.run.dir=DIR" in said
    assert len(said.partition("\nmore: docs/")[0].splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_run_directory(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    status, said = main(small(f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 2
    assert "Permission denied" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "samples.txt"])
def test_a_full_disk_is_one_message(name: str, small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    status, said = main(small(f"hydra.run.dir={folder}"), capfd)
    assert status == 1
    assert said.count("No space left on device") == 1
    assert "Traceback" not in said
    assert "No space left on device" in record(folder)["exit_reason"]
    if name != "metrics.jsonl":
        assert [line["step"] for line in read(folder) if "loss" in line][:1] == ([1] if name == "samples.txt" else [])


def test_a_vocabulary_smaller_than_the_datas(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = main(small("model.vocab_size=5", f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 2
    assert "model.vocab_size=5 is too small for data=text" in said
    assert not (tmp_path / "run").exists()


def test_an_unknown_character_in_the_prompt(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = main(small('train.sample_prompt="Größe"', f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 2
    assert "'Göß'" in said or "'öß'" in said
    assert len(said.partition("\nmore: docs/")[0].splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_an_accelerator_that_is_not_there(small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = "xpu" if torch.cuda.is_available() else "cuda"
    status, said = main(small(f"train.device={missing}", f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 2
    assert f"device={missing}" in said
    assert "use device=auto" in said


def test_a_bug_is_a_traceback_with_its_host(
    small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(DDPBackend, "train_step", broken)
    status, said = main(small(f"hydra.run.dir={tmp_path}/run"), capfd)
    assert status == 1
    assert said.count("Traceback") == said.count("ZeroDivisionError: a bug of ours") == 1
    assert f"failed on host {os.uname().nodename}" in said
    assert record(tmp_path / "run")["exit_reason"] == "ZeroDivisionError: a bug of ours"


def test_an_interrupted_run_is_complete(
    small: Words, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")  # with plots
    folder = tmp_path / "run"
    metrics_jsonl = folder / "metrics.jsonl"
    words = small("train.max_iters=1_000_000", "train.log_interval=1", f"hydra.run.dir={folder}")
    process = start("wordrun", *words)
    _wait_for(lambda: metrics_jsonl.exists() and len(metrics_jsonl.read_text().splitlines()) > 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    told = record(folder)
    assert (process.returncode, err) == (130, ""), (told, out)
    assert told["exit_reason"] == "stopped by SIGINT, saved"
    lines = read(folder)
    assert told["steps"] == lines[-1]["step"] >= 3
    assert f"stopped by SIGINT, saved (at step {told['steps']})" in out
    assert (folder / "plots" / "loss.png").exists()


def _wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_loss_that_is_not_a_number_is_still_json(small: Words, tmp_path: Path) -> None:
    words = small("optimizer.learning_rate=1e30", "optimizer.warmup_iters=0", "optimizer.grad_clip=0")
    lines = run([*words, "train.sample_tokens=0", "train.max_iters=1"], tmp_path / "run")[1]
    assert lines[-1]["val_loss"] is None
    json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_training_needs_no_vocabulary(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's tokens train without the text that they stand for; samples need it."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    np.save(tmp_path / "train.npy", np.array([50256, *range(200)], dtype=np.uint16))
    folder = tmp_path / "run"
    words = small(
        "data=shards", f"data.path={tmp_path}", "tokenizer=gpt2", "data.align=true", f"hydra.run.dir={folder}"
    )
    assert main(words, capfd)[0] == 0
    missing = f"GPT-2's vocabulary is not in tiktoken's cache ({tmp_path / 'cache'})"
    assert f"no samples: {missing}" in (folder / "log.txt").read_text()
    assert not (folder / "samples.txt").exists()
    assert record(folder)["data"]["vocab_size"] == 50257
    assert generate.main([f"run={folder}", "length=1"]) == 1
    assert missing in capfd.readouterr().err
    assert export.main([f"run={folder}", "out=folder"]) == 0
    assert f"exported without its tokenizer: {missing}" in capfd.readouterr().err
    assert not Path("folder/tokenizer.json").exists()
    assert json.loads(Path("folder/config.json").read_text())["eos_token_id"] == 50256

    # Later, or elsewhere, it is there.
    (tmp_path / "cache").mkdir()
    words_of_bytes = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "cache" / _cached_name(next(iter(GPT2_URLS)))).write_text(words_of_bytes)
    assert generate.main([f"run={folder}", "length=1", "prompt=Hello"]) == 0
    assert capfd.readouterr().out.startswith("Hello")
