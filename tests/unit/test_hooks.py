"""Hooks: averages, statistics, spikes and the range test against what they should be; their states; their failures."""

from __future__ import annotations

import gc
import json
import math
import re
import shlex
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun.checkpoint import folder as folders
from wordrun.checkpoint.load import find
from wordrun.commands.export import ExportConfig, export
from wordrun.common.errors import ConfigError, UserError
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.train.hooks.base import Hook, HookError, HookSet
from wordrun.train.hooks.ema import EMA
from wordrun.train.hooks.lr_range import LRRange, steepest
from wordrun.train.hooks.options import LRRangeConfig, SpikesConfig
from wordrun.train.spikes import SpikeDetector
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]
STEPS = tuple(
    shlex.split("""
    train.max_iters=8 train.log_interval=1 train.eval_interval=4 train.checkpoint_interval=4
    train.keep_checkpoints=9 train.save_best=false train.sample_tokens=0 optimizer.warmup_iters=0
    optimizer.learning_rate=0.01
""")
)


def train(words: list[str], folder: Path, *hooks: Hook) -> Trainer:
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"]), hooks=hooks) as trainer:
        trainer.train()
    return trainer


def series(folder: Path, name: str) -> list[Any]:
    return [line[name] for line in read(folder) if name in line]


class Note(Hook):
    """Copies the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def setup(self, trainer: Any) -> None:
        self.after_step(trainer)

    def after_step(self, trainer: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in trainer.backend.parts[0].named_parameters()})


# Averaged weights


def ema_of(trainer: Trainer) -> EMA:
    hook = trainer.hooks["ema"]
    assert isinstance(hook, EMA)
    return hook


@pytest.fixture(scope="module")
def averaged(small: Words, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer, Note]:
    folder, note = tmp_path_factory.mktemp("ema") / "run", Note()
    trainer = train(small(*STEPS, "hooks=[ema]", "hooks.ema.decay=0.5"), folder, note)
    return folder, trainer, note


def test_the_average_is_that_of_the_weights_of_all_steps(averaged: tuple[Path, Trainer, Note]) -> None:
    folder, trainer, note = averaged
    first, *later = note.weights
    expected = {name: weight.double() for name, weight in first.items()}
    for n, weights in enumerate(later, start=1):
        keep = min(0.5, (1 + n) / (10 + n))
        expected = {name: keep * mean + (1 - keep) * weights[name].double() for name, mean in expected.items()}
    averages = ema_of(trainer).averages
    assert averages.keys() == expected.keys()
    assert len(later) == 8
    for name, mean in expected.items():
        torch.testing.assert_close(averages[name].double(), mean, rtol=1e-5, atol=1e-7)
        assert not torch.equal(averages[name], later[-1][name]), name
    stored = find(folder).weights("ema")
    assert all(torch.equal(stored[name], average) for name, average in averages.items())


def test_averaging_does_not_change_the_training(
    averaged: tuple[Path, Trainer, Note], small: Words, tmp_path: Path
) -> None:
    folder, trainer, note = averaged
    train(small(*STEPS), tmp_path / "without")
    for name in ("loss", "val_loss"):
        assert series(folder, name) == series(tmp_path / "without", name)
    assert all(torch.equal(p, note.weights[-1][name]) for name, p in trainer.backend.parts[0].named_parameters())


def test_the_averaged_weights_are_evaluated_exported_and_generate(
    averaged: tuple[Path, Trainer, Note], small: Words, tmp_path: Path
) -> None:
    folder, _, _ = averaged
    measured = series(folder, "ema_val_loss")
    assert len(measured) == 2
    assert series(folder, "ema_val_perplexity") == pytest.approx([math.exp(loss) for loss in measured])
    assert measured[-1] != series(folder, "val_loss")[-1]
    # A run that starts from the export has the loss of the average.
    out = export(ExportConfig(run=str(folder), weights="ema", form="checkpoint"))
    assert out.name == "step-00000008-ema"
    cfg = wordrun.compose(small(f"train.init_from={out}", f"hydra.run.dir={tmp_path}/on"))
    with Trainer(cfg) as trainer:
        assert trainer.evaluate() == pytest.approx(measured[-1], rel=1e-6)
    with pytest.raises(
        ConfigError, match=r"weights=emma: .*step-00000008 has only model, ema \(runs with hooks=\[ema\]"
    ):
        export(ExportConfig(run=str(folder), weights="emma", out=str(tmp_path / "none")))


def test_averages_resume_to_the_bit_and_begin_where_there_are_none(small: Words, tmp_path: Path) -> None:
    words = small(
        *STEPS, *shlex.split("hooks=[ema,spikes] hooks.spikes.window=3 model.dropout=0.1 train.log_interval=3")
    )
    whole = train(words, tmp_path / "whole")
    resume = f"train.resume={tmp_path}/whole/checkpoints/step-00000004"
    part = train([*words, resume], tmp_path / "part")
    assert part.start.step == 4
    for name in ("ema_val_loss", "spike_score"):
        assert series(tmp_path / "part", name) == series(tmp_path / "whole", name)
    ours, theirs = ema_of(part), ema_of(whole)
    assert ours.updates == theirs.updates == 8
    assert all(torch.equal(average, theirs.averages[name]) for name, average in ours.averages.items())

    train(small(*STEPS, "train.max_iters=4"), tmp_path / "without")
    note = Note()
    late = train(
        small(*STEPS, "hooks=[ema]", f"train.resume={tmp_path}/without", "train.max_iters=5"),
        tmp_path / "without",
        note,
    )
    keep = 2 / 11
    before, after = note.weights[-2:]
    for name, average in ema_of(late).averages.items():
        torch.testing.assert_close(average, keep * before[name] + (1 - keep) * after[name])
    said = (tmp_path / "without/log.txt").read_text()
    assert said.count("the checkpoint has no averaged weights: the average starts at step 4") == 1


class Lose(Hook):
    """Makes the gradients of the seventh step NaN, once."""

    def at_start(self, trainer: Any) -> None:
        weight = trainer.backend.parts[0].head.weight
        self.handle = weight.register_hook(lambda g: g * math.nan if trainer.step == 6 else g)

    def before_step(self, trainer: Any) -> None:
        if trainer.step == 4 and trainer.state.rollbacks:
            self.handle.remove()


def test_a_rollback_restores_the_average(small: Words, tmp_path: Path) -> None:
    trainer = train(small(*STEPS, "hooks=[ema]", "train.on_nonfinite=rollback"), tmp_path / "run", Lose())
    assert trainer.state.rollbacks == {4: 1}
    assert ema_of(trainer).updates == trainer.step == 8
    assert all(average.isfinite().all() for average in ema_of(trainer).averages.values())


# Statistics


class Outputs(Hook):
    """Notes the output of the first block in each training step."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def setup(self, trainer: Any) -> None:
        block = trainer.backend.parts[0].blocks["0"]
        block.register_forward_hook(lambda module, x, y: self.outputs.append(y.detach()) if module.training else None)


def test_statistics_are_those_of_the_gradients_and_the_activations(small: Words, tmp_path: Path) -> None:
    outputs = Outputs()
    words = [*STEPS, "train.eval_interval=2", "optimizer.grad_clip=0.01", "model.n_layer=2"]
    trainer = train(small(*words, "hooks=[statistics]", "hooks.statistics.interval=2"), tmp_path / "run", outputs)
    lines = [line for line in read(tmp_path / "run") if "grad_norm/blocks.0" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    total = {line["step"]: line["grad_norm"] for line in read(tmp_path / "run") if "grad_norm" in line}
    for line in lines:
        squares = sum(value**2 for name, value in line.items() if name.startswith("grad_norm/"))
        assert math.sqrt(squares) == pytest.approx(total[line["step"]], rel=1e-4), "before clipping"
        assert 0 < line["grad_max/blocks.1"] <= line["grad_norm/blocks.1"]
        output = outputs.outputs[line["step"] - 1]
        assert line["activation_rms/blocks.0"] == pytest.approx(output.square().mean().sqrt().item(), rel=1e-4)
        assert line["activation_max/blocks.0"] == pytest.approx(output.abs().max().item(), rel=1e-6)
    assert all(len(block._forward_hooks) <= 1 for block in trainer.backend.parts[0].blocks.values()), "only the test's"
    train(small(*words), tmp_path / "without")
    assert series(tmp_path / "run", "loss") == series(tmp_path / "without", "loss")


class Norms(Hook):
    """Keeps the norm of all gradients in each step."""

    def __init__(self) -> None:
        self.setups, self.norms = 0, dict[int, float]()

    def setup(self, trainer: Any) -> None:
        self.setups += 1

    def on_gradients(self, trainer: Any) -> None:
        squares = [p.grad.square().sum() for part in trainer.backend.parts for p in part.parameters()]
        assert trainer.step + 1 not in self.norms, "called twice"
        self.norms[trainer.step + 1] = torch.stack(squares).sum().sqrt().item()

    def after_step(self, trainer: Any) -> None:
        assert all(p.grad is None for p in trainer.backend.parts[0].parameters())
        assert list(self.norms) == list(range(trainer.start.step + 1, trainer.step + 1))


def test_a_hook_reads_the_complete_gradients_before_they_are_clipped(small: Words, tmp_path: Path) -> None:
    words = [*STEPS, "optimizer.grad_clip=0.01", "optimizer.gas=2", "train.checkpoint_interval=4"]
    norms = Norms()
    reference = weakref.ref(train(small(*words, "train.max_iters=4"), tmp_path / "run", norms))
    assert list(norms.norms.values()) == pytest.approx(series(tmp_path / "run", "grad_norm"), rel=1e-4)
    gc.collect()
    assert reference() is None, "the backend's finalizer keeps the trainer"
    train(small(*words, "train.max_iters=4"), tmp_path / "without")
    resumed = Norms()
    train(small(*words, "train.resume=auto"), tmp_path / "without", resumed)
    assert (resumed.setups, list(resumed.norms)) == (2, [5, 6, 7, 8])


def test_an_engine_that_has_the_gradients_refuses_hooks_that_read_them() -> None:
    trainer: Any = Namespace(backend=object(), cfg=wordrun.compose(["train.backend=deepspeed"]))
    HookSet([], {}, [Note()], [Outputs()]).check_gradients(trainer)
    with pytest.raises(ConfigError, match=r"hooks=\[Norms\] cannot read the weights and gradients of train\.backend="):
        HookSet([], {}, [Norms()], [Outputs()]).check_gradients(trainer)


# Spikes


def test_a_spike_is_scored_by_the_steps_before_it() -> None:
    spikes = SpikeDetector(SpikesConfig(window=4, threshold=3.0))
    losses = [3.0, 3.2, 2.8, 3.0, 2.9, 9.0, math.nan, 3.1]
    scores = [spikes.score(loss) for loss in losses]
    assert scores[:4] == [None] * 4
    for i in (4, 5):
        before = np.array(losses[i - 4 : i])
        assert scores[i] == pytest.approx((losses[i] - before.mean()) / before.std())
    assert (scores[5] or 0) > 3
    assert scores[6] is None, "a loss that is not finite is neither scored nor kept"
    assert spikes.state_dict()["losses"] == [3.0, 2.9, 9.0, 3.1]
    flat = SpikeDetector(SpikesConfig(window=2))
    assert [flat.score(2.0) for _ in range(3)] == [None] * 3, "no deviation to measure with"


class Lift(Hook):
    """Multiplies the weights of the output layer after one step, so that the next loss is high."""

    def after_step(self, trainer: Any) -> None:
        if trainer.step == 6:
            with torch.no_grad():
                trainer.backend.parts[0].head.weight.mul_(300)


def test_a_spike_is_counted_and_logged(small: Words, tmp_path: Path, drawing: Any) -> None:
    options = ("hooks=[spikes]", "hooks.spikes.window=4", "hooks.spikes.threshold=10")
    with drawing():
        train(small(*STEPS, *options, "train.log_interval=4"), tmp_path / "run", Lift())
    assert series(tmp_path / "run", "spikes") == [0, 0, 1]
    assert series(tmp_path / "run", "spike_score")[-1] > 10
    assert "loss spike at step 7: " in (tmp_path / "run/log.txt").read_text()
    assert "loss spikes" in (tmp_path / "run/report.html").read_text()


# The range test


RANGE = tuple(
    shlex.split("""
    hooks=[lr_range] hooks.lr_range.steps=60 hooks.lr_range.highest=3 train.log_interval=1
    train.max_iters=90 train.sample_tokens=0
""")
)


class Spoil(Hook):
    """Makes the weights NaN after one step."""

    def after_step(self, trainer: Any) -> None:
        if trainer.step == 50:
            with torch.no_grad():
                trainer.backend.parts[0].head.weight.mul_(math.nan)


@pytest.mark.parametrize("diverges", [False, True])
def test_a_range_test_suggests_a_learning_rate_and_ends(small: Words, tmp_path: Path, diverges: bool) -> None:
    trainer = train(small(*RANGE), tmp_path / "run", *[Spoil()] * diverges)
    assert trainer.step == (51 if diverges else 60)
    result = json.loads((tmp_path / "run/lr_range.json").read_text(), parse_constant=pytest.fail)
    assert len(result["lr"]) == len(result["loss"]) == trainer.step
    assert result["lr"][0] == pytest.approx(1e-6)
    assert np.diff(np.log(result["lr"])) == pytest.approx(math.log(3 / 1e-6) / 59)
    assert series(tmp_path / "run", "lr") == pytest.approx(result["lr"])
    assert 1e-4 < result["suggestion"] < 1
    assert (tmp_path / "run/plots/lr_range.png").stat().st_size > 5000
    assert folders.all_in(tmp_path / "run") == []
    said = (tmp_path / "run/log.txt").read_text()
    assert "optimizer.learning_rate=" in said
    assert "warm-up" not in said  # of 100 steps; the hook sets the rate
    assert f"range test: {'the loss diverged at' if diverges else 'complete'}" in said
    assert json.loads((tmp_path / "run/run.json").read_text())["exit_reason"] == "finished"


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (i / 10) for i in range(60)]
    losses = [3 - math.tanh((i - 30) / 5) for i in range(50)]  # steepest at 30
    fall_after_divergence = [9.0, 99.0, math.nan, 9.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5]
    assert steepest(rates, losses + fall_after_divergence) == rates[30]
    assert steepest(rates, [float(i) for i in range(60)]) is None
    hook = LRRange(LRRangeConfig())
    assert hook.stop_reason() == ""


# States of hooks from Python


class Count(Hook):
    """Counts steps in its state, and in a tensor like a weight."""

    def __init__(self) -> None:
        self.steps = 0
        self.total = torch.zeros(0)

    def setup(self, trainer: Any) -> None:
        (self.total,) = (torch.zeros_like(p) for name, p in trainer.backend.named_parameters() if name == "norm.weight")

    def after_step(self, trainer: Any) -> None:
        self.steps += 1
        self.total += 1

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"norm.weight": self.total}


def test_hooks_from_python_resume_each_with_its_own_state(small: Words, tmp_path: Path) -> None:
    first, second = Count(), Count()
    second.steps = 100
    train(small(*STEPS), tmp_path / "run", first, second)
    manifest = folders.all_in(tmp_path / "run")[-1].manifest()
    assert manifest["hooks"] == {"Count": {"steps": 8}, "Count-2": {"steps": 108}}
    first, second = Count(), Count()
    resume = f"train.resume={tmp_path}/run/checkpoints/step-00000004"
    train(small(*STEPS, resume), tmp_path / "branch", first, second)
    assert (first.steps, second.steps) == (8, 108)
    assert first.total.unique().tolist() == [8]


def test_hooks_with_the_names_of_others_keep_their_own() -> None:
    def made(name: str) -> Hook:
        return type(name, (Hook,), {})()

    hooks = HookSet(
        [made("Log")], {"ema": made("EMA")}, [made(n) for n in ("Log", "ema", "A", "A", "Last")], [made("Last")]
    )
    assert list(hooks) == ["Log", "ema", "Log-2", "ema-2", "A", "A-2", "Last-2", "Last"]


# Failures


class Break(Hook):
    """Raises in one of its methods."""

    def __init__(self, event: str) -> None:
        self.event, self.closed, self.steps = event, False, 0

    def _raise(self, event: str) -> None:
        if event == self.event:
            raise ValueError("not today")

    def after_step(self, trainer: Any) -> None:
        self.steps = trainer.step
        if trainer.step == 4:
            self._raise("after_step")

    def before_step(self, trainer: Any) -> None:
        self._raise("before_step")

    def learning_rate(self, trainer: Any, scheduled: float) -> float:
        self._raise("learning_rate")
        return scheduled

    def stop_reason(self) -> str:
        self._raise("stop_reason")
        return ""

    def at_end(self, trainer: Any) -> None:
        self._raise("at_end")

    def state(self) -> dict[str, Any]:
        self._raise("state")
        return {"value": {1}} if self.event == "set" and self.steps else {}

    def close(self) -> None:
        self.closed = True
        self._raise("close")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("after_step", r"the hook Break failed in after_step after 4 steps: ValueError: not today \(test_hooks.py:\d"),
        ("before_step", r"the hook Break failed in before_step: ValueError: not today"),
        ("learning_rate", r"the hook Break failed in learning_rate after 0 steps: ValueError: not today"),
        ("stop_reason", r"the hook Break failed in stop_reason: ValueError: not today"),
        ("state", r"the hook Break failed in state: ValueError: not today"),
        ("set", r"the hook Break failed in state: TypeError: state\(\)\['value'\] is a set, which JSON"),
        ("at_end", r"the hook Break failed in at_end after 8 steps: ValueError: not today"),
    ],
)
def test_a_hook_that_raises_is_named_and_costs_no_steps(small: Words, tmp_path: Path, event: str, message: str) -> None:
    hook, after = Break(event), Break("")
    with pytest.raises(HookError, match=message + r".*; traceback: .*run/failures/rank-0.txt"):
        train(small(*STEPS), tmp_path / "run", hook, after)
    assert (hook.closed, after.closed) == (True, True)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["exit_reason"].startswith("HookError: the hook Break failed in")
    reached = {"before_step": 1, "learning_rate": 0, "at_end": 8, "stop_reason": 0}.get(event, 4)
    assert [each.step for each in folders.all_in(tmp_path / "run")][-1:] == [reached]
    assert "ERROR HookError: the hook Break failed in" in (tmp_path / "run/log.txt").read_text()
    assert "in _raise" in (tmp_path / "run/failures/rank-0.txt").read_text() or event == "set"


class Keep(Hook):
    """Has a state and tensors that a test sets."""

    def __init__(self, state: Any = None, tensors: Any = None) -> None:
        self.kept, self.held = state or {}, tensors or {}

    def state(self) -> Any:
        return self.kept

    def tensors(self) -> Any:
        return self.held


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Keep({"best": {20: 1.0}}), "state()['best'] has the key 20; JSON has only strings as keys"),
        (Keep({"pair": [(0, 2)]}), "state()['pair'][0] is a tuple, which comes back as a list: return a list"),
        (Keep({"ema": torch.ones(2)}), "state()['ema'] is a Tensor, which JSON does not have: return its .tolist()"),
        (Keep({"x": np.float32(1)}), "state()['x'] is a float32, which JSON does not have: return its .tolist()"),
        (Keep({"x": 1j}), "state()['x'] is a complex, which JSON does not have: return numbers, strings, lists and"),
        (
            Keep(tensors={"hist": torch.ones(7)}),
            "tensors() has 'hist', which is not a weight: return small values as lists in state()",
        ),
        (Keep(tensors={"norm.weight": torch.ones(7)}), "tensors()['norm.weight'] has the shape [7], and the weight ["),
    ],
)
def test_what_a_checkpoint_cannot_hold_of_a_hook_is_named_before_the_first_step(
    small: Words, tmp_path: Path, hook: Hook, message: str
) -> None:
    where = r"failed in state: TypeError" if "state()[" in message else ""
    with pytest.raises(UserError, match=rf"the hook Keep ?{where}: {re.escape(message)}") as caught:
        train(small(*STEPS), tmp_path / "run", hook)
    assert isinstance(caught.value, HookError if where else ConfigError)
    assert not series(tmp_path / "run", "loss")
    train(small("train.max_iters=1", "train.checkpoint_interval=0"), tmp_path / "unsaved", hook)


def test_states_that_json_gives_back_are_accepted(small: Words, tmp_path: Path) -> None:
    state = {"nan": math.nan, "best": {"20": math.inf}, "list": [1, None, True, "x", np.float64(0.5)]}
    train(small("train.max_iters=1"), tmp_path / "run", Keep(state))
    (folder,) = folders.all_in(tmp_path / "run")
    assert str(folder.manifest()["hooks"]["Keep"]) == str(json.loads(json.dumps(state)))


def test_a_hook_that_cannot_close_hides_nothing(small: Words, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    after = Break("")
    train(small(*STEPS), tmp_path / "run", Break("close"), after)
    assert after.closed
    assert "the hook Break failed in close: ValueError: not today" in (tmp_path / "run/log.txt").read_text()
    assert json.loads((tmp_path / "run/run.json").read_text())["exit_reason"] == "finished"


class Say(Hook):
    def __init__(self, value: Any) -> None:
        self.value = value

    def after_step(self, trainer: Any) -> None:
        trainer.log_metrics({"said": self.value})


def test_a_metric_that_is_not_finite_is_null_and_one_that_is_no_number_is_named(small: Words, tmp_path: Path) -> None:
    for i, value in enumerate((math.nan, torch.tensor(math.inf), np.float32(-math.inf))):
        train(small("train.max_iters=1"), tmp_path / str(i), Say(value))
        lines = (tmp_path / str(i) / "metrics.jsonl").read_text().splitlines()
        said = [json.loads(line, parse_constant=pytest.fail) for line in lines if "said" in line]
        assert said == [{"step": 1, "said": None}]
    train(small("train.max_iters=1"), tmp_path / "array", Say(np.float64(1.5)))
    assert series(tmp_path / "array", "said") == [1.5]
    for i, wrong in enumerate((torch.ones(2), {"a": 1}, "text")):
        with pytest.raises(HookError, match=r"the hook Say failed .* TypeError: the metric said is .* not a number"):
            train(small("train.max_iters=1"), tmp_path / f"wrong-{i}", Say(wrong))


def test_a_state_that_a_hook_cannot_load_names_it() -> None:
    class Strict(Hook):
        def load(self, state: dict[str, Any]) -> None:
            state["value"]

    hooks = HookSet([], {}, [Strict()], [Hook()])
    for states in ({"Strict": {}}, {"Strict": None}):
        with pytest.raises(UserError, match="the hook Strict failed in load: "):
            hooks.load(None, states)  # type: ignore[arg-type]
    hooks.load(None, "nonsense")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hooks=[ema]", "hooks.ema.decay=1"], "hooks.ema.decay=1"),
        (["hooks=[ema]", "train.backend=deepspeed"], "hooks=[ema] cannot average the weights of"),
        (["hooks=[statistics]", "train.backend=deepspeed"], "hooks=[statistics] cannot read the gradients of"),
        (["hooks=[statistics]", "train.compile=true"], "use hooks.statistics.activations=false, or"),
        (["hooks=[spikes]", "hooks.spikes.window=1"], "hooks.spikes.window=1 should be at least 2"),
        (["hooks=[lr_range]", "hooks.lr_range.lowest=2"], "hooks.lr_range.lowest=2 should be below"),
        (["hooks=[lr_range]", "train.checkpoint_interval=5"], "use train.checkpoint_interval=0"),
        (["hooks=[lr_range]", "experiment=digits"], "should not be evaluated: use train.eval_interval=0"),
        (["hooks=[lr_range]", "train.max_iters=50"], "hooks.lr_range.steps=100 is more than train.max_iters=50"),
        (["hooks.ema.decay=0.9"], "hooks.ema.decay=0.9 has no effect without hooks=ema: add it"),
    ],
)
def test_impossible_options_of_hooks_are_refused(small: Words, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wordrun.compose(small(*words))
    assert message in str(caught.value)
