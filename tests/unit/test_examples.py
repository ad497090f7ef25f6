"""Images and other examples: what they are, what is reported about them, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import wordrun
from wordrun.commands import export, generate
from wordrun.commands.plan import plan
from wordrun.commands.prepare import main as prepare
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.registry import Part, parts
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.data import images
from wordrun.data.examples import ExampleOrder, Reader, Splits, ValidationExamples, preserved
from wordrun.data.options import DataConfig
from wordrun.data.prepare import vision
from wordrun.data.validation_set import dealt
from wordrun.model.base import Model
from wordrun.model.draws import draw, for_examples
from wordrun.model.options import ConvNetConfig, ModelConfig
from wordrun.train.hooks.options import EarlyStopConfig
from wordrun.train.metrics import MetricOfSums
from wordrun.train.options import MetricConfig

SMALL = tuple(
    shlex.split("""
    data=digits model.channels=2 model.hidden=8 model.batch_size=8 tracker=jsonl train.device=cpu
    train.dtype=fp32 train.max_iters=2 train.eval_iters=2 train.eval_interval=1 train.log_interval=1
    hydra.run.dir=run
""")
)


def lines(run: Path = Path("run")) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(*words: str) -> wordrun.train.trainer.Summary:
    with wordrun.Trainer(wordrun.compose([*SMALL, *words])) as trainer:
        return trainer.train()


def test_a_run_reports_examples_and_no_tokens(drawing: Any) -> None:
    with drawing():
        summary = train("metrics=[accuracy,top5]")
    assert (summary.steps, summary.tokens) == (2, None)
    training, evaluation = lines()[0], lines()[1]
    assert not {"tps", "tps_per_gpu", "tokens"} & set(training)
    assert training["sps"] > 0
    assert list(evaluation) == ["step", "val_loss", "val_accuracy", "val_top5"]
    assert 0 <= evaluation["val_accuracy"] <= evaluation["val_top5"] <= 1
    record = json.loads(Path("run/run.json").read_text())
    assert (record["data"]["train_examples"], record["data"]["val_examples"]) == (1437, 360)
    assert record["data"]["classes"] == 10
    assert sorted(path.name for path in Path("run/plots").iterdir()) == ["loss.png", "metrics.png", "throughput.png"]
    assert "examples/s" in Path("run/log.txt").read_text()


def test_metrics_of_text_are_means_over_tokens(small: Any) -> None:
    with wordrun.Trainer(wordrun.compose(small("metrics=[accuracy,top5]", "hydra.run.dir=run"))) as trainer:
        trainer.train()
        found = trainer.measure()
        model, validation = trainer.backend.parts[0].eval(), trainer.evaluation.validation
        batches = [validation[i][0] for i in range(len(validation))]
        hits = torch.cat([model(batch.tokens).argmax(-1) == batch.targets for batch in batches])
    assert found["val_accuracy"] == pytest.approx(hits.float().mean().item())
    assert found["val_accuracy"] <= found["val_top5"]
    assert found["val_perplexity"] == pytest.approx(np.exp(found["val_loss"]))


def test_what_is_for_text_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    train("train.max_iters=1")
    assert not list(Path("run").glob("checkpoints/*/tokenizer.json"))
    for main, words in ((generate.main, ["run=run"]), (export.main, ["run=run"])):
        assert main(words) == 1
        assert "was trained on data=digits, which is not text" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        prepare(["data=digits"])
    assert "data=digits is not text, and needs no preparation" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no estimate for model=convnet"):
        plan(["data=digits"])
    assert export.main(["run=run", "form=checkpoint", "out=weights"]) == 0
    with wordrun.Trainer(wordrun.compose([*SMALL, "train.init_from=weights", "hydra.run.dir=second"])) as trainer:
        with pytest.raises(ConfigError, match="has no text"):
            trainer.generate()
        saved = dict(trainer.task.initial_weights(trainer.world) or {})
        assert torch.equal(trainer.backend.parts[0].features[0].weight, saved["features.0.weight"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data=digits", "model=nano"], "model=nano cannot train on data=digits: use model=convnet or model=resnet18"),
        (["data=sample", "model=convnet"], "model=convnet cannot train on data=sample: use model=nano"),
        (["data=digits", "model.norm=group"], "model.norm=group should be one of none, batch, sync"),
        (["data=imagefolder"], "data=imagefolder needs data.path=FOLDER"),
        (["data=digits", "model=resnet18", "model.depth=20"], "model.depth=20 should be 18, 34, 50, 101 or 152"),
    ],
)
def test_a_config_that_cannot_work_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        wordrun.compose(words)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("backend", "option"), [("TP", "backend.tp=2"), ("PP", "backend.pp=8"), ("3D", "backend.tp=2")]
)
def test_a_model_that_cannot_be_divided_is_refused(backend: str, option: str) -> None:
    cfg = wordrun.compose(["data=digits", f"train.backend={backend}"])
    with pytest.raises(ConfigError) as refused:
        check(cfg, 8, 2)
    assert option in str(refused.value)
    assert "model=convnet does not declare how" in str(refused.value)


def test_the_order_visits_every_example_once_in_an_epoch_and_augments_by_index() -> None:
    data = images.digits(wordrun.compose(["data=digits", "data.augment=true"]).data)  # type: ignore[arg-type]
    order = ExampleOrder(Reader(data.train, "training split"), 7, data.augment)
    n = order.per_epoch
    epochs = [sorted(order.indices(e * n, n).tolist()) for e in range(2)]
    assert epochs == [list(range(n))] * 2
    assert order.indices(0, n).tolist() != order.indices(n, n).tolist()
    whole = order.empty(6)
    order.fill(n - 3, whole)
    for first in range(6):
        one = order.empty(1)
        order.fill(n - 3 + first, one)
        assert torch.equal(one.inputs[0], whole.inputs[first])
        assert one.targets[0] == whole.targets[first]


def folder_of_images(root: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(root / name / f"{number}.png")


def test_a_folder_of_images_is_read() -> None:
    folder_of_images(Path("pets"))
    cfg = wordrun.compose(["data=imagefolder", "data.path=pets", "data.size=16", "data.augment=true"])
    data = images.imagefolder(cfg.data)  # type: ignore[arg-type]
    assert (len(data.train), len(data.val), data.model) == (18, 2, {"shape": [3, 16, 16], "classes": 2})
    reader = Reader(data.train, "training split", 2, draws=data.draws, threads=data.threads)
    order = ExampleOrder(reader, 1, data.augment)
    batch = order.empty(18)
    order.fill(0, batch)
    assert batch.inputs.shape == (18, 3, 16, 16)
    assert sorted(batch.targets.tolist()) == [0] * 9 + [1] * 9


def test_damaged_folders_are_refused_by_name() -> None:
    words = ["data=imagefolder", "data.path=pets", "data.size=16"]
    data = wordrun.compose(words).data
    with pytest.raises(ConfigError, match=r"data\.path=pets is not a folder"):
        images.imagefolder(data)  # type: ignore[arg-type]
    Path("pets").mkdir()
    with pytest.raises(ConfigError, match="but it has no folders"):
        images.imagefolder(data)  # type: ignore[arg-type]
    folder_of_images(Path("pets"))
    Path("pets/cow").mkdir()
    with pytest.raises(ConfigError, match="there are none in cow"):
        images.imagefolder(data)  # type: ignore[arg-type]
    Path("pets/cow").rmdir()
    Path("pets/dog/3.png").write_bytes(b"no image")
    found = images.imagefolder(data)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pets/dog/3\.png is not an image that can be decoded"):
        [found.train[i] for i in range(len(found.train))]


def test_splits_are_folders_with_their_names_in_any_case(caplog: pytest.LogCaptureFixture) -> None:
    data = wordrun.compose(["data=imagefolder", "data.path=pets", "data.size=16"]).data
    for name in ("Train", "TEST"):
        folder_of_images(Path("pets", name))
    Path("pets/__MACOSX/cat").mkdir(parents=True)
    Path("pets/notes.txt").write_text("Cats and dogs.")
    Path("pets/TEST/cat/3.gif").write_bytes(b"GIF89a")
    found = images.imagefolder(data)  # type: ignore[arg-type]
    assert (len(found.train), len(found.val), found.model["classes"]) == (20, 20, 2)
    assert caplog.messages[-1] == (
        "data=imagefolder: read 20 images for training and 20 for validation of 2 classes, validation in TEST, left "
        "out 2: notes.txt, cat/3.gif"
    )
    folder_of_images(Path("pets/Valid"))
    Path("pets/Valid/cat").rename("pets/Valid/Cats")
    with pytest.raises(ConfigError, match="the same folders, but only Train has cat and only Valid has Cats"):
        images.imagefolder(data)  # type: ignore[arg-type]
    Path("pets/Valid/Cats/0.png").rename("pets/Valid/0.png")
    with pytest.raises(
        ConfigError, match="pets: Valid should have a folder of images for each class, as TEST, Train has"
    ):
        images.imagefolder(data)  # type: ignore[arg-type]


def test_a_folder_of_folders_is_no_class_and_one_of_trains_is() -> None:
    data = wordrun.compose(["data=imagefolder", "data.path=pets", "data.size=16"]).data
    folder_of_images(Path("pets"))
    Path("pets/dog").rename("pets/train")
    assert images.imagefolder(data).model["classes"] == 2  # type: ignore[arg-type]
    folder_of_images(Path("pets/more"))
    with pytest.raises(ConfigError, match=r"more contains only folders \(cat, dog\)"):
        images.imagefolder(data)  # type: ignore[arg-type]
    os.mkfifo("pets/pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png is not an image that can be decoded"):
        images.Files([("pets/pipe.png", 0)], 16)[0]


def test_a_download_that_fails_names_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError(
            "Error downloading images.gz:\nTried mirror-1, got:\nno\nTried mirror-2, got:\nno route to host\n"
        )

    monkeypatch.setattr(vision.torch_private, "torchvision", lambda *args: SimpleNamespace(MNIST=fails))
    with pytest.raises(UserError, match=r"data=mnist is not in .* \(no route to host\).* use data=digits"):
        train("data=mnist")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"data=digits needs more packages .*pip install 'wordrun\[vision\]'"):
        train()


# What a package of one's own would contain: data, a model and a metric.
@dataclass
class LineConfig(ModelConfig):
    """A line through points."""

    name: str = "line"
    """Name of the preset; part of the run directory."""


class Line(Model):
    def __init__(self, cfg: LineConfig, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, 0]

    def losses(self, batch: Any, forward: Any = None) -> torch.Tensor:
        return ((forward or self)(batch.inputs) - batch.targets).square()


@dataclass
class PointsConfig(DataConfig):
    """Points on a line."""


def points(data: Any) -> Splits:
    x = torch.linspace(-1, 1, 64)[:, None]
    split = torch.utils.data.TensorDataset(x, 3 * x[:, 0] + 1)
    return Splits(split, split, {"inputs": 1})


def absolute_error(options: MetricConfig, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch.targets).abs()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Config:
    here = f"{__name__}:"
    for kind, name, options in (
        ("model", "Line", LineConfig),
        ("data", "points", PointsConfig),
        ("metrics", "absolute_error", MetricConfig),
    ):
        monkeypatch.setitem(parts(kind), name.lower(), Part(options, here + name, kind, name.lower()))
    cfg = wordrun.compose([*SMALL[4:], "train.max_iters=60", "optimizer.learning_rate=0.1", "optimizer.warmup_iters=1"])
    cfg.model, cfg.data = LineConfig(batch_size=16), PointsConfig("points", "points")
    cfg.metrics = {"absolute_error": MetricConfig()}
    return cfg


def test_a_task_of_ones_own(own: Config) -> None:
    with wordrun.Trainer(own) as trainer:
        trainer.train()
    evaluations = [line for line in lines() if "val_loss" in line]
    assert list(evaluations[0]) == ["step", "val_loss", "val_absolute_error"]
    assert evaluations[-1]["val_absolute_error"] < 0.2 * evaluations[0]["val_absolute_error"]


def test_losses_and_metrics_that_are_wrong_are_refused(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Line.losses
    wanted = r"model=line \(.*\): losses\(batch\) should return .*, a floating-point tensor of shape \[16\] on cpu: "
    wrong: dict[str, Callable[[torch.Tensor], Any]] = {
        r"a torch.float32 tensor of shape \[\] ": torch.mean,
        r"a torch.float32 tensor of shape \[15\] ": lambda losses: losses[1:],
        r"a torch.int64 tensor of shape \[16\] ": torch.Tensor.long,
        "on meta": lambda losses: losses.to("meta"),
        r"a tensor that does not depend on the weights \(was it detached\?\)": torch.Tensor.detach,
        "float": lambda losses: 1.0,
    }
    with wordrun.Trainer(own) as trainer:
        batch = trainer.loader.take(0, 1)[0]
        for found, change in wrong.items():
            monkeypatch.setattr(Line, "losses", lambda self, batch, change=change: change(right(self, batch)))
            with pytest.raises(UserError, match=f"{wanted}it returned {'.*' * (found == 'on meta')}{found}"):
                trainer.backend.forward_losses(batch)  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=wanted):
            trainer.train()
    monkeypatch.setattr(Line, "losses", right)
    own.run_dir = "second"
    monkeypatch.setattr(sys.modules[__name__], "absolute_error", lambda options, outputs, batch: outputs.sum())
    wrong = r"metrics=absolute_error .*should return one value per example, a tensor of shape \[16\], not .* shape \[\]"
    with wordrun.Trainer(own) as trainer, pytest.raises(UserError, match=wrong):
        trainer.train()
    assert not Path("second/metrics.jsonl").read_text()  # before the first step


def test_a_metric_that_is_not_finite_is_reported_and_recorded(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    own.train.max_iters = 1
    monkeypatch.setattr(sys.modules[__name__], "absolute_error", lambda options, outputs, batch: outputs * torch.nan)
    with wordrun.Trainer(own) as trainer:
        trainer.train()
    assert lines()[-1]["val_absolute_error"] is None
    assert "the metric absolute_error is nan at step 1" in Path("run/log.txt").read_text()
    monkeypatch.setattr(sys.modules[__name__], "absolute_error", lambda options, outputs, batch: outputs.abs() / 0)
    own.model.batch_size, own.run_dir = 24, "second"  # 64 examples, and padding
    with wordrun.Trainer(own) as trainer:
        assert trainer.measure()["val_absolute_error"] == np.inf


class R2(MetricOfSums):
    """With the targets far from 0, where sums in fp32 would have no correct digit."""

    far = 1000.0

    def sums(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        y, error = batch.targets.double() + self.far, (batch.targets - outputs).double()
        return torch.stack([torch.ones_like(y), y, y.square(), error.square()], 1)

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        self.count = sums[0].item()
        return 1 - sums[3] / (sums[2] - sums[1].square() / sums[0])


class F1(MetricOfSums):
    """Of points above 1."""

    def sums(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        found, true = outputs > 1, batch.targets > 1
        return torch.stack([found & true, found & ~true, ~found & true], 1)

    def compute(self, sums: torch.Tensor) -> float:
        right, *wrong = sums.tolist()
        return 2 * right / (2 * right + sum(wrong))


@pytest.fixture
def of_sums(own: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name, make in (("r2", R2), ("f1", F1)):
        monkeypatch.setitem(parts("metrics"), name, Part(MetricConfig, make, "metrics", name, "mine"))
        own.metrics[name] = MetricConfig()
    own.train.max_iters, own.train.eval_iters = 30, None
    return own


@pytest.mark.parametrize("size", [16, 24])
def test_metrics_of_sums_are_those_of_all_examples(of_sums: Config, size: int) -> None:
    of_sums.model.batch_size = size  # 64 examples; of 24, the last batch has padding
    with wordrun.Trainer(of_sums) as trainer:
        trainer.train()
        found = trainer.measure()
        assert trainer.evaluation.of_sums["r2"].count == 64  # type: ignore[attr-defined]
        x, y = (each.double() for each in trainer.task.data.val.tensors)  # type: ignore[attr-defined]
        predicted = trainer.backend.parts[0](x.float()).double()
    r2 = 1 - (y - predicted).square().sum() / (y - y.mean()).square().sum()
    right, marked, true = ((predicted > 1) & (y > 1)).sum(), (predicted > 1).sum(), (y > 1).sum()
    assert found["val_r2"] == pytest.approx(r2.item(), abs=1e-7)
    assert found["val_f1"] == pytest.approx(2 * right.item() / (marked + true).item(), abs=1e-12)
    assert 0.5 < found["val_r2"] < 1
    assert {"val_r2", "val_f1"} < lines()[-1].keys()


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        (
            "sums",
            lambda *_: torch.zeros(16),
            r"f1 \(mine\): sums should return .* \[16, number of sums\], not",
        ),
        ("sums", lambda *_: torch.zeros(15, 3), r"sums should return .*, not a tensor of shape \[15, 3\]"),
        ("sums", lambda *_: 1.0, "sums should return .*, not float"),
        ("compute", lambda *_: torch.zeros(2), r"f1 \(mine\): compute should return a number, not .* shape \[2\]"),
        ("compute", lambda *_: None, "compute should return a number, not NoneType"),
        ("compute", lambda *_: {}["x"], r"metrics=f1 \(mine\): F1 failed: KeyError: 'x'"),
    ],
)
def test_a_metric_of_sums_that_is_wrong_is_named(
    of_sums: Config, monkeypatch: pytest.MonkeyPatch, method: str, change: Any, says: str
) -> None:
    monkeypatch.setattr(F1, method, change)
    del of_sums.metrics["r2"]
    with wordrun.Trainer(of_sums) as trainer, pytest.raises(UserError, match=says):
        trainer.train()
    assert not Path("run/metrics.jsonl").read_text()


def test_a_metric_of_sums_may_be_undefined(of_sums: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F1, "compute", lambda *_: 1 / 0)
    with wordrun.Trainer(of_sums) as trainer:
        assert np.isnan(trainer.measure()["val_f1"])


class Noisy(Line):
    """Draws twice for each example, and once without regard to them."""

    drawn: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def losses(self, batch: Any, forward: Any = None) -> torch.Tensor:
        noise = torch.stack([draw(batch.targets), draw(batch.targets, torch.rand)], 1)
        self.drawn.append((batch.inputs, noise))
        torch.rand(1)
        return super().losses(batch) + noise.sum(1)


def test_an_example_gets_the_same_random_numbers_in_each_evaluation(
    own: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parts("model"), "line", Part(LineConfig, Noisy, "model", "line"))
    own.train.max_iters, own.train.eval_iters, own.train.eval_interval = 2, None, 0
    found = []
    for size in (16, 24):
        own.model.batch_size, own.run_dir = size, f"run-{size}"
        with wordrun.Trainer(own) as trainer:
            with preserved():
                torch.manual_seed(size)
                before = torch.get_rng_state()
                Noisy.drawn.clear()
                first = trainer.evaluate()
                assert trainer.evaluate() == first
                assert torch.equal(torch.get_rng_state(), before)
            inputs, noise = (torch.cat(each) for each in zip(*Noisy.drawn, strict=True))
            found.append({x.item(): row.tolist() for x, row in zip(inputs, noise, strict=True)})
            Noisy.drawn.clear()
            trainer.train()
            (_, once), (_, again) = Noisy.drawn
            assert not torch.equal(once, again)
    assert len(found[0]) == len({row[0] for row in found[0].values()}) == 64
    last = max(found[0])  # its row is also padding
    assert {x: row for x, row in found[0].items() if x < last} == {x: row for x, row in found[1].items() if x < last}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_draw_the_same_for_an_example(size: int) -> None:
    def drawn(rank: int, batch: int, rows: int) -> dict[int, float]:
        numbers = dealt(batch, rows, rank, size)
        with for_examples(numbers):
            return dict(zip(numbers, draw(torch.empty(rows, 2)).sum(1).tolist(), strict=True))

    with for_examples(range(12)):
        whole = dict(enumerate(draw(torch.empty(12, 2)).sum(1).tolist()))
        with pytest.raises(UserError, match=r"a row for each of the 12 examples .*, not the shape \[11\]"):
            draw(torch.empty(11))
    ranks = [drawn(rank, batch, 2) for rank in range(size) for batch in range(12 // size // 2)]
    assert {number: value for each in ranks for number, value in each.items()} == whole


def test_a_label_out_of_range_is_refused() -> None:
    split = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.tensor([0, 1, 2, 1]))
    reader = Reader(split, "training split of data=mine", classes=2)
    with pytest.raises(
        ConfigError, match=r"example 2 of the training split of data=mine has the label 2, but .*0 to 1"
    ):
        ExampleOrder(reader, 1).fill(0, reader.empty(4))


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([(0.0, 1, 2)], "example 0 of the val split of data=mine should be an input and a target: it is 3 values"),
        ([torch.zeros(2)], "it is Tensor"),
        ([(0.0, 0), (0.0, 1.0)], r"example 1 of .* has the label 1.0, but .* 2 classes \(integers from 0 to 1\)"),
        ([(0.0, 0), (0.0, [0, 1])], r"example 1 of .* has the label \[0, 1\], but"),
        ([([0.0], 0), ([0.0, 1.0], 0)], r"example 1 of .* an input of shape \[2\], but the first .* shape \[1\]"),
    ],
)
def test_examples_that_cannot_be_a_batch_are_named(items: list[Any], says: str) -> None:
    def read() -> None:
        ValidationExamples(Reader(items, "val split of data=mine", classes=2), 2, None)[0]

    with pytest.raises(ConfigError, match=says):
        read()


def test_a_function_that_does_not_return_data_is_named(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "points", lambda options: None)
    with pytest.raises(UserError, match=r"data=points .* should return wordrun.data.examples.Splits, not NoneType"):
        wordrun.Trainer(own)


def test_the_best_checkpoint_and_early_stopping_follow_any_metric(own: Config) -> None:
    own.train.best_metric, own.train.best_mode, own.train.eval_interval = "val_absolute_error", "max", 1
    own.train.max_iters, own.train.checkpoint_interval = 6, 3
    own.hooks = {"early_stop": EarlyStopConfig("val_absolute_error", "max", patience=4)}
    with wordrun.Trainer(own) as trainer:
        trainer.train()
    errors = {line["step"]: line["val_absolute_error"] for line in lines() if "val_loss" in line}
    assert list(errors) == [1, 2, 3, 4, 5]  # it falls from the first evaluation on
    record = json.loads(Path("run/run.json").read_text())
    assert (record["best_metric"], record["best_value"], record["best_step"]) == ("val_absolute_error", errors[1], 1)
    assert record["best_mode"] == "max"
    assert record["best_val_loss"] == min(line["val_loss"] for line in lines() if "val_loss" in line)
    assert os.readlink("run/checkpoints/best") == "step-00000001"
    assert f"best val_absolute_error {errors[1]:.4f}" in Path("run/log.txt").read_text()
    for metric, best in (("val_absolute_error", 1), ("val_loss", 5)):  # kept by a resumed run, unless it is another
        own.run_dir, own.train.resume, own.train.best_metric = metric, "run/checkpoints/step-00000003", metric
        own.train.best_mode = "max" if best == 1 else "auto"
        with wordrun.Trainer(own) as trainer:
            assert trainer.train().best_step == best


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.best_metric=acuracy"], r"train.best_metric=acuracy: evaluations report .*did you mean 'val_acuracy'"),
        (
            ["hooks=[early_stop]", "hooks.early_stop.metric=val_share"],
            "hooks.early_stop.mode=auto: val_share is not known",
        ),
        (["train.best_mode=up"], r"train.best_mode=up should be one of auto, min, max"),
    ],
)
def test_a_metric_that_cannot_be_compared_is_refused_at_once(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wordrun.compose(["data=digits", "model=convnet", *words])


def test_an_unknown_metric_is_refused_before_the_first_step() -> None:
    with pytest.raises(
        ConfigError, match=r"train.best_metric=val_acuracy: .*did you mean 'val_accuracy'\? \(val_loss, "
    ):
        train("train.best_metric=val_acuracy", "train.best_mode=max")
    assert not Path("run/metrics.jsonl").read_text()


class Plain(nn.Module):
    def __init__(self, cfg: LineConfig, inputs: int) -> None:
        super().__init__()


def test_a_model_that_is_none_is_named(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts("model"), "line", Part(LineConfig, f"{__name__}:Plain", "model", "line", "mine.py:3"))
    with pytest.raises(
        ConfigError, match=r"model=line \(mine.py:3\): Plain should be an nn.Module with a method losses"
    ):
        wordrun.Trainer(own)


def test_a_model_for_other_data_of_the_same_task_is_named(own: Config) -> None:
    own.model = ConvNetConfig()
    with pytest.raises(
        ConfigError, match=r"model=convnet .* does not fit the data: its constructor should take cfg, inp"
    ):
        wordrun.Trainer(own)
