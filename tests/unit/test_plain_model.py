"""A plain ``nn.Module`` with ``losses(batch)`` as a model: its first values, its names, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import wordrun
from wordrun.backend.base import BackendSpec
from wordrun.backend.fsdp import check_shared
from wordrun.backend.options import PPConfig
from wordrun.backend.pipeline import PipelineBackend
from wordrun.backend.unused_parameters import Unused, UnusedError
from wordrun.checkpoint.load import find
from wordrun.commands import generate
from wordrun.common.errors import ConfigError, PartError, UserError
from wordrun.config.registry import Part, parts
from wordrun.config.schema import Config
from wordrun.data.examples import Splits
from wordrun.data.options import DataConfig
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model.base import Model
from wordrun.model.construction import materialize, new_model
from wordrun.model.gpt import GPT
from wordrun.model.options import GPTConfig, ModelConfig, TextModelConfig
from wordrun.track.options import TrackerConfig
from wordrun.train.hooks.options import HookConfig
from wordrun.train.optim.options import OptimizerConfig
from wordrun.train.options import AccuracyConfig, MetricConfig

DIGITS = shlex.split("""
    data=digits tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=6 train.log_interval=1
    train.eval_interval=3 train.eval_iters=2 model.batch_size=8 hydra.run.dir=run
""")


@dataclass
class NetConfig(ModelConfig):
    """A network of one's own."""

    name: str = "net"
    """Name of the preset; part of the run directory."""
    bug: bool = False
    """Fail in the constructor."""


class Net(nn.Module):
    """Two tied layers in ``blocks``, a buffer without reset_parameters, and a weight with a value of its own."""

    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__()
        if cfg.bug:
            self.scale = 1 / 0
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.blocks[1].bias = self.blocks[0].bias
        self.scale = nn.Parameter(torch.full((2, 2), 0.25))
        self.register_buffer("shift", torch.arange(64.0) / 64, persistent=False)
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1) + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale.mean()
        return self.head(x)

    def losses(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs), batch.targets, reduction="none")

    def metrics(self, batch: Any, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": outputs.argmax(1) == batch.targets}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that registers a class as model=net, and returns the config of a short run with it."""

    def register(make: Any, *words: str) -> Config:
        monkeypatch.setitem(parts("model"), "net", Part(NetConfig, make, "model", "net", "mine/parts.py:3"))
        return wordrun.compose(["model=net", *DIGITS, *words])

    return register


def trained(cfg: Config) -> list[dict[str, Any]]:
    with wordrun.Trainer(cfg) as trainer:
        trainer.train()
    return [json.loads(line) for line in Path(cfg.run_dir, "metrics.jsonl").read_text().splitlines()]


def test_it_trains_from_its_constructors_values_and_reports_its_metrics(own: Any) -> None:
    cfg = own(Net)
    model = new_model(cfg.model, shape=(1, 8, 8), classes=10)
    assert type(model).__name__ == "Net"
    assert isinstance(model, Model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = materialize(model, 1337, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1337)
    expected = Net(cfg.model, (1, 8, 8), 10)
    assert made.state_dict().keys() == expected.state_dict().keys()
    for name, value in [*expected.named_parameters(), *expected.named_buffers()]:
        assert torch.equal(dict([*made.named_parameters(), *made.named_buffers()])[name], value), name
    assert made.blocks[0].bias is made.blocks[1].bias
    lines = trained(cfg)
    assert lines[-1]["val_loss"] < lines[0]["loss"]
    assert 0 < lines[-1]["val_right"] <= 1


def test_it_is_resumed_bit_for_bit(own: Any) -> None:
    whole = trained(own(Net, "train.checkpoint_interval=3"))
    start = "train.resume=run/checkpoints/step-00000003"
    again = trained(own(Net, start, "hydra.run.dir=again"))
    assert [line["loss"] for line in again if "loss" in line] == [line["loss"] for line in whole if "loss" in line]


def test_blocks_that_share_a_parameter_cannot_be_sharded_one_by_one(own: Any) -> None:
    model = new_model(own(Net).model, shape=(1, 8, 8), classes=10)
    with pytest.raises(ConfigError, match=r"Net.blocks.0.bias and blocks.1.bias are the same parameter"):
        check_shared(model)


class Inside(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.scale = nn.Parameter(torch.full((width,), 0.25))
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])


class Foreign(nn.Module):
    """A module of another library, whose blocks are ``model.layers``."""

    blocks_at: Any = "model.layers"

    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__()
        self.model = Inside(8)
        self.head = nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.model.first(images.flatten(1)) * self.model.scale
        for layer in self.model.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def losses(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs), batch.targets, reduction="none")


class AsProperty(Foreign):
    blocks_at = "blocks"
    blocks = property(lambda self: self.model.layers)


class NameAsProperty(Foreign):
    blocks_at = property(lambda self: "model.layers")


class TwoNames(Foreign):
    blocks_at = "blocks"

    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__(cfg, shape, classes)
        self.blocks = self.model.layers


class Derived(Foreign, Model):
    """Initialized by wordrun."""


class Nowhere(Foreign):
    blocks_at = "model.layer"


class NoContainer(Foreign):
    blocks_at = "model.first"


@pytest.mark.parametrize("make", [Foreign, AsProperty, NameAsProperty, TwoNames, Derived])
def test_blocks_may_have_another_name(own: Any, make: Any) -> None:
    cfg = own(make)
    model = new_model(cfg.model, shape=(1, 8, 8), classes=10)
    assert list(model.named_blocks()) == ["model.layers.0", "model.layers.1"]
    check_shared(model)
    assert [*model.matrices()] == ["model.layers.0.weight", "model.layers.1.weight"]
    assert [model.block_of(name) for name in ("model.layers.1.bias", "model.scale")] == ["model.layers.1", ""]
    lines = trained(cfg)
    assert lines[-1]["val_loss"] < lines[0]["loss"]
    assert wordrun.load("run").state_dict().keys() == make(cfg.model, (1, 8, 8), 10).state_dict().keys()


@pytest.mark.parametrize("make", [Nowhere, NoContainer])
def test_blocks_that_are_nowhere_are_named(own: Any, make: Any) -> None:
    message = rf"{make.__name__}.blocks_at='{make.blocks_at}' should name an nn.ModuleList.*\(model.layers\)"
    with pytest.raises(ConfigError, match=message):
        new_model(own(make).model, shape=(1, 8, 8), classes=10)


@pytest.mark.parametrize("base", [nn.Module, Model])
def test_a_constructor_may_load_the_model_of_a_run(own: Any, base: type[nn.Module]) -> None:
    """And keep it frozen, as the reference of DPO or the teacher of a distillation."""
    trained(wordrun.compose(["model=convnet", "model.norm=batch", *DIGITS, "train.max_iters=1", "hydra.run.dir=old"]))
    teacher = wordrun.load("old")

    class Student(base):  # type: ignore[misc,valid-type]
        def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
            super().__init__()
            self.head = nn.Linear(64, classes)
            self.teacher = wordrun.load("old").requires_grad_(False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(images.flatten(1))

        def losses(self, batch: Any) -> torch.Tensor:
            wanted = self.teacher(batch.inputs)
            assert wanted.is_meta or torch.equal(wanted, teacher(batch.inputs))
            return (self(batch.inputs) - wanted).square().mean(1)

    whole = trained(own(Student, "train.checkpoint_interval=3", "hooks=[ema]"))
    again = trained(own(Student, "train.resume=run/checkpoints/step-00000003", "hydra.run.dir=again", "hooks=[ema]"))
    assert [line["val_loss"] for line in again if "val_loss" in line] == [
        line["val_loss"] for line in whole if "val_loss" in line
    ]
    assert not [name for name in find(Path("run")).weights() if "teacher" in name]
    loaded: Any = wordrun.load("run")
    for name, value in teacher.state_dict().items():
        assert torch.equal(loaded.teacher.state_dict()[name], value), name
    more = ["train.max_iters=2", "hydra.run.dir=old", "train.resume=auto"]
    trained(wordrun.compose(["model=convnet", "model.norm=batch", *DIGITS, *more]))
    with pytest.raises(
        ConfigError, match=r"the checkpoint from which wordrun.load has made teacher is step 1, .*step 2"
    ):
        trained(own(Student, "train.resume=run", "train.max_iters=9", "hooks=[ema]"))


class Tutored(GPT):
    """A transformer that learns from another one, whose output layer is tied to its embedding."""

    def __init__(self, cfg: Any, vocab_size: int, *args: Any, **options: Any) -> None:
        super().__init__(cfg, vocab_size, *args, **options)
        self.teacher = wordrun.load("old").requires_grad_(False)

    def losses(self, batch: Any) -> torch.Tensor:
        wanted = self.teacher(batch.tokens).detach().softmax(-1)
        logits = self(batch.tokens)[..., : wanted.shape[-1]]
        return F.cross_entropy(logits.transpose(1, 2), wanted.transpose(1, 2), reduction="none").mean(1)


@dataclass
class TutoredConfig(GPTConfig):
    """A transformer that learns from another one."""


def test_a_transformer_may_learn_from_another_one(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts("model"), "tutored", Part(TutoredConfig, Tutored, "model", "tutored", "mine"))
    trained(wordrun.compose(small("train.max_iters=2", "hydra.run.dir=old")))
    teacher, words = wordrun.load("old"), ["model=tutored", "train.max_iters=2", "hydra.run.dir=run"]
    with wordrun.Trainer(wordrun.compose([word for word in small(*words) if word != "model=nano"])) as trainer:
        trainer.train()
        inner: Any = trainer.backend.parts[0].teacher
        assert inner.head.weight is inner.tokens.weight
        for name, value in teacher.named_parameters():
            assert torch.equal(inner.get_parameter(name), value), name
        plain = trainer.measure()["val_loss"]
        trainer.evaluation.cfg.metrics["accuracy"] = AccuracyConfig()
        assert trainer.measure()["val_loss"] == plain  # outputs are computed, too
    cfg = wordrun.compose([*(word for word in small(*words) if word != "model=nano"), "model.n_layer=2"])
    cfg.backend, layout = PPConfig(), Layout(pp=2)
    spec = BackendSpec(cfg, World(0, 2, 0, 2), layout, lambda: None, lambda parameters: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"tutored \(mine\): the stages of a pipeline do not call Tutored.losses"):
        PipelineBackend(spec)


def test_a_run_that_a_constructor_cannot_load_is_named(own: Any) -> None:
    class Student(Net):
        run = "teacher"

        def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
            super().__init__(cfg, shape, classes)
            self.teacher = wordrun.load(self.run).requires_grad_(False)

    with pytest.raises(UserError, match=r"^wordrun.load\('teacher'\) in the constructor of a model: .*teacher"):
        wordrun.Trainer(own(Student))
    trained(wordrun.compose(["model=convnet", *DIGITS, "train.max_iters=1", "hydra.run.dir=teacher"]))
    trained(own(Student, "train.max_iters=1"))
    Path("teacher").rename("moved")
    with pytest.raises(UserError, match=r"^wordrun.load\('teacher'\) in the constructor of a model: .*teacher"):
        wordrun.load("run")
    Student.run = "run"  # as outputs/latest is, once the run has begun
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"step-00000001 is the checkpoint of this model: name the run of the other"
        ):
            wordrun.load("run")


class Idle(Net):
    """A network with a layer that it does not use, and a frozen one."""

    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__(cfg, shape, classes)
        self.aux = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def test_parameters_without_a_gradient_are_named_once(own: Any) -> None:
    said = "model=net (mine/parts.py:3): aux.weight, aux.bias got no gradient in step 1, which leaves them unchanged"
    trained(own(Idle))
    assert [said in line for line in Path("run/log.txt").read_text().splitlines() if "gradient" in line] == [True]
    trained(own(Idle, "backend.find_unused_parameters=true", "hydra.run.dir=told"))
    assert "gradient" not in Path("told/log.txt").read_text()


def test_it_is_loaded_with_its_frozen_parameters_and_buffers(own: Any) -> None:
    with wordrun.Trainer(own(Idle)) as trainer:
        trainer.train()
        expected = dict(trainer.backend.parts[0].state_dict())
    model = wordrun.load("run")
    assert isinstance(model, Idle)
    assert not model.training
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert not model.frozen.weight.requires_grad
    assert model.shift.equal(torch.arange(64.0) / 64)
    assert model(torch.ones(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(UserError, match="which is not text"):
        wordrun.load_tokenizer("run")


def test_torchs_error_about_the_step_before_is_translated(own: Any) -> None:
    """A layer that the last micro-step alone does not use has a gradient, so that only torch notices."""
    cfg = own(Idle)
    model = new_model(cfg.model, shape=(1, 8, 8), classes=10)
    unused = Unused(cfg, 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replica = nn.parallel.DistributedDataParallel(materialize(model, 1, "cpu"))
        replica.module.forward = lambda images: model.head(images.flatten(1)) * model.scale.mean()
        replica(torch.ones(1, 1, 8, 8)).sum().backward()
        with pytest.raises(UnusedError) as caught, unused.named(model):
            replica(torch.ones(1, 1, 8, 8))
    finally:
        dist.destroy_process_group()
    caught.value.in_step(3)
    names = "blocks.0.weight, blocks.0.bias, blocks.1.weight, aux.weight, aux.bias got no gradient"
    assert f"model=net (mine/parts.py:3): {names} in the last micro-step of step 2: remove" in str(caught.value)


class NoForward(nn.Module):
    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def losses(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.layer(batch.inputs.flatten(1)), batch.targets, reduction="none")


def test_it_needs_no_forward_method(own: Any) -> None:
    lines = trained(own(NoForward))
    assert lines[-1]["val_loss"] < lines[0]["loss"]


class TwoArguments(NoForward):
    def losses(self, inputs: Any, targets: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class NoLosses(nn.Module):
    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__()


class Named(NoForward):
    def weights(self) -> list[float]:
        return []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoLosses, r"NoLosses should be an nn.Module with a method losses\(self, batch\)"),
        (lambda cfg, shape, classes: "text", r"str should be an nn.Module with a method losses\(self, batch\)"),
        (
            TwoArguments,
            r"TwoArguments.losses\(self, inputs, targets\) .*should take \(self, batch\)",
        ),
        (Named, r"Named has attributes of names that wordrun uses \(weights\): rename them"),
    ],
)
def test_what_cannot_be_a_model_is_one_message_that_names_the_part(own: Any, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^model=net \(mine/parts.py:3\): " + message):
        wordrun.Trainer(own(make))


def test_a_constructor_that_fails_is_named_with_its_line(own: Any) -> None:
    with pytest.raises(PartError) as caught:
        wordrun.Trainer(own(Net, "model.bug=true"))
    assert str(caught.value).startswith("model=net (mine/parts.py:3): Net failed on the meta device")
    line = 1 + Path(__file__).read_text().splitlines().index("            self.scale = 1 / 0")
    assert f"ZeroDivisionError: division by zero (test_plain_model.py:{line})" in str(caught.value)


@dataclass
class WriterConfig(TextModelConfig):
    """A text model of one's own."""

    name: str = "writer"
    """Name of the preset; part of the run directory."""


class Writer(nn.Module):
    """Tied weights, and a buffer that checkpoints do not store, made from an array of NumPy's."""

    def __init__(self, cfg: WriterConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.from_numpy(np.linspace(0, 1, 16, dtype=np.float32)), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embedding(tokens) + self.shift)

    def losses(self, batch: Any) -> torch.Tensor:
        logits = self.head(self.embedding(batch.tokens) + self.shift)
        return F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none").mean(1)


TEXT = ["data=sample", "optimizer.learning_rate=0.02", "optimizer.warmup_iters=1", "train.sample_tokens=9", *DIGITS[1:]]


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(parts("model"), "writer", Part(WriterConfig, Writer, "model", "writer", "mine/parts.py:4"))
    return wordrun.compose(["model=writer", *TEXT])


def test_a_text_model_trains_counts_tokens_and_generates_the_same_text_from_its_checkpoint(
    writer: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trained(writer)
    assert lines[-1]["val_loss"] < lines[0]["loss"]
    assert lines[-1]["val_perplexity"] > 1
    assert lines[0]["tokens"] == 8 * 64
    capsys.readouterr()
    assert generate.main(["run=run", "length=9", "prompt=\n", "device=cpu", "dtype=fp32"]) == 0
    assert capsys.readouterr().out.strip("\n") in Path("run/samples.txt").read_text()


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (["data=sample", "data.mask_documents=true"], ["documents"]),
        (["data=pairs", "data.path=pairs.jsonl", "data.mask_documents=false"], ["scale"]),
        (["data=pairs", "data.path=pairs.jsonl"], ["documents", "scale"]),
    ],
)
def test_a_text_model_that_does_not_declare_that_it_reads_what_its_data_need_is_refused(
    writer: Config, monkeypatch: pytest.MonkeyPatch, words: list[str], unread: list[str]
) -> None:
    Path("pairs.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 500)
    cfg = wordrun.compose(["model=writer", *TEXT[1:], *words, "tokenizer=byte"])
    missing, declared = " and ".join(f"batch.{name}" for name in unread), ("tokens", "targets", *unread)
    with pytest.raises(ConfigError, match=f"Writer does not declare that its losses read {missing}, ") as refused:
        wordrun.Trainer(cfg)
    assert f"write uses = {declared} in Writer" in str(refused.value)
    assert not Path("run").exists()
    for wrong in ("scale", ("documents", "scales")):
        monkeypatch.setattr(Writer, "uses", wrong, raising=False)
        with pytest.raises(ConfigError, match=r"Writer\.uses=.* should be a tuple of fields of a batch: tokens"):
            wordrun.Trainer(cfg)
    monkeypatch.setattr(Writer, "uses", declared)
    losses = Writer.losses
    scale = torch.ones(())

    def reads(self: Writer, batch: Any) -> torch.Tensor:
        assert batch.documents is None or batch.documents.shape == batch.tokens.shape
        return losses(self, batch) * (scale if batch.scale is None else batch.scale)

    monkeypatch.setattr(Writer, "losses", reads)
    assert trained(cfg)[-1]["step"] == 6


def test_tensors_that_a_constructor_puts_on_the_cpu_become_meta_tensors(
    writer: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(cfg: WriterConfig, vocab_size: int) -> Writer:
        with torch.device("cpu"):
            return Writer(cfg, vocab_size)

    monkeypatch.setitem(parts("model"), "writer", Part(WriterConfig, make, "model", "writer", "mine/parts.py:4"))
    model = new_model(writer.model, vocab_size=3)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, nn.Parameter)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, tokens: self.embedding(tokens), r", but \(1, 1, 16\) for \(1, 1\)"),
        (lambda self, tokens, mask: self.embedding(tokens), r" \(TypeError: .* missing .*'mask'\)"),
    ],
)
def test_a_text_model_without_logits_trains_without_samples_and_says_so(
    writer: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forward: Any, reason: str
) -> None:
    monkeypatch.setattr(Writer, "forward", forward)
    wanted = r"Writer.forward\(tokens\) does not return logits \(B, T, V\) for tokens \(B, T\)"
    with wordrun.Trainer(writer) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match=f"cannot generate text: {wanted}{reason}"):
            trainer.generate("a")
    assert re.search(f"no samples: {wanted}{reason}", capsys.readouterr().out)
    assert not Path("run/samples.txt").exists()
    with pytest.raises(UserError, match=f"step-00000006 cannot generate text: {wanted}"):
        generate.read_model(find(Path("run")), torch.device("cpu"), torch.float32)


@dataclass
class OwnMetric(MetricConfig):
    """Nothing to say."""


@dataclass
class OwnOptimizer(OptimizerConfig):
    """Nothing to say."""


@dataclass
class OwnTracker(TrackerConfig):
    """Nothing to say."""


@dataclass
class OwnHook(HookConfig):
    """Nothing to say."""


@dataclass
class OwnData(DataConfig):
    """Nothing to say."""


def fails(*arguments: Any) -> Any:
    raise KeyError("what they lack")


@pytest.mark.parametrize(
    ("kind", "options", "choice"),
    [
        ("metrics", OwnMetric, "metrics=[broken]"),
        ("optimizer", OwnOptimizer, "optimizer=broken"),
        ("tracker", OwnTracker, "tracker=[jsonl,broken]"),
        ("hooks", OwnHook, "hooks=[broken]"),
        ("data", OwnData, "data=broken"),
    ],
)
def test_a_part_that_fails_is_named_with_its_line_and_the_file_of_the_traceback(
    own: Any, monkeypatch: pytest.MonkeyPatch, kind: str, options: Any, choice: str
) -> None:
    monkeypatch.setitem(parts(kind), "broken", Part(options, fails, kind, "broken", "mine/parts.py:7"))
    with pytest.raises(PartError) as caught:
        trained(own(Net, choice))
    line = 1 + Path(__file__).read_text().splitlines().index('    raise KeyError("what they lack")')
    named = f"{kind}=broken (mine/parts.py:7): fails failed: KeyError: 'what they lack' (test_plain_model.py:{line})"
    assert str(caught.value) == f"{named}; traceback: run/failures/rank-0.txt"
    assert "Traceback" in Path("run/failures/rank-0.txt").read_text()
    log = Path("run/metrics.jsonl")
    assert not log.exists() or not log.read_text()  # before the first step


def test_hooks_and_other_parts_that_cannot_be_made_are_named_together(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class OtherHook(OwnHook):
        """Nothing to say either."""

    for name, options, make in (("first", OwnHook, fails), ("second", OtherHook, lambda options: 1 / 0)):
        monkeypatch.setitem(parts("hooks"), name, Part(options, make, "hooks", name, "mine/parts.py:8"))
    monkeypatch.setitem(parts("metrics"), "third", Part(OwnMetric, "nowhere:third", "metrics", "third", "parts.py:9"))
    with pytest.raises(PartError) as caught:
        wordrun.Trainer(own(Net, "hooks=[first,second]", "metrics=[third]"))
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("hooks=first (mine/parts.py:8): fails failed: KeyError: 'what they lack' (test_plain_model")
    assert second.startswith("hooks=second (mine/parts.py:8): <lambda> failed: ZeroDivisionError: ")
    assert third.startswith("metrics=third (parts.py:9): cannot import nowhere: ModuleNotFoundError")
    assert third.endswith("; traceback: run/failures/rank-0.txt")
    assert Path("run/failures/rank-0.txt").read_text().count("The above exception was the direct cause") == 3
    whole = Part(OwnMetric, lambda options, outputs, batch: outputs, "metrics", "whole", "mine/parts.py:9")
    monkeypatch.setitem(parts("metrics"), "whole", whole)
    monkeypatch.setitem(parts("metrics"), "fails", Part(OwnMetric, fails, "metrics", "fails", "mine/parts.py:10"))
    with pytest.raises(PartError) as caught:
        trained(own(Net, "metrics=[whole,fails]"))
    first, second = str(caught.value).splitlines()
    assert first.startswith("metrics=whole (mine/parts.py:9) should return one value per example, a tensor of shape")
    assert second.startswith("metrics=fails (mine/parts.py:10): fails failed: KeyError")


class Stumbles(Net):
    """Fails in a function that its forward pass calls, or in the backward pass."""

    calls = 0
    backward = False

    def losses(self, batch: Any) -> torch.Tensor:
        losses = super().losses(batch)
        self.calls += 1
        if self.calls > 3 and self.backward:
            losses.register_hook(fails)
        elif self.calls > 3:
            fails(losses)
        return losses


class Digits:
    """A data set with an example that cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return fails() if index == 63 else (torch.full((1, 8, 8), index / 64), index % 10)


def unreadable(data: Any) -> Splits:
    return Splits(Digits(), Digits(), {"shape": [1, 8, 8], "classes": 10})


class Halts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return fails()


def halting(options: Any, parameters: Any) -> Any:
    return Halts([parameter for _, parameter in parameters], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "make", "words", "failed"),
    [
        ("model", Stumbles, [], "Stumbles failed"),
        ("model", type("Stumbles", (Stumbles,), {"backward": True}), [], "Stumbles failed"),
        ("data", unreadable, ["data=broken"], "unreadable failed on example 63 of the training split of data=broken"),
        ("optimizer", halting, ["optimizer=broken"], "halting failed"),
    ],
)
def test_a_part_that_fails_in_training_is_one_message_with_its_lines(
    own: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, kind: str, make: Any, words: list[str], failed: str
) -> None:
    options = {"data": OwnData, "optimizer": OwnOptimizer}.get(kind)
    if options:
        monkeypatch.setitem(parts(kind), "broken", Part(options, make, kind, "broken", "mine/parts.py:7"))
    cfg = own(Net if options else make, *words, "train.eval_interval=0", "train.checkpoint_interval=2")
    with pytest.raises(PartError) as caught:
        trained(cfg)
    source = '    raise KeyError("what they lack")'
    line = 1 + Path(__file__).read_text().splitlines().index(source)
    where = f"{kind}={'broken (mine/parts.py:7)' if options else 'net (mine/parts.py:3)'}"
    said = f"{where}: {failed}: KeyError: 'what they lack' (test_plain_model.py:{line})"
    assert str(caught.value) == f"{said}; traceback: run/failures/rank-0.txt"
    assert caught.value.excerpt().splitlines()[-1] == f"  test_plain_model.py:{line}: {source.strip()}"
    assert "Traceback" in Path("run/failures/rank-0.txt").read_text()
    assert said in Path("run/log.txt").read_text()
    assert "what they lack" not in capsys.readouterr().out  # the caller gets the exception
    assert said in json.loads(Path("run/run.json").read_text())["exit_reason"]


def test_metrics_need_the_results_of_the_forward_pass(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "losses", lambda self, batch: self.head(batch.inputs.flatten(1)).square().mean(1))
    with (
        wordrun.Trainer(own(Net)) as trainer,
        pytest.raises(UserError, match=r"Net.losses should call self\(...\)"),
    ):
        trainer.evaluate()


class Normed(nn.Module):
    """Blocks with statistics in buffers, and a layer that is not trained."""

    def __init__(self, cfg: NetConfig, shape: Any, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)])
        self.head = nn.Linear(16, classes)
        self.bad_at = -1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images.flatten(1))
        if self.training and self.blocks[0][1].num_batches_tracked == self.bad_at:
            self.bad_at, x = -1, x * float("nan")
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)

    def losses(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs), batch.targets, reduction="none")


def test_recomputation_leaves_statistics_as_they_are(own: Any) -> None:
    found = {}
    for kind in ("none", "selective", "full"):
        cfg = own(Normed, f"train.activation_checkpointing={kind}", f"hydra.run.dir={kind}")
        found[kind] = [line["val_loss"] for line in trained(cfg) if "val_loss" in line]
        assert find(Path(kind)).weights()["blocks.1.1.num_batches_tracked"] == 6
    assert found["selective"] == found["full"] == pytest.approx(found["none"], rel=1e-6)


def test_a_skipped_step_leaves_statistics_as_they_were(own: Any) -> None:
    cfg = own(Normed, "train.on_nonfinite=skip", "train.max_iters=4")
    with wordrun.Trainer(cfg) as trainer:
        model: Any = trainer.backend.parts[0]
        model.bad_at = 2
        trainer.train()
        assert trainer.step == 4
        assert all(buffer.isfinite().all() for buffer in model.buffers())
        assert model.blocks[0][1].num_batches_tracked == 4


def test_weights_that_are_not_trained_are_in_checkpoints(own: Any) -> None:
    """Those of a run that began with others than the constructor's, too."""
    trained(own(Normed, "train.max_iters=3", "hydra.run.dir=base", "train.seed=7"))
    words = ["train.init_from=base", "train.checkpoint_interval=3"]
    through = trained(own(Normed, *words, "hydra.run.dir=through"))
    first = Path("through/checkpoints/step-00000003")
    resumed = trained(own(Normed, f"train.resume={first}", "hydra.run.dir=branch", "train.checkpoint_interval=3"))
    assert torch.equal(find(Path("through")).weights()["first.weight"], find(Path("base")).weights()["first.weight"])
    assert resumed[-1]["val_loss"] == through[-1]["val_loss"]
