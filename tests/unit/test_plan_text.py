"""What ``wordrun plan`` prints: the hardware, the table, its sentences and the command that follows from them."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wordrun.commands.plan import Report, main, plan, show
from wordrun.config.compose import compose
from wordrun.launch.job import Job
from wordrun.launch.parser import parse
from wordrun.launch.ranks import decide_ranks
from wordrun.plan.estimator import LIKE_ZERO_3, Estimate
from wordrun.plan.memory_fit import Comparison, Fit, Room
from wordrun.plan.options import PlanConfig, hardware, ranks_for_launch
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.recommendation import advise

ASSUMED = "(assumed; plan.device=NAME for another, plan.device=cpu for CPUs)"


def lines(*words: str, **screen: Any) -> list[str]:
    """Return the lines that the plan for ``words`` prints, without color."""
    out = io.StringIO()
    show(Console(file=out, color_system=None, **({"width": 200} | screen)), plan(words))
    return out.getvalue().splitlines()


def table(shown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the two lines of the head of the table, and its other lines."""
    begin = next(at for at, line in enumerate(shown) if line.strip().startswith("backend"))
    end = next(at for at, line in enumerate(shown) if line.strip().startswith("3D "))
    return [*shown[begin - 1 : begin + 1]], [*shown[begin + 1 : end + 1]]


@pytest.fixture(scope="module")
def four() -> Report:
    """The plan of a small model for four devices, with a row for each strategy."""
    return plan(["model=nano", "plan.device=a100-40", "plan.ranks=4"])


# The command


@pytest.mark.parametrize(
    ("options", "slots", "words"),
    [
        (PlanConfig(device="cpu"), 1, ""),
        (PlanConfig(device="cpu", ranks=2), 1, "-n 2"),
        (PlanConfig(device="cpu", ranks=8, per_node=4), 1, "-N 2 --ppn 4"),
        (PlanConfig(ranks=1), 4, "-n 1"),
        (PlanConfig(), 4, "-n 4"),
        (PlanConfig(ranks=8), 4, "-N 2 --ppn 4"),
        (PlanConfig(ranks=6), 4, "-n 6"),
        (PlanConfig(site="polaris", ranks=8), 4, "-N 2"),
        (PlanConfig(site="polaris", ranks=2), 4, "-n 2"),
        (PlanConfig(site="polaris", ranks=8, per_node=2), 4, "-N 4 --ppn 2"),
        (PlanConfig(site="sophia"), 8, "-n 8"),  # jobs may have some of a node's devices
        (PlanConfig(site="crux", ranks=16), 8, "-N 2"),
    ],
)
def test_the_command_starts_the_ranks_of_the_plan(options: PlanConfig, slots: int, words: str) -> None:
    target = hardware(options)
    found = ranks_for_launch(options, target)
    assert " ".join(found) == words
    job = Job(("host",) * target.nodes, (64,) * target.nodes, (0,) * target.nodes, (slots,) * target.nodes, "slurm")
    ranks = decide_ranks(parse([*found, "python"]), job)
    assert (ranks.np, ranks.nodes, max(ranks.layout)) == (target.devices, target.nodes, target.per_node)


def test_the_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=nano", "plan.ranks=2", "plan.device=cpu", "plan.memory=8", "data.path='two words'"]
    assert main(words) == 0
    command = "launch -n 2 python -m wordrun model=nano 'data.path='\"'\"'two words'\"'\"'' train.backend=DDP"
    assert capsys.readouterr().out.splitlines()[-1] == f"  {command}"


# The hardware


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan.device=cpu plan.ranks=2 plan.memory=8", "2 x cpu on 1 node, 4 GiB each (8 GiB per node)"),
        ("plan.device=cpu plan.ranks=2 plan.memory=8 plan.per_node=1", "2 x cpu on 2 nodes of 1, 8 GiB each (8 GiB"),
        ("plan.device=cpu plan.memory=8", "1 x cpu, 8 GiB, 10% of it left free: 7.2 GiB usable"),
        ("plan.device=cpu", "1 x cpu, 16 GiB (assumed; plan.memory=GIB for another), 10%"),
        (
            "plan.site=crux",
            "8 x cpu on 1 node, 2 GiB each (assumed: 16 GiB per node; plan.memory=GIB for another), 10%",
        ),
        ("", f"4 x a100-40 on 1 node {ASSUMED}, 39.5 GiB each, 10%"),
        ("plan.memory=12", f"4 x a100-40 on 1 node {ASSUMED}, 12 GiB each, 10%"),
        ("plan.site=engaging", f"4 x a100-40 on 1 node {ASSUMED}, 39.5 GiB each, 10%"),
        ("plan.device=a100-40 plan.ranks=8", "8 x a100-40 on 2 nodes of 4, 39.5 GiB each, 10%"),
        ("plan.site=polaris plan.ranks=1", "1 x a100-40, 39.5 GiB, 10%"),
    ],
)
def test_the_hardware_is_described_with_what_is_assumed(words: str, line: str) -> None:
    assert lines("model=nano", *words.split())[1].startswith(line)


def test_a_refused_runs_plan_has_the_memory_that_its_ranks_share() -> None:
    cfg = compose(["model=nano", "data=sample", "train.dtype=fp32"])
    fit = Fit(cfg, shapes_of(cfg.model, 65), cfg.backend.layout(2, 2), 2, on_cpu=True)
    on_cpu = Comparison(fit, Room(4 * 2**30), "host")
    for found, shared in ((on_cpu, 8), (replace(on_cpu, device="cuda", device_name="A100"), 4)):
        (line,) = [line for line in found.advice(found.room) if line.startswith("For all backends: ")]
        words = line.partition("wordrun plan ")[2].partition(",")[0].split()
        assert words[1:] == ["plan.ranks=2", "plan.per_node=2", f"plan.memory={shared}.0"]
        planned = plan(["model=nano", *words]).estimator.hardware
        assert (planned.devices, planned.nodes, planned.memory) == (2, 1, 4)


# The table


def test_a_small_model_has_a_table_in_mib() -> None:
    head, rows = table(lines("model=nano", "plan.device=cpu", "plan.ranks=2"))
    assert re.findall(r"\w+", head[0]) == shlex.split(
        "param grad optim act none selective full logits buffers total sent step"
    )
    assert re.findall(r"MiB|GiB|fits|bubble", head[1]) == ["MiB"] * 9 + ["fits", "MiB", "bubble"]
    parameters = shapes_of(compose(["model=nano"]).model, 65).parameters
    (ddp,) = [row for row in rows if row.startswith("DDP")]
    assert ddp.split()[3:5] == [f"{4 * parameters / 2**20:.1f}"] * 2


def test_a_large_model_has_a_table_in_gib() -> None:
    head, rows = table(lines("model=gpt2_xl", "plan.device=a100-40"))
    assert (head[1].count("GiB"), head[1].count("MiB")) == (10, 0)
    assert any(row.startswith("DDP") and " 5.80  5.80  11.61 " in row for row in rows)


def test_columns_without_an_entry_are_left_out(tmp_path: Path) -> None:
    def last(*words: str) -> list[str]:
        return re.findall(r"bubble", table(lines("model=gpt2", *words))[0][1])

    assert last("plan.device=a100-40", "plan.ranks=1") == []
    assert last("plan.device=a100-40", "plan.ranks=2") == ["bubble"]


@pytest.mark.parametrize(("width", "sizes"), [(80, ["total"]), (120, ["param", "grad", "optim", "act none", "total"])])
def test_a_narrow_terminal_gets_the_columns_that_fit(width: int, sizes: list[str]) -> None:
    shown = lines("model=nano", "plan.device=a100-40", width=width, force_terminal=True)
    assert not [line for line in shown if "…" in line or len(line) > width]
    head, rows = table(shown)
    assert re.findall(r"act none|selective|\w+", head[0])[: len(sizes)] == sizes
    assert next(row.strip()[:16] for row in rows if "DeepSpeed" in row) == "DeepSpeed ZeRO-1"
    said = " ".join(" ".join(shown).split())
    (named,) = re.findall(r"Columns left out because the terminal is narrow: (.*?)\. Append \| less -S", said)
    assert {"logits", "buffers", "bubble (2 stages)"} <= set(named.split(", "))
    assert not set(named.split(", ")) & set(sizes)


# Sentences


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model=nano", "804,096 parameters in 4 blocks; the largest layer is a block, with 196,864 parameters; voc"),
        (
            "model=nano model.n_layer=1",
            " parameters in 1 block; the largest layer is a block, with 196,864 parameters; ",
        ),
        ("model=gpt2", "the largest layer is the embedding, with 39.38 million parameters; "),
        ("model=llama3_8b", "the largest layer is the output layer, with 525.34 million parameters; "),
        ("model=qwen3_30b_a3b", "30.53 billion parameters, of which a token uses 3.35 billion, in 48 blocks; "),
        ("model=gpt2_xl model.batch_size=1", "bf16, 1 sequence of 1024 tokens per rank and micro-step, 4 per step; "),
        (
            "model=nano plan.ranks=2",
            "The full model fits on one a100-40 of 39.5 GiB with 10% left free, so DDP is enough: each rank keeps the "
            "full model, and only gradients are averaged.",
        ),
        ("model=nano plan.ranks=1", "The full model fits on one a100-40 of 39.5 GiB with 10% left free. "),
        ("model=nano plan.ranks=1 plan.reserve=0", "The full model fits on one a100-40 of 39.5 GiB. "),
        (
            "model=nano plan.device=cpu plan.ranks=2 plan.memory=8",
            "The full model fits into the 4 GiB of one rank with 10% left free, so DDP is enough",
        ),
        (
            "model=gpt2 plan.ranks=1 plan.memory=7",
            "Without activation checkpointing the full model does not fit on one a100-40 of 7 GiB with 10% left free. "
            "It fits with train.activation_checkpointing=selective, which recomputes all but the matrix products.",
        ),
        (
            "model=gpt2_xl plan.ranks=4 plan.memory=25",
            "Its largest layer does, so parameters, gradients and optimizer state are sharded across the ranks. It "
            "fits with train.activation_checkpointing=full, which repeats the forward pass, a third more operations.",
        ),
        (
            "model=llama3_8b model.block_size=2048 plan.ranks=2",
            "Its largest layer does, so parameters, gradients and optimizer state are sharded and kept in host memory.",
        ),
        ("model=gpt2 plan.ranks=1", "TP over FSDP; PP; 3D: there is only one device "),
        (
            "model=gpt3_175b plan.ranks=2 plan.memory=8 model.batch_size=1",
            "Nothing fits. DeepSpeed ZeRO-3, offload with train.activation_checkpointing=full comes closest: it needs "
            "10.05 GiB, and 7.20 GiB are usable. Try more devices than plan.ranks=2.",
        ),
        (
            "model=gpt3_175b plan.ranks=1024 plan.device=a100-80",
            "Gathering every layer from 256 nodes would be slow, so a pipeline, whose stages communicate least, spans "
            "the nodes, and tensor-parallel ranks share a node.",
        ),
        (
            "model.n_layer=4 model.n_embd=40000 model.n_head=16 plan.ranks=256 plan.per_node=8",
            "One layer does not fit either, so tensor parallelism splits each layer across a node's ranks. ",
        ),
    ],
)
def test_sentences(words: str, sentence: str) -> None:
    assert sentence in " ".join(" ".join(lines("train.dtype=bf16", *words.split())).split())


@pytest.mark.parametrize(
    ("fits", "tried", "sentence"),
    [
        ("PP", ["DDP", LIKE_ZERO_3], "Sharding is not enough, so a pipeline splits the blocks across the ranks."),
        ("PP", ["DDP"], "No layout that keeps the blocks together suits the run, so a pipeline splits the blocks"),
        (
            "3D",
            ["DDP", LIKE_ZERO_3],
            "so tensor parallelism splits each layer across a node's ranks, and a pipeline splits the blocks.",
        ),
        (
            "DeepSpeed ZeRO-3, offload",
            ["DDP"],
            "Sharding is not enough, but DeepSpeed can keep part of it in host memory.",
        ),
    ],
)
def test_what_is_said_of_a_strategy_that_fits_where_others_do_not(
    fits: str, tried: list[str], sentence: str, four: Report
) -> None:
    by_name = {row.strategy.name: row for row in four.rows if isinstance(row, Estimate)}
    rows = [*(replace(by_name[name], fits=None) for name in tried), replace(by_name[fits], fits="none")]
    assert sentence in " ".join(advise(four.estimator, rows).why)


def test_deepspeed_is_an_alternative_if_it_fits_as_well() -> None:
    """In the command that is shown, which has the activation checkpointing that FSDP needs."""
    for memory, stage in (("39.5", ""), ("45", "2")):
        shown = lines("model=gpt2_xl", "plan.device=a100-40", f"plan.memory={memory}")
        assert "train.activation_checkpointing" not in " ".join(shown[-3:])
        offered = [line for line in shown if line.startswith("or with DeepSpeed: ")]
        assert offered == [f"or with DeepSpeed: train.backend=deepspeed backend.stage={stage}"] * bool(stage)


def test_the_example_of_the_docs_is_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    command, example = re.findall(r"```(?:console)?\n(.*?)```", page, re.DOTALL)[:2]
    printed = " ".join(" ".join(lines(*command.split()[2:])).split())
    for line in example.splitlines():
        assert " ".join(line.split()) in printed
