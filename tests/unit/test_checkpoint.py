"""Checkpoints of one process: what is on the disk, what is not taken for one, and how a run goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun import cli
from wordrun.backend import mixed_precision
from wordrun.backend.ddp import DDPBackend
from wordrun.checkpoint import folder as folders, shards
from wordrun.checkpoint.load import find
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.registry import parts
from wordrun.config.schema import from_plain, to_plain
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.train import rng
from wordrun.train.hooks import standard
from wordrun.train.hooks.base import Hook
from wordrun.train.stop import Interrupted, StopSignal
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]
SAVING = tuple(
    shlex.split("""
    model=nano
    train.max_iters=12 train.log_interval=1 train.eval_interval=4 train.checkpoint_interval=3
    train.save_best=false train.keep_checkpoints=9 train.sample_tokens=0 model.dropout=0.2
    optimizer.warmup_iters=2
""")
)


class Act(Hook):
    """A hook that does something after a step."""

    def __init__(self, step: int, action: Callable[[Trainer], Any]) -> None:
        self.step, self.action = step, action

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            self.action(trainer)


def train(words: list[str], folder: Path, *hooks: Any) -> Trainer:
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"]), hooks=hooks) as trainer:
        trainer.train()
    return trainer


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """Return everything in metrics.jsonl that does not depend on the clock."""
    keys = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens")
    return [tuple(line.get(key) for key in keys) for line in read(folder)]


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def steps(folder: Path) -> list[int]:
    return [each.step for each in folders.all_in(folder)]


@pytest.fixture(scope="module")
def whole(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody has stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small(*SAVING), folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run that a test may spoil."""
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


# What is on the disk


def test_a_manifest_says_what_is_there(whole: Path) -> None:
    assert steps(whole) == [3, 6, 9, 12]
    assert (whole / "checkpoints/latest").resolve().name == "step-00000012"
    folder = folders.all_in(whole)[-1]
    manifest = folder.check()
    on_disk = {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json", "shards-00000.safetensors"}
    assert manifest["shards"] == 1, "each has its checksums in its header"
    assert (manifest["step"], manifest["position"], manifest["tokens"]) == (12, 48, 48 * 8)
    assert manifest["layout"] == [1, 1, 1, 1, 1]


def test_a_config_comes_back_typed(small: Words) -> None:
    for more in ([], ["model=llama_debug", "train.backend=3D", "tracker=wandb"]):
        cfg = wordrun.compose(small(*more))
        assert from_plain(json.loads(json.dumps(to_plain(cfg)))) == type(cfg)(**{**vars(cfg), "run_dir": ""})
    plain = to_plain(cfg)
    plain["train"]["of_the_future"] = 1
    with pytest.raises(UserError, match=r"train\.of_the_future, which this version of wordrun does not know"):
        from_plain(plain)
    plain["train"] = {**to_plain(cfg)["train"], "max_iters": "9"}
    with pytest.raises(UserError, match=r"train\.max_iters='9', which should be of type int$"):
        from_plain(plain)


def test_weights_are_found_by_one_process(whole: Path, small: Words, tmp_path: Path) -> None:
    saved = find(whole)
    weights = dict(saved.weights())
    assert saved.step == 12
    assert json.loads(saved.tokenizer_json)["kind"] == "char"
    with Trainer(wordrun.compose(small(*SAVING, f"train.resume={whole}"))) as trainer:
        ours = dict(trainer.backend.parts[0].named_parameters())
        assert weights.keys() == ours.keys()
        assert all(torch.equal(weights[name], ours[name]) for name in ours)
        assert trainer.step == 12
    assert find(whole, "6").step == 6
    assert find(whole / "checkpoints/latest").step == 12
    with pytest.raises(UserError, match="has no checkpoint 7: available are latest and steps 3, 6, 9, 12"):
        find(whole, "7")
    with pytest.raises(UserError, match="is not a folder"):
        find(tmp_path / "nothing")
    with pytest.raises(UserError, match="contains no checkpoint"):
        find(tmp_path)


def test_the_last_and_the_best_are_kept(small: Words, tmp_path: Path) -> None:
    words = small(*SAVING, "train.keep_checkpoints=1", "train.save_best=true", "train.eval_interval=5")
    train(words, tmp_path / "run", Act(5, lambda trainer: trainer.state.record_evaluation({"val_loss": 0.0})))
    assert steps(tmp_path / "run") == [5, 12]
    assert (tmp_path / "run/checkpoints/best").resolve().name == "step-00000005"
    assert find(tmp_path / "run", "best").step == 5
    assert not list((tmp_path / "run/checkpoints").glob(".step*"))


def test_without_an_interval_there_are_none(small: Words, tmp_path: Path) -> None:
    train(small("train.checkpoint_interval=0"), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_rng_states_survive_as_bytes() -> None:
    before = rng.capture()
    data = rng.to_tensor(before)
    drawn = [np.random.rand(), torch.rand(()).item()]
    rng.restore(rng.from_tensor(data))
    assert [np.random.rand(), torch.rand(()).item()] == drawn


@pytest.mark.parametrize(("ranks", "rows"), [(1, 5), (3, 7), (8, 7)])
def test_every_shard_has_one_writer(ranks: int, rows: int) -> None:
    from wordrun.dist.mesh import Layout

    tensors = {str(i): torch.empty(rows * (i + 1), 2) for i in range(10)}
    written = [[p.name for p in shards.to_write(tensors, Layout(replicate=ranks), r).shards] for r in range(ranks)]
    assert sorted(name for names in written for name in names) == sorted(tensors)
    loads = [sum(tensors[name].numel() for name in names) for names in written]
    assert max(loads) - min(loads) <= max(t.numel() for t in tensors.values())


# Resuming


def test_a_run_that_goes_on_equals_one_that_never_stopped(whole: Path, small: Words, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small(*SAVING, "train.max_iters=8", "optimizer.lr_decay_iters=12"), folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "los')  # as a run leaves it that was killed
    with pytest.raises(ConfigError, match=r"optimizer\.lr_decay_iters is 12 in the checkpoint and null here"):
        train(small(*SAVING, "train.resume=auto"), folder)
    trainer = train(small(*SAVING, "train.resume=auto", "optimizer.lr_decay_iters=12"), folder)
    found = figures(folder)
    # The evaluation after the last step of the shorter run is the only difference.
    assert [line for line in found if line[0] != 8 or line[1] is not None][:8] == figures(whole)[:8]
    assert found[-2:] == figures(whole)[-2:]
    assert trainer.summary().tokens == 12 * 4 * 8
    assert [part["exit_reason"] for part in record(folder)["earlier"]] == ["finished"]
    assert record(folder)["resumed_from"] == {"run": str(folder), "step": 8, "source": "disk"}
    assert f"resumed from {folder}/checkpoints/step-00000008 at step 8" in (folder / "log.txt").read_text()
    times = [line["time"] for line in read(folder) if "time" in line]
    assert times == sorted(times)


def test_a_branch_has_the_history_of_its_origin(whole: Path, small: Words, tmp_path: Path) -> None:
    words = small(*SAVING, f"train.resume={whole}/checkpoints/step-00000006")
    with pytest.raises(
        ConfigError, match=r"is step 6, but the run has a checkpoint of step 12: add hydra\.run\.dir=DIR"
    ):
        Trainer(wordrun.compose(words))
    train(words, tmp_path / "branch")
    assert figures(tmp_path / "branch") == figures(whole)
    assert steps(whole) == [3, 6, 9, 12]


def test_a_branch_that_is_begun_again_goes_on(whole: Path, small: Words, tmp_path: Path) -> None:
    words = small(*SAVING, f"train.resume={whole}/checkpoints/step-00000006")
    branch = tmp_path / "branch"
    with pytest.raises(Interrupted):
        train(words, branch, Act(10, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)))
    assert train(words, branch).start.step == 10
    assert figures(branch) == figures(whole)
    with pytest.raises(ConfigError, match=r"already contains a run, which train\.resume=.* would overwrite"):
        train(small(*SAVING, f"train.resume={whole}/checkpoints/step-00000009"), branch)


def test_a_copied_checkpoint_begins_a_run_of_its_own(whole: Path, small: Words, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoints/step-00000009", tmp_path / "mine/kept")
    cfg = wordrun.compose(small(*SAVING, f"train.resume={tmp_path}/mine/kept"))
    assert str(tmp_path / "mine") not in cfg.run_dir
    assert train(small(*SAVING, f"train.resume={tmp_path}/mine/kept"), tmp_path / "run").start.step == 9


def test_a_link_to_a_run_is_that_run(whole: Path, copy: Path, small: Words, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(copy)
    shutil.rmtree(copy / "checkpoints/step-00000012")
    assert train(small(*SAVING, "train.resume=auto"), tmp_path / "link").start.source == copy.resolve()
    assert figures(copy) == figures(whole)


def test_with_few_lines_a_run_goes_on_too(copy: Path, small: Words) -> None:
    """The progress bar has no figures then until the first line."""
    shutil.rmtree(copy / "checkpoints/step-00000012")
    assert train(small(*SAVING, "train.resume=auto", "train.log_interval=10"), copy).step == 12


def test_checkpoints_of_a_past_that_is_no_more_go(copy: Path, small: Words) -> None:
    spoil("truncated", copy / "checkpoints/step-00000012/tensors.json")
    words = small(*SAVING, "train.resume=auto", "train.keep_checkpoints=1")
    train(words, copy, Act(10, lambda trainer: trainer.save()))
    assert steps(copy) == [12]
    assert find(copy).step == 12


def test_a_run_that_went_on_meanwhile_is_not_overwritten(copy: Path, small: Words) -> None:
    newest = copy / "checkpoints/step-00000012"
    newest.rename(copy / "later")
    with Trainer(wordrun.compose(small(*SAVING, f"train.resume={copy}"))) as trainer:
        (copy / "later").rename(newest)  # by the one that had the lock
        with pytest.raises(ConfigError, match="has advanced to step 12 while this one waited"):
            trainer.train()


def test_a_failed_last_save_is_not_called_saved(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def stop(trainer: Trainer) -> None:
        trainer.checkpoints.wait()
        monkeypatch.setattr(shards, "write", fail)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        train(small(*SAVING), tmp_path / "run", Act(5, stop))
    assert stopped.value.exit_status == 143
    assert record(tmp_path / "run")["exit_reason"] == "stopped by SIGTERM"
    assert steps(tmp_path / "run") == [3]


def test_a_slow_save_is_waited_for(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one, and by a run that fails."""
    writing: list[str] = []
    last, failed = threading.Event(), threading.Event()

    def slowly(folder: Path, *args: Any, write: Any = shards.write) -> None:
        assert not writing, "one at a time"
        writing.append(folder.name)
        if "00000009" in folder.name:
            last.set()
            assert failed.wait(60)
        time.sleep(0.5)
        write(folder, *args)
        writing.clear()

    def fail(trainer: Trainer) -> None:
        assert last.wait(60)
        assert writing == [".step-00000009.new"], "training goes on meanwhile"
        failed.set()
        raise RuntimeError("on purpose")

    monkeypatch.setattr(shards, "write", slowly)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(small(*SAVING), tmp_path / "run", Act(10, fail))
    assert steps(tmp_path / "run") == [3, 6, 9, 10]  # a hook that fails costs no steps


def test_a_finished_run_has_nothing_to_do(whole: Path, small: Words, capfd: pytest.CaptureFixture[str]) -> None:
    before = (whole / "run.json").read_bytes()
    assert cli.main(small(*SAVING, "train.resume=auto", f"hydra.run.dir={whole}")) == 0
    assert "nothing to do at step 12: the run is finished" in capfd.readouterr().out
    assert (whole / "run.json").read_bytes() == before


def test_auto_is_the_default_after_a_requeue(
    whole: Path, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"already contains a run: resume it with train\.resume=auto"):
        train(small(*SAVING), whole)
    for name, value in (("SLURM_RESTART_COUNT", "1"), ("WORDRUN_RESUME", "auto")):
        monkeypatch.setenv(name, value)
        shutil.rmtree(folder, ignore_errors=True)
        train(small(*SAVING, "train.max_iters=4", "optimizer.lr_decay_iters=12"), folder)  # nothing there yet
        assert train(small(*SAVING, "optimizer.lr_decay_iters=12"), folder).start.step == 4
        monkeypatch.delenv(name)


def test_the_log_has_no_step_twice(copy: Path, small: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """But what else was said stays."""
    monkeypatch.setattr(standard, "LINE_S", 0)
    shutil.rmtree(copy / "checkpoints/step-00000012")
    shutil.rmtree(copy / "checkpoints/step-00000009")
    before = (copy / "log.txt").read_text()
    train(small(*SAVING, "train.resume=auto"), copy)
    after = (copy / "log.txt").read_text()
    told = re.findall(r"INFO step (\d+)/12 +(loss|val_loss)", after)
    assert [step for step, what in told if what == "loss"] == ["1", *map(str, range(7, 13))]
    assert [step for step, what in told if what == "val_loss"] == ["4", "8", "12"]
    assert before.count("INFO run directory") < after.count("INFO run directory")
    assert after.count("checkpoint at step 9:") == 2


def test_the_loss_scaler_goes_on(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16, which a CPU computes, if slowly: the scale grows or falls with what has overflown."""
    monkeypatch.setattr(mixed_precision, "_is_fast", lambda dtype, device: True)
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**24, backoff_factor=2.0**-4, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    words = small(*SAVING, "train.dtype=fp16", "train.on_nonfinite=skip")
    train(words, tmp_path / "whole")
    before, after = (find(tmp_path / "whole", str(step)) for step in (3, 6))
    assert before.manifest["backend"]["scaler"] != after.manifest["backend"]["scaler"]
    shards.read(after.folder, {"optimizer.norm.weight.step": (step := torch.empty(()))})
    assert 0 < step < 6, "some steps have overflown, and were skipped"
    went_on = train([*words, f"train.resume={tmp_path / 'whole/checkpoints/step-00000006'}"], tmp_path / "on")
    assert went_on.backend.dtype == torch.float16
    assert figures(tmp_path / "on") == figures(tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_starts_anew(small: Words, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small("train.checkpoint_interval=0"), folder)
    train(small("train.resume=auto", "train.log_interval=1"), folder)
    assert [line["step"] for line in read(folder) if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.n_layer=2", "model.n_layer is 1 in the checkpoint and 2 here"),
        ("model.batch_size=8", r"the global batch \(train.global_batch_size\), in sequences, is 4 in the checkpoint"),
        ("optimizer.beta2=0.95", r"optimizer.beta2 is 0.99 in the checkpoint and 0.95 here"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(whole: Path, small: Words, word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){said}.*train\.init_from={whole}"):
        Trainer(wordrun.compose(small(*SAVING, f"train.resume={whole}", word)))


def test_a_path_that_holds_nothing_is_named(whole: Path, small: Words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.resume=.*gone: .* is not a folder"):
        wordrun.compose(small(f"train.resume={tmp_path}/gone"))


def test_a_resumed_run_ignores_initial_weights(whole: Path, small: Words) -> None:
    """They may be in the user's file, to which the line that resumes a run adds only train.resume."""
    cfg = wordrun.compose(small(*SAVING, "train.init_from=gone", f"train.resume={whole}", "train.max_iters=13"))
    with Trainer(cfg) as trainer:
        assert trainer.step == 12


def test_initial_weights_from_another_run(whole: Path, small: Words, tmp_path: Path) -> None:
    words = small(f"train.init_from={whole}", "train.max_iters=1", "optimizer.learning_rate=0.5")
    trainer = train([*words, "train.log_interval=1"], tmp_path / "run")
    assert trainer.start.step == 0
    assert read(tmp_path / "run")[0]["loss"] < read(whole)[0]["loss"] - 0.01
    with pytest.raises(ConfigError, match=r"(?s)do not fit model=nano:\n  blocks\.1.*weights: model\.n_layer=1$"):
        Trainer(wordrun.compose([*words, "model.n_layer=2"]))


# Damage


def spoil(how: str, file: Path) -> None:
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["shards-00000.safetensors", "tensors.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
def test_a_damaged_checkpoint_is_passed_over(
    copy: Path, small: Words, how: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(how, copy / "checkpoints/step-00000012" / name)
    with Trainer(wordrun.compose(small(*SAVING, f"train.resume={copy}"))) as trainer:
        assert trainer.step == 9
    assert find(copy).step == 9  # which warns, too
    assert re.search(
        rf"step-00000012 is damaged: {re.escape(name)}.*; trying the previous one",
        caplog.text,
    )


def test_where_none_is_whole_it_says_so(copy: Path, small: Words) -> None:
    for folder in folders.all_in(copy):
        (folder.path / "tensors.json").unlink()
    with pytest.raises(UserError, match="this run has no intact checkpoint"):
        Trainer(wordrun.compose(small(*SAVING, f"train.resume={copy}")))


def test_what_an_interrupted_save_leaves_is_no_checkpoint(copy: Path, small: Words) -> None:
    newest = copy / "checkpoints/step-00000012"
    newest.rename(newest.with_name(".step-00000012.new"))
    trainer = train(small(*SAVING, "train.resume=auto"), copy)
    assert trainer.start.step == 9
    assert steps(copy) == [3, 6, 9, 12]
    assert not list((copy / "checkpoints").glob(".step*"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("no such luck"),
            r"written \(rank 0: no such luck\); the newest is from step 3: continue from there$",
        ),
        (
            OSError(122, "Disk quota exceeded"),
            r"written; the newest is from step 3: free some space, and continue from",
        ),
    ],
)
def test_the_last_save_that_failed_says_why(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*args: Any) -> None:
        raise error

    def spoil(trainer: Trainer) -> None:
        trainer.checkpoints.wait()
        monkeypatch.setattr(shards, "write", fail)

    with pytest.raises(UserError, match=f"the run is finished, but its last checkpoint could not be {said}"):
        train(small(*SAVING, "train.max_iters=5"), tmp_path / "run", Act(4, spoil))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a run directory whose checkpoints have room for one and a half."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place.parent
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("mode", ["true", "false"], ids=["background", "foreground"])
def test_a_full_disk_leaves_the_checkpoint_before(
    full_disk: Path, small: Words, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = small(*SAVING, "model.n_embd=32", f"train.async_save={mode}", "train.resume=auto")
    with pytest.raises(SystemExit, match="1"):
        cli.main([*words, f"hydra.run.dir={full_disk}"])
    captured = capfd.readouterr()
    said = captured.out + captured.err
    assert "the run is finished, but its last checkpoint could not be written; the newest is from step 3" in said
    assert re.search(r"the checkpoint of step 6 could not be written \(rank 0: (no space|.*No space)", said)
    reports = [line for line in captured.out.splitlines() if "could not be written (" in line]
    assert ["training continues" in line for line in reports] == [True, True, False]  # after steps 6, 9 and 12
    assert " ERROR the checkpoint of step 12 could not be written" in reports[-1]
    log = (full_disk / "log.txt").read_text()
    assert re.search(r" ERROR SaveError: the run is finished, but .* \(at step 12\)", log)
    assert said.count("the run is finished, but") == 1
    assert "more: docs/checkpoints.md#when-checkpoints-are-written" in captured.err
    assert steps(full_disk) == [3]
    assert find(full_disk).step == 3
    assert read(full_disk)[-1]["step"] == 12


def test_a_full_disk_may_stop_the_run(full_disk: Path, small: Words, capfd: pytest.CaptureFixture[str]) -> None:
    words = small(*SAVING, "model.n_embd=32", "train.on_save_error=stop", f"hydra.run.dir={full_disk}")
    with pytest.raises(SystemExit, match="1"):
        cli.main(words)
    captured = capfd.readouterr()
    assert "the checkpoint of step 6 could not be written" in captured.out + captured.err
    assert "to continue without it, use train.on_save_error=continue" in captured.out + captured.err
    assert find(full_disk).step == 3


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("when", ["training", "evaluation", "saving"])
def test_a_signal_saves_and_the_run_can_go_on(
    whole: Path, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, number: int
) -> None:
    folder = tmp_path / "run"

    told = []

    def tell(*args: Any) -> None:
        if not told:  # another one would end the run on the spot
            told.append(os.kill(os.getpid(), number))

    hooks = [Act(5, tell)] if when == "training" else []
    if when == "evaluation":
        monkeypatch.setattr(Trainer, "measure", lambda self, measure=Trainer.measure: (tell(), measure(self))[1])
    if when == "saving":
        monkeypatch.setattr(shards, "write", lambda *args, write=shards.write: (tell(), write(*args))[1])
    with pytest.raises(Interrupted) as stopped:
        train(small(*SAVING), folder, *hooks)
    monkeypatch.undo()
    assert stopped.value.exit_status == 75
    left = record(folder)
    assert left["exit_reason"] == f"stopped by {signal.Signals(number).name}, saved"
    assert left["steps"] == steps(folder)[-1] < 12
    train(small(*SAVING, "train.resume=auto"), folder)
    assert figures(folder) == figures(whole)


# Non-finite gradients


def poison(times: int, at: int) -> Any:
    """Return a hook that spoils the gradients of the step after ``at``, as often as it comes by."""
    left = [times]

    def arm(trainer: Trainer) -> None:
        parameter = trainer.backend.parts[0].norm.weight

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * torch.nan

        if left[0]:
            left[0] -= 1
            handle = parameter.register_hook(spoil)

    return Act(at, arm)


class Begin(Act):
    """A hook that does something before the first step."""

    def at_start(self, trainer: Any) -> None:
        self.action(trainer)


def test_before_the_first_update_the_learning_rate_is_not_blamed(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(trainer: Trainer) -> None:
        trainer.backend.parts[0].register_forward_hook(lambda module, args, losses: losses * torch.nan)

    def said(action: Any, *more: str) -> str:
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        with pytest.raises(UserError) as failed:
            train(small(*SAVING, "train.sample_tokens=0", *more), run, Begin(-1, action))
        return str(failed.value)

    first = "the loss of step 1 is NaN, before any update of the weights"
    check = "check losses(batch) of model=nano"
    spoil = poison(1, -1).action
    assert said(lose) == f"{first}: {check} and the data"
    assert said(lose, "train.on_nonfinite=skip") == f"{first}, 100 times in a row: {check} and the data"
    rollback = said(lose, "train.on_nonfinite=rollback")
    assert rollback == f"{first}, and no checkpoint to roll back to yet: {check} and the data"
    assert said(lose, "train.dtype=fp16") == f"{first}: {check} and the data"
    gradients = "non-finite gradients at step 1, whose loss is finite, before any update of the weights"
    derivative = "for a derivative that is not finite, such as that of a square root at 0"
    assert said(spoil) == f"{gradients}: {check} {derivative}"
    part = parts("model")["gpt"]
    monkeypatch.setitem(parts("model"), "gpt", replace(part, origin="mine/parts.py:4"))
    train(small("model=gpt", "train.max_iters=1"), tmp_path / "base")
    weights = f"train.init_from={tmp_path}/base"
    assert said(lose, "model=gpt", weights).endswith(
        f": check losses(batch) of model=gpt (mine/parts.py:4) and the data, or the weights of {weights}"
    )


def test_at_later_steps_the_loss_and_the_gradients_are_told_apart(small: Words, tmp_path: Path) -> None:
    def lose(trainer: Trainer) -> None:
        trainer.backend.parts[0].register_forward_hook(lambda module, args, losses: losses * torch.inf)

    remedy = "lower optimizer.learning_rate, or use train.on_nonfinite=skip or rollback"
    with pytest.raises(UserError, match=f"^the loss of step 3 is infinite: {remedy}"):
        train(small(*SAVING, "train.eval_interval=0"), tmp_path / "loss", Act(2, lose))
    with pytest.raises(UserError, match=f"^non-finite gradients at step 3, whose loss is finite: {remedy}"):
        train(small(*SAVING), tmp_path / "gradients", poison(1, 2))


@pytest.mark.parametrize(("spoilt", "noticed"), [(1, 1), (2, 4), (5, 8), (9, 9)])
def test_steps_that_are_not_logged_are_not_read(spoilt: int, noticed: int, small: Words, tmp_path: Path) -> None:
    """As on an accelerator, or on islands: the first step and the last are, as those that are logged."""
    words = ["train.log_interval=4", "train.eval_interval=0", "train.checkpoint_interval=0", "train.max_iters=9"]
    spoil = poison(1, spoilt - 1) if spoilt > 1 else Begin(-1, poison(1, 0).action)
    with pytest.raises(UserError, match=f"the loss of step {noticed} is|non-finite gradients at step {noticed},"):
        train(small(*SAVING, *words, "train.backend=diloco"), tmp_path / "run", spoil)


def test_by_default_the_run_stops(small: Words, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="non-finite gradients at step 8"):
        train(small(*SAVING), tmp_path / "run", poison(1, 7))
    assert steps(tmp_path / "run") == [3, 6]
    assert "non-finite gradients at step 8" in record(tmp_path / "run")["exit_reason"]
    assert "after 7 steps" in (tmp_path / "run/failures/rank-0.txt").read_text()


def test_fp16_notices_gradients_that_are_not_finite_at_any_scale(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler halves its scale after each; so many may overflow while it looks for the largest one."""
    monkeypatch.setattr(mixed_precision, "_is_fast", lambda dtype, device: True)

    def spoil(trainer: Trainer) -> None:
        trainer.backend.parts[0].norm.weight.register_hook(lambda gradient: gradient * torch.nan)

    def said(begin: int, *more: str) -> str:
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        words = small(*SAVING, "train.eval_interval=0", "train.dtype=fp16", "train.max_iters=30", *more)
        with pytest.raises(UserError) as failed:
            train(words, run, Act(begin, spoil) if begin else Begin(-1, spoil))
        return str(failed.value)

    first = "non-finite gradients at step 17, whose loss is finite, before any update of the weights"
    check = "check losses(batch) of model=nano for a derivative that is not finite, such as that of a square root at 0"
    assert said(0) == f"{first}: {check}"
    assert said(0, "train.on_nonfinite=skip") == f"{first}, 100 times in a row: {check}"
    later = "non-finite gradients at step 19, whose loss is finite"
    assert said(2) == f"{later}: lower optimizer.learning_rate, or use train.on_nonfinite=skip or rollback"
    again = said(2, "train.on_nonfinite=rollback")
    assert again == f"{later}, after 3 rollbacks to the checkpoint of step 18: lower optimizer.learning_rate"


def test_a_step_may_be_skipped(small: Words, tmp_path: Path) -> None:
    trainer = train(small(*SAVING, "train.on_nonfinite=skip"), tmp_path / "run", poison(1, 7))
    assert [line["step"] for line in read(tmp_path / "run") if "loss" in line] == list(range(1, 13))
    assert trainer.state.position == 13 * 4, "the data of that step are not taken again"
    assert all(torch.isfinite(p).all() for p in trainer.backend.parts[0].parameters())


def test_muon_skips_a_step_averages_its_weights_and_resumes(small: Words, tmp_path: Path) -> None:
    """Its momentum takes nothing from the skipped step, and a resumed run continues bit for bit."""
    words = small(*SAVING, "optimizer=muon", "train.on_nonfinite=skip", "hooks=[ema]", "hooks.ema.decay=0.8")
    whole = train(words, tmp_path / "run", poison(1, 7))
    for state in whole.backend.optimizer.state.values():
        assert all(torch.isfinite(each).all() for each in state.values() if isinstance(each, torch.Tensor))
    shutil.copytree(tmp_path / "run", tmp_path / "again", symlinks=True)
    for step in (9, 12):
        shutil.rmtree(tmp_path / f"again/checkpoints/step-{step:08d}")
    again = train([*words, "train.resume=auto"], tmp_path / "again", poison(1, 7))
    ours, theirs = whole.backend.model_state(), again.backend.model_state()
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())
    averages = whole.hooks["ema"].tensors()
    assert all(tensor.equal(averages[name]) for name, tensor in again.hooks["ema"].tensors().items())
    assert any(not tensor.equal(ours[f"model.{name}"]) for name, tensor in averages.items())


def test_muon_trains_the_additions_of_lora(small: Words, tmp_path: Path) -> None:
    train(small(*SAVING), tmp_path / "base")
    words = small(*SAVING, "optimizer=muon", "optimizer.learning_rate=0.02", "optimizer.decay_lr=false")
    words += ["model.lora_rank=2", f"train.init_from={tmp_path}/base", "model.dropout=0", "train.max_iters=40"]
    trainer = train(words, tmp_path / "lora")
    matrices = trainer.backend.optimizer.param_groups[0]["params"]
    assert {id(p) for _, p in trainer.backend.named_parameters() if p.requires_grad} == {id(p) for p in matrices}
    losses = [line["loss"] for line in read(tmp_path / "lora") if "loss" in line]
    assert sum(losses[-5:]) < 0.99 * sum(losses[:5])


def test_or_the_run_goes_back_to_its_checkpoint(small: Words, tmp_path: Path) -> None:
    words = small(*SAVING, "train.on_nonfinite=rollback")
    trainer = train(words, tmp_path / "run", poison(1, 7))
    assert [line["step"] for line in read(tmp_path / "run") if "loss" in line] == list(range(1, 13))
    assert trainer.state.position == (12 + 2) * 4, "steps 7 and 8 were taken twice, with other data"
    with pytest.raises(UserError, match="after 3 rollbacks to the checkpoint of step 6"):
        train(words, tmp_path / "again", poison(9, 7))


def test_a_second_signal_ends_the_run_at_once() -> None:
    stop = StopSignal(torch.device("cpu"))
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for first, left in (
        (signal.SIGINT, {signal.SIGUSR1}),
        (signal.SIGTERM, {signal.SIGUSR1, signal.SIGTERM}),
        (signal.SIGUSR1, {signal.SIGINT, signal.SIGTERM}),
    ):
        with stop.listen():
            os.kill(os.getpid(), first)
            assert stop.signal == first
            assert {number for number in usual if signal.getsignal(number) != usual[number]} == left
        assert {number: signal.getsignal(number) for number in usual} == usual


@pytest.mark.parametrize(("same_s", "killed"), [(60.0, 0), (0.0, 1)])
def test_one_request_may_arrive_twice(monkeypatch: pytest.MonkeyPatch, same_s: float, killed: int) -> None:
    """PBS sends SIGTERM to mpiexec and to launch, which both forward it."""
    monkeypatch.setattr("wordrun.train.stop.SAME_S", same_s)
    deaths: list[int] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: deaths.append(number))
    try:
        stop = StopSignal(torch.device("cpu"))
        with stop.listen():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.signal, len(deaths)) == (signal.SIGTERM, killed)
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_a_run_that_skips_steps_can_be_stopped(small: Words, tmp_path: Path) -> None:
    def stop(trainer: Trainer) -> None:
        parameter = trainer.backend.parts[0].norm.weight
        parameter.register_hook(lambda gradient: (os.kill(os.getpid(), signal.SIGTERM), gradient * torch.nan)[1])

    with pytest.raises(Interrupted) as stopped:
        train(small(*SAVING, "train.on_nonfinite=skip"), tmp_path / "run", Act(5, stop))
    assert stopped.value.exit_status == 75
    assert steps(tmp_path / "run") == [3, 5]
    saved = find(tmp_path / "run")
    assert saved.manifest["position"] == 6 * 4
    assert all(torch.isfinite(weight).all() for weight in saved.weights().values())


def test_padding_of_the_vocabulary_is_read_as_zeros(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a step that has spoilt it, from which train.on_nonfinite=rollback returns."""
    monkeypatch.setattr("wordrun.train.language.vocab_multiple", lambda cfg, tp, on_cpu: 64)
    run = tmp_path / "run"
    with Trainer(wordrun.compose(small(f"hydra.run.dir={run}", "train.checkpoint_interval=4"))) as trainer:
        trainer.train()
        saved = find(run)
        weight = saved.weights()["tokens.weight"]
        backend = trainer.backend
        assert isinstance(backend, DDPBackend)
        state = [t for values in backend.optimizer.state.values() for t in values.values() if t.dim() == 2]
        for tensor in (*backend.parameters, *state):
            tensor.data.fill_(torch.nan)
        backend.load(saved.folder, saved.manifest["backend"])
        (padded,) = (p for name, p in backend.named_parameters() if name == "tokens.weight")
        assert len(padded) == 64 > len(weight) == saved.vocab_size
        assert padded[: len(weight)].equal(weight)
        assert not padded[len(weight) :].any()
        moments = backend.optimizer.state[padded]
        assert moments["exp_avg"][: len(weight)].any()
        assert not moments["exp_avg"][len(weight) :].any()
        assert not moments["exp_avg_sq"][len(weight) :].any()
