"""A plain ``nn.Module`` as a model, from a project's folder: every backend that can train it gives the same losses."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

PARTS = """
import wordrun

wordrun.register("model", "net", "net:NetConfig", "net:Net")
wordrun.register("model", "spare", "net:SpareConfig", "net:Spare")
wordrun.register("model", "writer", "net:WriterConfig", "net:Writer")
wordrun.register("model", "direct", "net:DirectConfig", "net:Direct")
wordrun.register("model", "picture_net", "pictures:PictureNetConfig", "net:Net")
wordrun.register("model", "foreign", "foreign:ForeignConfig", "foreign:Foreign")
wordrun.register("model", "own", "foreign:OwnConfig", "foreign:Own")
wordrun.register("model", "outside", "foreign:OutsideConfig", "foreign:Outside")
wordrun.register("data", "pictures", "pictures:PicturesConfig", "wordrun.data.images:digits")
"""
NET = '''
from dataclasses import dataclass
import torch.nn.functional as F
from torch import nn
from wordrun.config import ModelConfig, TextModelConfig


@dataclass
class NetConfig(ModelConfig):
    """Three layers."""

    name: str = "net"


class Net(nn.Module):
    def __init__(self, cfg, shape, classes):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        x = images.flatten(1)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.head(x)

    def losses(self, batch):
        return F.cross_entropy(self(batch.inputs).float(), batch.targets, reduction="none")

    def metrics(self, batch, outputs):
        return {"right": outputs.argmax(1) == batch.targets}


@dataclass
class DirectConfig(ModelConfig):
    """A layer."""

    name: str = "direct"


class Direct(nn.Module):
    def __init__(self, cfg, shape, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)

    def losses(self, batch):
        assert str(batch.inputs.dtype) == "torch.float32"  # like targets that are real numbers
        return F.cross_entropy(self.head(batch.inputs.flatten(1)), batch.targets, reduction="none")


@dataclass
class SpareConfig(NetConfig):
    """A network with a layer that is never used, and one that only images of two classes use."""

    name: str = "spare"


class Spare(Net):
    def __init__(self, cfg, shape, classes):
        super().__init__(cfg, shape, classes)
        self.aux = nn.Linear(3, 3)
        self.rare = nn.Linear(64, classes)

    def losses(self, batch):
        logits = self(batch.inputs).float()
        few = batch.targets < 2
        if few.any():
            logits[few] += self.rare(batch.inputs[few].flatten(1))
        return F.cross_entropy(logits, batch.targets, reduction="none")


@dataclass
class WriterConfig(TextModelConfig):
    """Predicts each token from the one before it."""

    name: str = "writer"


class Writer(nn.Module):
    def __init__(self, cfg, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, vocab_size)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + F.silu(self.blocks[0](x)))

    def losses(self, batch):
        logits = self(batch.tokens)
        return F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none").mean(1)
'''
# The same images in batches of another class.
PICTURES = """
from dataclasses import dataclass
from typing import ClassVar
from net import NetConfig
from torch import Tensor
from wordrun.config import ImagesConfig
from wordrun.data.examples import ExampleOrder, ValidationExamples
from wordrun.data.loader import Loader
from wordrun.data.batch import TensorBatch
from wordrun.train.examples import ExamplesTask


@dataclass(frozen=True)
class Pictures(TensorBatch):
    inputs: Tensor
    targets: Tensor

    def __len__(self):
        return len(self.inputs)


class Order(ExampleOrder):
    def empty(self, size, *, pinned=False):
        return Pictures(**vars(super().empty(size, pinned=pinned)))


class Fixed(ValidationExamples):
    def __getitem__(self, i):
        batch, weights = super().__getitem__(i)
        return Pictures(**vars(batch)), weights


class PicturesTask(ExamplesTask):
    def loader(self, gas, device):
        size, ranks = self.cfg.model.batch_size, self.layout.dp
        return Loader(Order(self.train, self.cfg.train.seed), size, gas, self.dp_rank, ranks, device)

    def validation_set(self, count):
        return Fixed(self.val, self.cfg.model.batch_size, count, self.dp_rank, self.layout.dp)


@dataclass
class PictureNetConfig(NetConfig):
    name: str = "picture_net"
    task: ClassVar[str] = "pictures:PicturesTask"


@dataclass
class PicturesConfig(ImagesConfig):
    name: str = "pictures"
    task: ClassVar[str] = "pictures:PicturesTask"
"""
# A network whose blocks have another name, beside a trained one, which is called before it and outside of forward.
FOREIGN = '''
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
import wordrun
from wordrun.model import Model
from net import Net, NetConfig


class Library(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x):
        for layer in self.layers:
            x = x + self.scale * F.silu(layer(x))
        return x


@dataclass
class ForeignConfig(NetConfig):
    """A network that learns from another one."""

    name: str = "foreign"


class Foreign(nn.Module):
    blocks_at = "model.layers"

    def __init__(self, cfg, shape, classes):
        super().__init__()
        self.model = Library()
        self.head = nn.Linear(64, classes)
        self.teacher = wordrun.load("one").requires_grad_(False)

    def forward(self, images):
        return self.head(self.model(images.flatten(1)))

    def losses(self, batch):
        assert not self.teacher.training
        wanted = self.teacher(batch.inputs).float().softmax(1)
        logits = self(batch.inputs).float()
        return sum(F.cross_entropy(logits, target, reduction="none") for target in (batch.targets, wanted))


@dataclass
class OwnConfig(NetConfig):
    """The same, initialized by wordrun."""

    name: str = "own"


class Own(Foreign, Model):
    pass


@dataclass
class OutsideConfig(NetConfig):
    """A frozen module that losses calls, before forward."""

    name: str = "outside"
    block: bool = True
    """Whether it is a block."""


class Outside(Net):
    def __init__(self, cfg, shape, classes):
        super().__init__(cfg, shape, classes)
        self.reference = nn.Linear(64, classes).requires_grad_(False)
        self.names = ["reference"] if cfg.block else []

    def named_blocks(self):
        return {name: self.get_submodule(name) for name in ("blocks.0", "blocks.1", *self.names)}

    def losses(self, batch):
        wanted = self.reference(batch.inputs.flatten(1)).softmax(1)
        return super().losses(batch) + F.cross_entropy(self(batch.inputs), wanted, reduction="none")
'''
SMALL = shlex.split("""
    model=net data=digits tracker=jsonl train.dtype=fp32 train.device=cpu train.global_batch_size=16
    train.max_iters=4 train.log_interval=1 train.eval_interval=2 train.eval_iters=2
    optimizer.warmup_iters=1 optimizer.learning_rate=1e-2
""")
TEXT = ["model=writer", "data=sample", "train.sample_tokens=8", *SMALL[2:]]
FOREIGN_RUN = ["model=foreign", *SMALL[1:], "train.checkpoint_interval=2"]
OWN_RUN = ["model=own", *FOREIGN_RUN[1:]]
# In some micro-steps of two images, a rank does not use all layers.
SPARE = ["model=spare", *SMALL[1:]]
SCRIPT = """
import json, sys
import wordrun
from wordrun import dist

with dist.session() as world:
    for words in json.loads(sys.argv[1]):
        with wordrun.Trainer(wordrun.compose(words, ranks=world.size), world) as trainer:
            trainer.train()
            model = trainer.backend.parts[0]
            if "model.layers" in getattr(model, "blocks_at", "") and words[-2] == "train.backend=FSDP":
                units = [*model.model.layers, *model.teacher.blocks, model.teacher]
                assert all(type(unit).__name__.startswith("FSDP") for unit in units)
            assert str(trainer.result.loss.dtype) == "torch.float32" or "pictures-zero1" in words[-1], words
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> None:
    for name, text in {
        "parts.py": PARTS,
        "net.py": NET,
        "pictures.py": PICTURES,
        "foreign.py": FOREIGN,
        "wordrun.yaml": "module: parts\n",
        "script.py": SCRIPT,
    }.items():
        (tmp_path / name).write_text(text)


def figures(run: str) -> list[float]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "val_loss", "val_right") if key in line]


ONE = {
    "one": [*SMALL, "model.batch_size=16"],
    "spare-one": [*SPARE, "model.batch_size=16"],
    "text-one": [*TEXT, "model.batch_size=16"],
    "foreign-one": [*FOREIGN_RUN, "model.batch_size=16"],
    "outside-one": ["model=outside", *SMALL[1:], "model.batch_size=16"],
    "own-one": [*OWN_RUN, "model.batch_size=16"],
}
TWO = {
    "ddp": [*SMALL, "train.backend=DDP", "model.batch_size=4", "train.checkpoint_interval=2"],
    "fsdp": [*SMALL, "train.backend=FSDP", "model.batch_size=8"],
    "again": [*SMALL, "train.backend=FSDP", "model.batch_size=8", "train.resume=ddp/checkpoints/step-00000002"],
    "spare-ddp": [*SPARE, "train.backend=DDP", "model.batch_size=2", "backend.find_unused_parameters=true"],
    "foreign-ddp": [*FOREIGN_RUN, "model.batch_size=4", "train.backend=DDP"],
    "foreign-fsdp": [*FOREIGN_RUN, "model.batch_size=8", "train.backend=FSDP"],
    "foreign-again": [
        *FOREIGN_RUN,
        *("model.batch_size=8", "train.resume=foreign-ddp/checkpoints/step-00000002", "train.backend=FSDP"),
    ],
    "outside-fsdp": ["model=outside", *SMALL[1:], "model.batch_size=8", "train.backend=FSDP"],
    "own-fsdp": [*OWN_RUN, "model.batch_size=8", "train.backend=FSDP"],
    "own-again": [
        *OWN_RUN,
        *("model.batch_size=4", "train.resume=own-fsdp/checkpoints/step-00000002", "train.backend=DDP"),
    ],
    "text-ddp": [*TEXT, "train.backend=DDP", "model.batch_size=4"],
    "text-fsdp": [*TEXT, "train.backend=FSDP", "model.batch_size=8"],
    "text-fsdp-bf16": [*TEXT, "train.backend=FSDP", "model.batch_size=8", "train.dtype=bf16"],
    "direct-bf16": ["model=direct", *SMALL[1:], "train.backend=FSDP", "model.batch_size=8", "train.dtype=bf16"],
}
if importlib.util.find_spec("deepspeed"):
    ZERO = ["train.backend=deepspeed", "model.batch_size=8"]
    TWO |= {f"zero{stage}": [*SMALL, *ZERO, f"backend.stage={stage}"] for stage in (1, 3)}
    TWO["own-zero1"] = [*OWN_RUN, *ZERO, "backend.stage=1"]
    TWO["own-zero3"] = [*OWN_RUN, *ZERO, "backend.stage=3"]
    TWO["foreign-zero3"] = [*FOREIGN_RUN, *ZERO, "backend.stage=3"]
    TWO["text-zero3"] = [*TEXT, *ZERO, "backend.stage=3"]
    TWO["pictures-zero1"] = ["model=picture_net", "data=pictures", *SMALL[2:], *ZERO, "train.dtype=bf16"]


def test_ranks_train_it_like_one_process_and_generate_the_same(ranks: Command) -> None:
    for size, runs in ((1, ONE), (2, TWO)):
        words = [[*each, f"hydra.run.dir={name}"] for name, each in runs.items()]
        done = ranks(size, "script.py", json.dumps(words), under="fork", timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(figures("one")) == 12
    assert figures("spare-one") != figures("one")
    for name in ("foreign-ddp", "foreign-fsdp", "own-one"):
        stored = Path(name, "checkpoints/step-00000004/tensors.json").read_text()
        assert "model.head.weight" in stored
        assert "teacher" not in stored
    for name in TWO:
        if name.startswith("direct"):
            continue
        near = 0.05 if "bf16" in TWO[name][-1] else 1e-5
        one = next(
            (f"{kind}-one" for kind in ("text", "spare", "foreign", "outside", "own") if name.startswith(kind)), "one"
        )
        assert figures(name) == pytest.approx(figures(one), rel=near), name
        if one == "text-one" and near < 0.01:
            assert Path(name, "samples.txt").read_text() == Path("text-one/samples.txt").read_text()


def test_ddp_names_parameters_without_a_gradient(ranks: Command) -> None:
    words = [*SPARE, "train.backend=DDP", "model.batch_size=8", "hydra.run.dir=run"]
    done = ranks(2, "script.py", json.dumps([words]), under="fork", timeout=60)
    assert done.returncode == 1
    assert re.search(
        r"model=spare \(net\): aux.weight, aux.bias got no gradient in step 1: remove them, freeze them "
        r"\(requires_grad=False\), or use backend.find_unused_parameters=true\n",
        done.stderr,
    )
    assert "Expected to have finished reduction" not in done.stderr


def test_fsdp_names_what_is_called_outside_of_forward(ranks: Command) -> None:
    words = ["model=outside", *SMALL[1:], "model.block=false", "train.backend=FSDP", "model.batch_size=8"]
    done = ranks(2, "script.py", json.dumps([[*words, "hydra.run.dir=run"]]), under="fork", timeout=60)
    assert done.returncode == 1
    assert "Outside failed because parameters are sharded outside of forward and of the blocks: call" in done.stderr


def test_what_it_does_not_say_is_refused_and_not_estimated(command: Command) -> None:
    text = """import wordrun, sys
from wordrun.common.errors import ConfigError
for backend in ("TP", "PP"):
    try:
        wordrun.compose([*sys.argv[1:], f"train.backend={backend}", "model.batch_size=8"], ranks=2)
    except ConfigError as error:
        print(error)
"""
    refused = command(sys.executable, "-c", text, *SMALL).stdout
    for what in ("its matrices can be split across", "its layers can be split into stages"):
        assert refused.count(f"model=net does not declare how {what}") == 1
    shown = command(sys.executable, "-m", "wordrun", "plan", "model=net", "data=digits")
    assert shown.stderr.startswith("no estimate for model=net"), shown.stdout + shown.stderr
