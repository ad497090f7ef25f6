"""Memory: a run that cannot fit is refused before anything is built, and one that runs out says what took it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import wordrun
from wordrun.common import cgroup
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model.options import TransformerConfig
from wordrun.plan.memory_fit import TOLERANCE, Fit, Room
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.train import memory as checked
from wordrun.train.memory import MemoryPlan
from wordrun.train.options import accumulation

if TYPE_CHECKING:
    from conftest import Command

GIB = 2**30
SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.max_iters=2 train.eval_interval=0 train.sample_tokens=0
    train.dtype=fp32 train.device=cpu model.n_layer=2 model.n_embd=128
""")


def fit(*words: str, ranks: int = 1) -> Fit:
    cfg = compose(["data=sample", "train.dtype=fp32", *words])
    return Fit(cfg, shapes_of(cfg.model, 64), check(cfg, ranks, ranks), ranks, on_cpu=True)


def trained(*words: str) -> wordrun.Trainer:
    """Build a trainer and take two steps."""
    with wordrun.Trainer(wordrun.compose([*SMALL, *words])) as trainer:
        trainer.train()
    return trainer


# The arithmetic


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ((), 1),
        (("optimizer.gas=3",), 1),
        (("train.backend=FSDP",), 2),
        (("train.backend=PP", "backend.microbatches=4"), 2),
        (("train.backend=PP",), 4),
    ],
)
def test_the_largest_batch_that_fits(words: tuple[str, ...], ranks: int) -> None:
    asked = fit("model.batch_size=5000", *words, ranks=ranks)
    room = Room(asked.need.total / 4)  # a pipeline has buffers for all sequences of a step
    assert not asked.may_fit(room)
    first = asked.remedies(room)[0]
    batches = (
        r"model\.batch_size that fits is (\d+); (model\.batch_size=(\d+) train\.global_batch_size=(\d+)) keeps (\d+)"
    )
    found = re.fullmatch(rf"The largest {batches} sequences per step\.", first)
    assert found, first
    assert int(found[3]) <= int(found[1]) < 5000
    per_rank = 5000 * (asked.cfg.train.accumulation or 1)
    assert found[4] == found[5] == str(per_rank * asked.layout.dp)
    others = [word for word in words if not word.startswith("optimizer.gas")]

    def fits(size: int) -> bool:
        micro_steps = -(-per_rank // size)
        return fit(f"model.batch_size={size}", f"optimizer.gas={micro_steps}", *others, ranks=ranks).fits(room)

    assert fit(*found[2].split(), *others, ranks=ranks).fits(room)
    assert fits(int(found[1]))
    assert not fits(int(found[1]) + 4)  # a multiple of the micro-batches


def test_other_remedies_fit_as_well() -> None:
    activations = fit("model.batch_size=1", "model.block_size=8192", "model.n_layer=20")
    room = Room(activations.need.total / 3)
    assert activations.remedies(room) == ["With train.activation_checkpointing=full the run fits at its batch size."]
    states = fit("model.n_embd=1024", "model.batch_size=1", "model.n_layer=20", ranks=4)
    room = Room(states.need.total / 1.5)
    assert "With train.backend=FSDP the run fits at its batch size." in states.remedies(room)
    assert fit("model.n_embd=1024", "model.batch_size=1", "model.n_layer=20", "train.backend=FSDP", ranks=4).fits(room)


LONG = ("model.batch_size=1", "model.block_size=32768", "train.activation_checkpointing=full")


@pytest.mark.parametrize("words", [("train.backend=FSDP",), ("train.backend=DDP",)])
def test_a_sequence_that_does_not_fit_is_divided(words: tuple[str, ...]) -> None:
    run = fit(*LONG, *words, "optimizer.gas=3", ranks=4)
    room = Room(0.9 * run.need.total)
    (remedy,) = run.remedies(room)
    assert remedy == (
        "A sequence of 32768 tokens does not fit on one rank; with train.backend=FSDP backend.cp=2 model.batch_size=1 "
        "train.global_batch_size=12 the run fits."
    )
    divided = fit(*LONG, *remedy.partition("with ")[2].removesuffix(" the run fits.").split(), ranks=4)
    assert divided.fits(room)
    assert accumulation(divided.cfg, divided.layout.dp) == 6


def test_a_sequence_that_cannot_be_divided_is_not() -> None:
    run = fit(*LONG, "train.backend=FSDP", "model.block_size=32769", ranks=4)
    assert "does not fit with model.batch_size=1 either" in run.remedies(Room(run.need.total / 2))[0]


def test_nothing_fits() -> None:
    assert "a smaller model (model.n_layer, model.n_embd)" in fit("model.n_embd=4096").remedies(Room(2**20))[0]
    assert "a smaller model (model.depth)" in fit("model=modern", "model.depth=8").remedies(Room(2**20))[0]


def test_only_what_cannot_fit_is_refused() -> None:
    """Estimates may be a fifth too high; and how much compiled blocks save is not known."""
    run = fit("model.batch_size=1000")
    total = run.need.total
    assert not run.may_fit(Room(total / TOLERANCE - 1))
    assert run.may_fit(Room(total / TOLERANCE + 1))
    assert not run.fits(Room(total * TOLERANCE - 1))
    assert run.fits(Room(total * TOLERANCE + 1))
    assert fit("model.batch_size=1000", "train.compile=true").may_fit(Room(total / 4))


def test_offloaded_data_must_fit_into_host_memory() -> None:
    cfg = compose(["data=sample", "train.dtype=fp32", "train.backend=FSDP", "backend.cpu_offload=true"])
    run = Fit(cfg, shapes_of(cfg.model, 64), check(cfg, 2, 2), 2, on_cpu=False)
    assert run.need.host > 0
    assert run.may_fit(Room(GIB, GIB))
    assert not run.may_fit(Room(GIB, run.need.host / 2))


def test_without_an_estimate_only_the_states_count() -> None:
    class OtherModel(TransformerConfig):
        pass

    known = fit("model.batch_size=100000")
    run = replace(known, model=replace(known.model, cfg=OtherModel()))
    assert run.need.total == 8 * run.model.parameters
    assert run.may_fit(Room(run.need.total))
    assert not run.may_fit(Room(run.need.total / 2))
    sharded = fit("train.backend=FSDP", ranks=2)
    assert replace(sharded, model=replace(sharded.model, cfg=OtherModel())).may_fit(Room(0))


# Runs


@pytest.mark.parametrize("option", ["model.n_embd=1000000", "model.block_size=100000000"])
def test_a_run_that_cannot_fit_is_refused_before_its_data_is_opened(
    option: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff")  # could not be read
    words = ["data=text", f"data.path={tmp_path / 'text.txt'}", "tokenizer=byte", "tracker=jsonl", "train.device=cpu"]
    done = command("wordrun", *words, option)
    assert done.returncode == 2
    *lines, page = done.stderr.splitlines()
    assert page == "more: docs/plan.md#before-every-run"
    assert re.match(r"not enough memory: this run needs about [\d,]+ GiB on each rank, and .* GiB available$", lines[0])
    assert "  activations " in done.stderr
    assert "wordrun plan plan.device=cpu plan.ranks=1 plan.per_node=1 plan.memory=" in lines[-2]
    assert lines[-1] == "train.check_memory=false starts it anyway."
    assert len(lines) == 12
    assert not (tmp_path / "outputs").exists()


def test_a_batch_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: 4 * GIB)
    with pytest.raises(
        ConfigError, match=r"has 4\.00 GiB available\n(.*\n)+The largest model\.batch_size that fits is "
    ):
        trained("model.batch_size=100000")


def test_the_vocabulary_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known only when the data is open."""
    monkeypatch.setattr(cgroup, "memory", lambda: 100 * 2**20)
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))) + "\n"
    Path("many.txt").write_text(text * 2, encoding="utf-8")
    with pytest.raises(ConfigError, match="not enough memory"):
        trained("data=text", "tokenizer=char", "data.path=many.txt", "model.batch_size=64")


def test_a_run_that_is_close_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    need = Fit(compose(SMALL), shapes_of(compose(SMALL).model, 67), Layout(), 1, on_cpu=True).need.total

    def said(size: float | None, *words: str) -> int:
        """Return how many lines warn with ``size`` times the memory that is needed; None: the system does not say."""
        monkeypatch.setattr(cgroup, "memory", lambda: None if size is None else int(size * need) + 2**20)
        trained(*words)
        return capfd.readouterr().out.count("WARNING memory may run out: this run needs about")

    assert said(1.0) == 1
    assert said(0.0, "train.check_memory=false") == 1
    assert said(2.0) == said(None) == 0


LIMITED = """
import resource, sys
import torch, wordrun.train.trainer
from wordrun.commands.train import main

now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, now + 2**29))
sys.exit(main())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_that_runs_out_is_one_message(command: Command, tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    words = [*SMALL, "model.batch_size=12500", "train.check_memory=false", f"hydra.run.dir={tmp_path / 'run'}"]
    done = command(sys.executable, "limited.py", *words)
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert re.match(r"out of memory on \S+: cannot allocate [\d.]+ [GM]iB$", lines[0]), done.stderr
    assert "  activations " in done.stderr
    assert "; model.batch_size=" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert (done.stdout + done.stderr).count("out of memory") == 1
    assert "out of memory" in (tmp_path / "run" / "log.txt").read_text()
    reason = json.loads((tmp_path / "run" / "run.json").read_text())["exit_reason"]
    assert reason == f"UserError: {lines[0]}"
    assert "Traceback" in (tmp_path / "run" / "failures" / "rank-0.txt").read_text()


class Device:
    """Stands for torch.cuda, as far as an explanation uses it."""

    @staticmethod
    def max_memory_allocated(device: torch.device) -> int:
        return 38 * GIB

    @staticmethod
    def memory_reserved(device: torch.device) -> int:
        return 39 * GIB


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.5 GiB."
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_an_accelerators_error_is_explained(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    check = explaining(compose(SMALL))
    check.device = torch.device("cuda:0")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    lines = str(check.shortage(error)).splitlines()
    assert lines[0] == f"out of memory on cuda:0 on here: {error}"
    assert lines[1] == "torch's allocator used 38.00 GiB at its peak and has reserved 39.00 GiB."
    assert any(line.startswith("  activations ") for line in lines)


def test_memory_of_unknown_size_is_not_given_to_the_plan() -> None:
    check = explaining(compose(SMALL))
    check.room = Room(float(checked.UNLIMITED // 3))
    assert str(check.shortage(MemoryError())).endswith("plan.per_node=1, with this run's options.")


def test_other_errors_pass() -> None:
    assert explaining(compose(SMALL)).shortage(RuntimeError("shapes differ")) is None


def explaining(cfg: Config) -> MemoryPlan:
    """Return a plan without a process group."""
    plan = MemoryPlan.__new__(MemoryPlan)
    plan.device, plan.world = torch.device("cpu"), World(hosts=("here",))
    plan.room, plan.node = Room(GIB), 0
    plan.fit = Fit(cfg, shapes_of(cfg.model, 64), Layout(), 1, on_cpu=True)
    return plan


def test_a_device_is_asked_for_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def __init__(self, count: int, knows: bool = True) -> None:
            self.count, self.knows = count, knows

        def __getattr__(self, name: str) -> Any:
            if name == "mem_get_info" and not self.knows:
                raise AttributeError(name)
            properties = type("Properties", (), {"total_memory": 40})
            answers = {
                "mem_get_info": (30, 40),
                "memory_reserved": 5,
                "memory_allocated": 3,
                "device_count": self.count,
                "get_device_properties": properties,
            }
            return lambda *device: answers[name]

    for asked, free in ((Asked(4), 32), (Asked(2), 16), (Asked(1), 32), (Asked(4, knows=False), 40)):
        monkeypatch.setattr(torch, "get_device_module", lambda device, asked=asked: asked)
        assert checked._free(torch.device("cuda:0"), World(local_size=4)) == free
