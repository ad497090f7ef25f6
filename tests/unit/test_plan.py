"""The plan: its arithmetic compared with torch, its advice, and its command line."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from memory_peak import peak
from wordrun import model as models
from wordrun.backend.compile import prepare
from wordrun.backend.options import SCHEDULES, BackendConfig, DDPConfig
from wordrun.commands.plan import USAGE, main, plan, show
from wordrun.common import log
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.registry import part_of, parts
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.data.batch import Batch
from wordrun.dist import torch_private
from wordrun.dist.mesh import Layout
from wordrun.launch import site_files as sites
from wordrun.model.options import GPTConfig, LlamaConfig, ModernConfig, MoEConfig, TransformerConfig
from wordrun.plan import parameter_shapes
from wordrun.plan.activations import saved_tensors
from wordrun.plan.devices import VARIANTS
from wordrun.plan.estimator import Estimate, Estimator, Unavailable
from wordrun.plan.memory import Memory, memory
from wordrun.plan.options import PlanConfig, hardware
from wordrun.plan.parameter_shapes import NoEstimateError, ParameterShape, numel, shapes_of
from wordrun.plan.pipeline import bubble, in_flight
from wordrun.plan.recommendation import Advice, advise
from wordrun.plan.strategy import Strategy
from wordrun.plan.traffic import traffic
from wordrun.train.hints import spread_context
from wordrun.train.optim.options import AdamWConfig, OptimizerConfig

if TYPE_CHECKING:
    from conftest import Command

SHAPES: dict[str, TransformerConfig] = {
    "gpt2": GPTConfig(n_layer=3, n_head=4, n_embd=128, block_size=128, batch_size=4, bias=True, gelu="tanh"),
    "wide gpt": GPTConfig(n_layer=2, n_head=2, n_embd=256, block_size=128, batch_size=4, dropout=0.1),
    "llama": LlamaConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=128, n_hidden=352, block_size=128, batch_size=4),
    "deep llama": LlamaConfig(n_layer=6, n_head=2, n_embd=64, n_hidden=176, block_size=256, batch_size=2, dropout=0.1),
    "modern": ModernConfig(
        n_layer=3,
        n_head=4,
        n_embd=128,
        block_size=128,
        batch_size=4,
        mlp="relu2",
        norm_weights=False,
        embed_norm=True,
        softcap=15.0,
        value_layers=[0, -1],
        ngram_rows=[500],
    ),
    "experts": MoEConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=128, block_size=128, batch_size=4, n_shared=1),
}


def measured_peak(cfg: Config, vocab_size: int) -> int:
    """Return the peak of the bytes that a forward and a backward pass allocate, besides existing gradients."""
    model = models.build(cfg.model, vocab_size)
    prepare(model, cfg)
    tokens = torch.randint(vocab_size, (cfg.model.batch_size, cfg.model.block_size))

    def passes() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cfg.train.dtype == "bf16"):
            loss = model.losses(Batch(tokens, tokens)).mean()
        loss.backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak(passes)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_within_a_fifth_of_the_measured_peak(shape: str, dtype: str, checkpointing: str) -> None:
    # Products emulated without bf16 instructions need less than the plan's copies; no run computes that way.
    rel = 0.25 if dtype == "bf16" and not torch_private.cpu_is_fast_at_bf16() else 0.2
    # Each vocabulary meets both dtypes and every checkpointing, one of them in fp32 and the other in bf16.
    vocab_size = 128 if (dtype == "fp32") == (checkpointing in ("none", "full")) else 4096
    cfg = Config(model=SHAPES[shape], backend=DDPConfig(), optimizer=AdamWConfig())
    cfg.train.dtype, cfg.train.activation_checkpointing = dtype, checkpointing
    model = shapes_of(cfg.model, vocab_size)
    need = memory(model, Strategy("DDP", cfg, Layout(), on_cpu=True), checkpointing)
    planned = need.total - need.parameters - need.optimizer - need.gradients
    assert planned == pytest.approx(measured_peak(cfg, vocab_size), rel=rel)


@pytest.mark.parametrize("checkpointing", ["full:1+selective:1", "selective:2", "full:3"])
def test_blocks_that_are_recomputed_in_part_are_estimated(checkpointing: str) -> None:
    cfg = Config(model=SHAPES["gpt2"], backend=DDPConfig(), optimizer=AdamWConfig())
    cfg.train.dtype, cfg.train.activation_checkpointing = "fp32", checkpointing
    need = memory(shapes_of(cfg.model, 128), Strategy("DDP", cfg, Layout(), on_cpu=True), checkpointing)
    planned = need.total - need.parameters - need.optimizer - need.gradients
    assert planned == pytest.approx(measured_peak(cfg, 128), rel=0.2)


def test_the_plan_divides_sequences_if_nothing_else_fits() -> None:
    words = ["model=gpt2", "model.block_size=131072", "model.batch_size=1", "train.dtype=bf16", "plan.ranks=4"]
    long = [*words, "train.activation_checkpointing=full"]
    found = plan([*long, "plan.memory=16"])
    assert found.advice.best is not None
    assert found.advice.best.strategy.name == "FSDP, cp"
    assert found.advice.best.strategy.layout.cp == 2
    assert "context parallelism splits each sequence of 131,072 tokens over 2 ranks" in " ".join(found.advice.why)
    assert "backend.cp=2" in found.command
    assert "FSDP, cp" not in [row.strategy.name for row in plan(long).rows if isinstance(row, Estimate)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limit on instructions is for x86-64")
def test_activations_on_a_processor_without_bf16(ranks: Command) -> None:
    """Without bf16 instructions oneDNN makes other copies, so the peak differs."""
    tests = [__file__, "-k", "fifth and gpt2 and bf16", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    done = ranks(1, "-m", "pytest", *tests, under="fork", ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


WINDOWED = replace(SHAPES["llama"], window=40, qk_norm=True)


@pytest.mark.parametrize("shape", [*SHAPES, "windowed"])
def test_what_a_block_keeps_is_what_autograd_saves(shape: str) -> None:
    cfg = Config(model=WINDOWED if shape == "windowed" else SHAPES[shape], backend=DDPConfig())
    cfg.train.dtype = "fp32"
    tensors = saved_tensors(cfg.model, on_cpu=True, bf16=False)
    block = models.build(cfg.model, 64).blocks["0"]
    B, T, C = cfg.model.batch_size, cfg.model.block_size, cfg.model.n_embd
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(B, T, C, requires_grad=True)).sum()
    kept = sum(4 * each.width for each in tensors if each.needed) + 4 * C
    shared = getattr(cfg.model, "n_kv_head", None)
    if (
        shared and not torch_private.CPU_SHARES_HEADS
    ):  # torch 2.8: each query head keeps keys and values, of each window
        window = getattr(cfg.model, "window", None) or T
        keys = sum(min(at + window, T) - max(0, at - window + 1) for at in range(0, T, window))
        kept += 4 * 2 * C * (keys / T - shared / cfg.model.n_head)
    assert sum(storage.nbytes() for storage in saved.values()) == pytest.approx(B * T * kept, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "nano",
        "gpt2",
        "gpt2_xl",
        "llama_debug",
        "llama3_8b",
        "llama3_1b",
        "qwen3_0_6b",
        "modern",
        "moe_debug",
    ],
)
def test_parameters_are_those_of_the_model(name: str) -> None:
    cfg = compose([f"model={name}"])
    whole = models.meta_model(cfg.model, 1000)
    read = shapes_of(cfg.model, 1000)
    assert read.parameters == whole.num_parameters()
    assert numel(read.stage(read.layers)) == whole.num_parameters()
    first = models.meta_model(cfg.model, 1000, layers=range(2))
    assert numel(read.stage(range(2))) == first.num_parameters()
    last = models.meta_model(cfg.model, 1000, layers=[cfg.model.n_layer - 1])
    assert numel(read.stage([cfg.model.n_layer - 1])) == last.num_parameters()


@pytest.mark.parametrize(
    "words",
    [
        ["model=nano"],
        ["model=nano", "model.bias=true"],
        ["model=gpt2"],
        ["model=llama_debug"],
        ["model=llama3_1b"],
        ["model=qwen3_0_6b"],
        ["model=qwen3_30b_a3b"],
        ["model=moe_debug"],
    ],
    ids=" ".join,
)
def test_shapes_by_arithmetic_are_those_of_the_model(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that cannot fit is refused without importing torch."""
    cfg = compose(words).model
    assert not parameter_shapes.needs_torch(cfg)
    found = shapes_of(cfg, 1000, 128)
    other = type("Other", (type(cfg),), {})(**{**vars(cfg), "name": "other"})  # whose shapes only torch knows
    part = replace(part_of("model", cfg), declared=type(other), name="other")
    monkeypatch.setitem(parts("model"), "other", part)
    assert parameter_shapes.needs_torch(other)
    model = shapes_of(other, 1000, 128)
    for name in ("first", "block", "last", "tied"):
        assert sorted(map(repr, getattr(found, name))) == sorted(map(repr, getattr(model, name)))
    assert found.vocab_size == model.vocab_size


def test_the_largest_shard_has_complete_rows() -> None:
    assert ParameterShape((10, 4), tp_dim=0).numel(tp=3, shard=2) == 2 * 4
    assert ParameterShape((10, 4), tp_dim=1).numel(tp=2, shard=3) == 4 * 2
    assert ParameterShape((3,)).numel(shard=8) == 1


# Pipelines


class Stage:
    """Replaces torch's PipelineStage: a schedule's order depends only on the numbers of stages."""

    def __init__(self, number: int, count: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = number, count, 0, pp
        self.group, self.has_backward, self.device, self.submod = None, True, "cpu", torch.nn.Identity()
        self.is_first, self.is_last = number == 0, number == count - 1


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("GPipe", "1F1B")])
@pytest.mark.parametrize(("pp", "runs", "parts"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_passes_in_flight_are_those_of_torchs_schedule(schedule: str, pp: int, runs: int, parts: int) -> None:
    if schedule == "ZBVZeroBubble":
        runs = 2
    mine = (0, 2 * pp - 1) if schedule == "ZBVZeroBubble" else range(0, pp * runs, pp)
    stages: Any = [Stage(number, pp * runs, pp) for number in mine]
    kind: Any = schedules.get_schedule_class(schedule)
    order = kind(stages, parts, loss_fn=lambda output, target: output).pipeline_order
    for rank in range(pp):
        now = most = 0
        for action in order[rank]:
            name = action.computation_type.name if action else ""
            now += (name == "FORWARD") - (name in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
            most = max(most, now)
        assert in_flight(schedule, pp, rank, parts, runs) == most, rank


def test_bubbles() -> None:
    words = ["data=sample", "model=nano", "train.backend=PP", "model.batch_size=8", "model.n_layer=8"]

    def idle(*more: str) -> float:
        return bubble(Strategy("PP", compose([*words, *more]), Layout(pp=4, replicate=2)))

    # 8 sequences are 4 micro-batches; the loop's micro-steps flow through the pipeline together.
    assert idle("backend.pp=4") == 3 / 7
    assert idle("backend.pp=4", "optimizer.gas=3") == 3 / 15
    assert idle("backend.pp=4", "backend.schedule=Interleaved1F1B") == 3 / 11
    assert idle("backend.pp=4", "backend.schedule=InterleavedZeroBubble") == 1 / 9
    assert idle("backend.pp=4", "backend.schedule=ZBVZeroBubble") == 0
    assert bubble(Strategy("DDP", compose(["data=sample"]), Layout(replicate=2))) == 0


# Communication


def estimates(*words: str) -> dict[str, Estimate]:
    """Return the rows of a plan by name."""
    return {row.strategy.name: row for row in reversed(plan(words).rows) if isinstance(row, Estimate)}


def advice(*words: str) -> Advice:
    return plan(words).advice


def test_what_is_sent_by_operation() -> None:
    cfg = compose(["model=nano", "model.vocab_size=128", "train.dtype=fp32", "train.backend=FSDP"])
    model = shapes_of(cfg.model, 128)
    found = traffic(cfg.backend, model, Strategy("x", cfg, cfg.backend.layout(4, 4), (), True))
    sent = {each.operation: each.sent for each in found if each.ranks > 1}
    size = 4 * model.parameters * 3 / 4
    assert sent == {"all_gather": pytest.approx(2 * size), "reduce_scatter": pytest.approx(size)}


def test_bytes_sent_are_those_of_the_papers() -> None:
    rows = estimates("model=gpt2", "train.dtype=bf16", "plan.ranks=8", "plan.per_node=8")
    sent = {name: row.memory["none"].sent for name, row in rows.items()}
    cfg, ring = rows["DDP"].strategy.cfg.model, 7 / 8
    # DeepSpeed's without padding.
    count, unpadded = (models.meta_model(cfg, 50257, multiple=n).num_parameters() for n in (128, 1))
    assert sent["DDP"] == pytest.approx(2 * ring * 4 * count)  # a ring's all-reduce of fp32 gradients
    assert (
        sent["DeepSpeed ZeRO-1"] == sent["DeepSpeed ZeRO-2"] == pytest.approx(2 * ring * 2 * unpadded)
    )  # ZeRO, section 7.1: 2 psi
    assert sent["DeepSpeed ZeRO-3"] == pytest.approx(3 * ring * 2 * unpadded)  # section 7.2: 3 psi
    assert sent["FSDP, ZeRO-3"] == pytest.approx(ring * (2 * 2 + 4) * count)
    assert sent["FSDP like ZeRO-2"] == pytest.approx(ring * (2 + 4) * count)


def test_zero_stages_shard_what_the_paper_says() -> None:
    rows = estimates("model=gpt2", "train.dtype=bf16", "plan.ranks=8", "plan.per_node=8")
    whole, eighth = 124_439_808, 124_439_808 / 8
    for name, sizes in {
        "DeepSpeed ZeRO-1": (2 * whole, 2 * whole, 12 * eighth),
        "DeepSpeed ZeRO-2": (2 * whole, 2 * eighth, 12 * eighth),
        "DeepSpeed ZeRO-3": (2 * eighth, 2 * eighth, 12 * eighth),
        "DeepSpeed ZeRO-2, offload": (2 * whole, 0, 0),
        "DeepSpeed ZeRO-3, offload": (0, 0, 0),
    }.items():
        need = rows[name].memory["none"]
        found = (need.parameters, need.gradients, need.optimizer)
        assert found == pytest.approx(sizes, rel=1e-5), name  # the optimizer also counts its steps
    assert rows["DeepSpeed ZeRO-3, offload"].memory["none"].host == pytest.approx(16 * eighth, rel=1e-5)


# Advice


@pytest.mark.parametrize(
    ("words", "name", "checkpointing"),
    [
        ("model=gpt2 plan.ranks=1", "DDP", "none"),
        ("model=gpt2 plan.ranks=512", "DDP", "none"),
        ("model=gpt2 plan.ranks=1 plan.memory=7", "DDP", "selective"),
        ("model=gpt2_xl model.batch_size=1 plan.ranks=4 plan.memory=25", "FSDP like ZeRO-2", "none"),
        ("model=gpt2_xl model.batch_size=1 plan.ranks=64 plan.memory=25", "FSDP within nodes", "none"),
        ("model=llama3_8b model.block_size=2048 plan.ranks=2", "FSDP, offload", "none"),
        ("model=gpt2_xl plan.ranks=1 plan.device=l4 model.batch_size=1", "DeepSpeed ZeRO-2, offload", "none"),
        # One block of 19 billion parameters: 36 GiB when it is gathered in bf16.
        (
            "model.n_layer=4 model.n_embd=40000 model.n_head=16 plan.ranks=256 plan.per_node=8",
            "TP over FSDP",
            "none",
        ),
        ("model=gpt3_175b plan.ranks=1024 plan.device=a100-80", "3D", "none"),
    ],
)
def test_the_decision_tree(words: str, name: str, checkpointing: str) -> None:
    found = advice(*words.split())
    assert found.best, found.why
    assert (found.best.strategy.name, found.checkpointing) == (name, checkpointing), found.why
    assert found.best.memory[checkpointing].total <= plan(words.split()).estimator.hardware.usable
    assert all(found.why)


def test_nothing_fits() -> None:
    found = advice("model=gpt3_175b", "plan.ranks=2", "plan.memory=8", "model.batch_size=1")
    assert found.best is None
    assert "Nothing fits" in found.why[1]
    assert "plan.ranks=2" in found.why[-1]
    batch = advice("model=gpt2", "plan.ranks=2", "plan.memory=4", "model.batch_size=64")
    assert "model.batch_size=32" in batch.why[-1]


@pytest.mark.parametrize(
    "words",
    [
        "model=gpt2 optimizer.gas=4 plan.ranks=8",
        "model=gpt2_xl plan.ranks=64 train.dtype=bf16",
        "model=gpt3_175b plan.ranks=1024 plan.device=a100-80",
        "model=llama3_8b plan.ranks=48 plan.site=aurora",
        "model=gpt2_large train.backend=3D backend.pp=2 backend.tp=2 optimizer.gas=2 plan.ranks=8",
    ],
)
def test_a_run_accepts_every_strategy(words: str) -> None:
    report = plan(words.split())
    estimator = report.estimator
    ours = [word for word in words.split() if not word.startswith(("plan.", "train.backend", "backend.", "optimizer"))]
    for row in report.rows:
        if isinstance(row, Estimate) and not row.strategy.name.startswith("DeepSpeed"):
            cfg = compose([*ours, f"train.global_batch_size={estimator.sequences}", *row.strategy.overrides])
            assert cfg.backend == row.strategy.backend
            layout = check(cfg, estimator.hardware.devices, estimator.hardware.per_node)
            assert layout == row.strategy.layout
            assert layout.dp * cfg.model.batch_size * row.strategy.gas == estimator.sequences


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("train.global_batch_size=3 model.batch_size=2", [8]),
        ("train.global_batch_size=12 model.batch_size=2", [8, 16]),
        ("train.global_batch_size=3 model.batch_size=2 plan.ranks=1", [2, 4]),
        ("train.global_batch_size=100 model.batch_size=6 plan.ranks=20", [120]),
        ("train.global_batch_size=5 model.batch_size=4 train.backend=PP", [4, 8]),
        ("train.global_batch_size=8 optimizer.gas=1", []),
    ],
)
def test_a_batch_that_the_ranks_cannot_divide_is_refused_as_by_a_run(words: str, values: list[int]) -> None:
    given = ["model=gpt3_13b", *words.split()]
    with pytest.raises(ConfigError) as refused:
        plan(given)
    ours = [word for word in given if not word.startswith("plan.")]
    devices = next((int(word.partition("=")[2]) for word in given if word.startswith("plan.ranks")), 4)
    with pytest.raises(ConfigError) as by_a_run:
        check(compose(ours), devices)
    assert str(refused.value) == str(by_a_run.value)
    says = str(refused.value).partition(": use ")[2]
    assert [int(number) for number in re.findall(r"(?<!=)\b\d+", says)] == values
    for remedy in (*(f"train.global_batch_size={value}" for value in values), *re.findall(r"model\.\S+=\d+", says)):
        assert any(isinstance(row, Estimate) for row in plan([*given, remedy]).rows)
        check(compose([*ours, remedy]), devices)


def test_the_configured_strategy_comes_first() -> None:
    words = ("model=gpt2", "train.backend=FSDP", "backend.shard=2", "backend.replicate=-1", "plan.ranks=8")
    first = plan(words).rows[0]
    assert isinstance(first, Estimate)
    assert first.strategy.name == "as asked"
    assert (first.strategy.layout.shard, first.strategy.layout.replicate) == (2, 4)


def test_more_checkpointing_needs_less_memory() -> None:
    for row in estimates("model=gpt2_medium", "plan.ranks=16").values():
        none, selective, full = (row.memory[kind] for kind in ("none", "selective", "full"))
        assert none.activations > selective.activations > full.activations > 0, row.strategy.name
        assert isinstance(none, Memory)
        assert math.isfinite(none.total)


def test_all_of_aurora_takes_seconds() -> None:
    found = advice("model=gpt3_175b", "plan.site=aurora", f"plan.ranks={12 * 10624}")
    assert found.best
    assert found.best.strategy.name == "3D"
    assert found.best.strategy.layout.size == 127_488


def test_what_the_plan_does_not_cover_is_shown_as_no_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    class OtherBackend(BackendConfig):  # its name is DDP, so that only the plan can object
        pass

    class OtherModel(TransformerConfig):
        pass

    found = plan(["model=gpt2", "model.vocab_size=50304"])
    row = found.estimator.first_that_fits("new", [OtherBackend()])
    assert row == Unavailable("new", "no estimate for train.backend=DDP", "no estimate")
    show(log.console(), replace(found, rows=[row]))
    assert re.search(r"^new +-.* no estimate *$", capsys.readouterr().out, re.MULTILINE)
    estimator = Estimator(
        found.estimator.cfg, replace(found.estimator.model, cfg=OtherModel()), found.estimator.hardware
    )
    rows = estimator.rows()
    assert {row.label for row in rows if isinstance(row, Unavailable)} == {"no estimate"}
    assert advise(estimator, rows).why == ["No strategy can be recommended, for the reasons above."]


def test_a_batch_that_suits_no_strategy() -> None:
    layout = ("train.backend=3D", "backend.pp=4", "backend.tp=4")
    found = advice("model=gpt3_13b", "model.block_size=2047", "plan.ranks=16", *layout)  # cp cannot divide it
    assert (found.best, found.why) == (None, ["No strategy can be recommended, for the reasons above."])


def test_a_batch_of_one_sequence_is_divided_by_context_parallelism() -> None:
    found = advice("model=gpt3_13b", "plan.ranks=16", "train.backend=3D", "backend.pp=4", "backend.tp=4")
    assert found.best is not None
    assert found.best.strategy.layout.cp == 16
    assert "No strategy that keeps sequences whole works here" in " ".join(found.why)


# Options


def test_a_site_names_its_devices() -> None:
    for name, path in sites.site_files({}).items():
        site = sites.load(path)
        assert not site.device or site.device in VARIANTS, name
    polaris = hardware(PlanConfig(site="polaris"))
    assert (polaris.kind, polaris.devices, polaris.per_node) == ("a100-40", 4, 4)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plan.device=a100-41", "did you mean 'a100-40'?"),
        ("plan.rnks=4", "unknown option 'plan.rnks'; did you mean 'plan.ranks'?"),
        ("plan.ranks=many", "plan.ranks=many should be a whole number"),
        ("plan.ranks=0", "plan.ranks=0 should be at least 1"),
        ("plan.ranks=", "plan.ranks= has no value: write plan.ranks=VALUE"),
        ("plan.memory=-1", "plan.memory=-1 should be a number of GiB above 0"),
        ("plan.memory=nan", "plan.memory=nan should be a number of GiB above 0"),
        ("plan.reserve=1", "plan.reserve=1 should be at least 0 and less than 1"),
        ("plan.site=auroa", "plan.site=auroa is neither a file nor one of"),
        ("plan.site=auroa", "did you mean 'aurora'?"),
        ("model=gtp2", "did you mean 'gpt2'?"),
        ("train.max_itrs=2", "unknown option 'train.max_itrs'"),
        ("backend.tp=2", "unknown option 'backend.tp'"),
    ],
)
def test_mistakes_are_named(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == ConfigError.exit_status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_backend_that_does_not_suit_the_devices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.backend=3D", "backend.pp=3", "backend.tp=2", "plan.ranks=8", "plan.per_node=8"]) == 2
    assert "backend.pp=3 x backend.tp=2" in capsys.readouterr().err


def test_any_device_can_be_planned_for_by_its_memory() -> None:
    assert hardware(PlanConfig(device="tomorrow's", memory=512.0)).usable == pytest.approx(0.9 * 512 * 2**30)


# The command line


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2", "model.batch_size=4", "optimizer.gas=2", "tracker=jsonl", "plan.ranks=4"]
    assert main(["--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 124_439_808
    assert found["vocabulary"]["size"] == 50257
    assert "assumed" in found["vocabulary"]["why"]
    assert found["sequences_per_step"] == 32
    assert found["advice"]["command"] == [
        *shlex.split("launch -n 4 python -m wordrun"),
        *words[:-1],
        "train.backend=DDP",
    ]
    ddp = next(each for each in found["strategies"] if each["name"] == "DDP")
    padding = (50304 - 50257) * 768
    assert ddp["memory"]["none"]["parameters"] == 4 * (found["parameters"] + padding)


def test_the_plan_as_text(command: Command) -> None:
    done = command("python", "-m", "wordrun", "plan", "model=gpt2_xl", "train.backend=FSDP", "plan.ranks=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "gpt2_xl: 1.56 billion parameters" in done.stdout
    assert "vocabulary 50,257 (assumed: GPT-2's" in done.stdout
    for name in (
        "as asked",
        "DDP",
        "FSDP like ZeRO-2",
        "FSDP, offload",
        "DeepSpeed ZeRO-3",
        "TP over FSDP",
        "PP",
        "3D",
    ):
        assert f"\n{name}" in done.stdout
    assert "\n  launch -n 2 python -m wordrun model=gpt2_xl train.backend=" in done.stdout


@pytest.mark.parametrize("line", [line for line in USAGE.splitlines() if line.startswith("  wordrun plan")])
def test_examples_of_the_help_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()[2:]) == 0
    assert "launch" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("plan.ranks=null", "plan.reserve=0.1", "a100-40 (39.5)", "wordrun plan model=gpt2_xl"):
        assert word in text


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (["optimizer=adamw"], 8),
        (["hooks=[ema]"], 12),
        (["optimizer=sgd"], 4),
        (["optimizer=lion"], 4),
        (["optimizer=sgd", "optimizer.momentum=0"], 0),
    ],
)
def test_optimizer_state_is_the_optimizers(overrides: list[str], size: int) -> None:
    cfg = compose(["data=sample", "model=nano", *overrides])
    model = shapes_of(cfg.model, 128)
    need = memory(model, Strategy("DDP", cfg, Layout(), on_cpu=True), "none")
    assert need.optimizer == pytest.approx(size * model.parameters, rel=1e-3)


def test_gathered_keys_and_values_need_memory_in_a_block() -> None:
    words = ["data=sample", "model=gpt2", "model.dropout=0", "model.block_size=8192", "model.batch_size=1"]
    found = {}
    for kind in ("heads", "gather"):
        cfg = compose(
            [*words, "train.backend=FSDP", "backend.cp=4", f"backend.cp_attention={kind}", "train.dtype=bf16"]
        )
        found[kind] = memory(shapes_of(cfg.model, 50257), Strategy(kind, cfg, check(cfg, 4)), "full")
    few = 2 * 3 * 64 * 8192  # keys and values of 3 of 12 heads
    more = few * (2 * 2 + 2 * 4) + 512 * 8192 * (1 + 2)  # two copies and fp32 gradients, and a mask
    assert found["gather"].block - found["heads"].block == pytest.approx(more)


def test_muon_has_one_buffer_for_hidden_matrices() -> None:
    cfg = compose(["data=sample"])
    model = shapes_of(cfg.model, 128)
    need = memory(model, Strategy("DDP", cfg, Layout(), on_cpu=True), "none")
    hidden = cfg.transformer.n_layer * (4 + 3 * 3) * cfg.transformer.n_embd**2  # SwiGLU of 3 n_embd
    assert need.optimizer == pytest.approx(8 * model.parameters - 4 * hidden, rel=1e-3)


def test_an_unknown_optimizer_has_no_estimate() -> None:
    cfg = replace(compose(["data=sample"]), optimizer=OptimizerConfig(name="mine"))
    with pytest.raises(NoEstimateError, match="no estimate for optimizer=mine"):
        memory(shapes_of(cfg.model, 128), Strategy("DDP", cfg, Layout(), on_cpu=True), "none")


@pytest.mark.parametrize(("per_node", "fits"), [(4, ""), (8, ""), (2, "backend.cp=2 keeps"), (1, "backend.cp=1 keeps")])
def test_sequences_across_nodes_are_warned_of_with_what_they_cost(per_node: int, fits: str) -> None:
    words = ["model=llama_debug", "data=sample", "train.backend=FSDP", "backend.cp=4", "train.dtype=fp32"]
    cfg = compose([*words, "backend.cp_attention=gather", "model.batch_size=2", "optimizer.gas=1"])
    said = spread_context(cfg, check(cfg, 4), per_node, shapes_of(cfg.model, 65))
    model = cfg.transformer
    keys_and_values = 2 * (model.n_embd // model.n_head) * model.key_heads()
    part = 4 * keys_and_values * 2 * model.block_size // 4  # bytes
    sent = model.n_layer * part * (3 + 3 + 3) / 2**20  # in each pass, and gradients
    spread = (
        f"backend.cp=4 spans nodes, which have {per_node} ranks each: for attention, each rank sends {sent:.1f} MiB"
    )
    assert said == (f"{spread} per step; {fits} the ranks of a sequence on one node" if fits else "")
