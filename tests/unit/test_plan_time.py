"""The time of a step: from measured speeds and bandwidths, by arithmetic."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wordrun.composer import compose
from wordrun.errors import ConfigError
from wordrun.layouts import layout
from wordrun.plan import cli
from wordrun.plan.shapes import shapes_of
from wordrun.plan.strategy import Strategy
from wordrun.plan.time import Speeds, StepTime, load_bandwidth, load_speeds, seconds, step_time
from wordrun.plan.traffic import Traffic, traffic

if TYPE_CHECKING:
    from conftest import Command

SPEEDS = Speeds(block_s=1e-6, rest_s=2e-6, update_s=1e-9)
MODEL = ("model=nano", "model.n_layer=4", "model.vocab_size=128", "model.batch_size=8", "train.dtype=fp32")


def measured(operation: str, ranks: int = 2, us: tuple[int, ...] = (10, 100)) -> list[dict[str, Any]]:
    """Results for messages of 10 and 100 kB, or as many sizes as there are times."""
    return [
        {"operation": operation, "ranks": ranks, "size": 10_000 * 10**i, "seconds": t * 1e-6} for i, t in enumerate(us)
    ]


ALL = [each for name in ("all_reduce", "all_gather", "reduce_scatter", "point_to_point") for each in measured(name)]


def step(ranks: int, *overrides: str, speeds: Speeds = SPEEDS, on_cpu: bool = True, kind: str = "none") -> StepTime:
    cfg = compose([*MODEL, *overrides])
    strategy = Strategy("x", cfg, layout(cfg.backend, ranks, ranks), (), on_cpu)
    return step_time(shapes_of(cfg.model, 128), strategy, kind, speeds)


def test_one_rank_computes_all_blocks_and_updates_all_weights() -> None:
    cfg = compose(MODEL)
    found = step(1, "optimizer.gas=3")
    assert found.compute == pytest.approx((4 * 1e-6 + 2e-6) * 3 * 8 * 64)
    assert found.communication == 0
    assert found.update == pytest.approx(1e-9 * shapes_of(cfg.model, 128).parameters)
    assert step(1, kind="full").compute == pytest.approx(step(1).compute * (16 / 3 + 2) / 6)


def test_tensor_parallelism_divides_the_work_and_a_pipeline_adds_its_idle_time() -> None:
    both = replace(SPEEDS, bandwidth=ALL)
    assert step(2, "train.backend=TP", speeds=both).compute == pytest.approx(step(1).compute / 2)
    pipeline = step(2, "train.backend=PP", "backend.microbatches=4", speeds=both)
    assert pipeline.compute == pytest.approx((2 * 1e-6 + 2e-6) * 8 * 64 / (1 - 1 / 5))
    assert pipeline.communication > 0


def test_what_a_pass_takes_for_any_number_of_tokens_counts_for_each_micro_batch() -> None:
    fixed = replace(SPEEDS, block_pass_s=1e-3, rest_pass_s=2e-3, bandwidth=ALL)
    plain = step(1).compute
    assert step(1, "optimizer.gas=3", speeds=fixed).compute == pytest.approx(3 * (plain + 4e-3 + 2e-3))
    pipeline, parts = ("train.backend=PP", "backend.microbatches=4"), 4
    more = step(2, *pipeline, speeds=fixed).compute - step(2, *pipeline, speeds=replace(SPEEDS, bandwidth=ALL)).compute
    assert more == pytest.approx(parts * (2 * 1e-3 + 2e-3) / (1 - 1 / 5))


def test_tensor_parallelism_takes_time_for_each_block_and_pass() -> None:
    both = replace(SPEEDS, bandwidth=ALL)
    words = ("train.backend=TP", "optimizer.gas=3")
    split = [{"ranks": 2, "block_s": 5e-3, "rest_s": 7e-3}, {"ranks": 8, "block_s": 1.0, "rest_s": 1.0}]
    more = step(2, *words, speeds=replace(both, split=split)).total - step(2, *words, speeds=both).total
    assert more == pytest.approx(3 * (4 * 5e-3 + 7e-3))
    assert step(2, speeds=replace(both, split=split)) == step(2, speeds=both)


def test_fsdp_copies_what_it_gathers_and_averages() -> None:
    """Twice for each gathering of all parameters; of gradients the whole and the part that a rank keeps."""
    both = replace(SPEEDS, bandwidth=ALL)
    whole = 4 * shapes_of(compose(MODEL).model, 128).parameters
    for words, copies in ((("optimizer.gas=3",), 3 * (2 * 2 + 1.5)), (("backend.reshard_after_forward=false",), 3.5)):
        found = [step(2, "train.backend=FSDP", *words, speeds=replace(both, copy_s=s)).total for s in (0.0, 1e-9)]
        assert found[1] - found[0] == pytest.approx(1e-9 * whole * copies)
    assert step(2, speeds=replace(both, copy_s=1e-9)) == step(2, speeds=both)


@pytest.mark.parametrize(("stage", "copies"), [(1, 1.5 + 1), (2, 3 * 1.5 + 1), (3, 3 * (2.5 + 2) + 1)])
def test_deepspeed_copies_gradients_and_what_it_gathers(stage: int, copies: float) -> None:
    """Into buckets, twice at stage 3, and the rank's part; and the updated part for the optimizer and back."""
    both, words = (
        replace(SPEEDS, bandwidth=ALL),
        ("train.backend=deepspeed", f"backend.stage={stage}", "optimizer.gas=3"),
    )
    whole = 4 * shapes_of(compose(MODEL).model, 128).parameters
    found = [step(2, *words, speeds=replace(both, copy_s=each)).total for each in (0.0, 1e-9)]
    assert found[1] - found[0] == pytest.approx(1e-9 * whole * copies)


def test_ranks_that_share_cores_leave_them_to_others_while_they_wait() -> None:
    """With four ranks on two cores the idle time of a pipeline costs nothing."""
    crowded = replace(SPEEDS, bandwidth=ALL, crowd=2.0)
    found = step(4, "train.backend=PP", "backend.microbatches=8", speeds=crowded)
    assert found.compute == pytest.approx(6e-6 / 4 * 8 * 64)


def test_messages_are_interpolated_between_measured_sizes() -> None:
    one = Traffic("all_reduce", 2, sent=55_000, message=55_000)  # a ring of two sends its buffer once
    assert seconds(one, measured("all_reduce")) == pytest.approx(55e-6)
    assert seconds(replace(one, sent=110_000), measured("all_reduce")) == pytest.approx(110e-6)
    assert seconds(replace(one, message=1e6, sent=1e6), measured("all_reduce")) == pytest.approx(1e-3)
    assert seconds(replace(one, message=1000, sent=1000), measured("all_reduce")) == pytest.approx(10e-6)


def test_other_numbers_of_ranks_take_as_long_as_their_ring() -> None:
    four = Traffic("all_gather", 4, sent=75_000, message=100_000)
    assert seconds(four, measured("all_gather", ranks=2)) == pytest.approx(100e-6 * (3 / 4) / (1 / 2))
    nearest = [*measured("all_gather", 2), *measured("all_gather", 4, (20, 200))]
    assert seconds(four, nearest) == pytest.approx(200e-6)
    axes = [*nearest, *measured("all_gather", 4, (30, 150))]
    assert seconds(four, axes) == pytest.approx(200e-6), "the slowest of two groups of four ranks"


def test_mpi_is_preferred_on_cpus_under_ddp() -> None:
    results = [*measured("all_reduce"), *measured("all_reduce (mpi4py)", us=(1, 10))]
    fast = step(2, speeds=replace(SPEEDS, bandwidth=results)).communication
    assert step(2, speeds=replace(SPEEDS, bandwidth=measured("all_reduce"))).communication == pytest.approx(10 * fast)


def test_an_accelerator_hides_communication_behind_computation() -> None:
    both = replace(SPEEDS, bandwidth=ALL)
    there, here = (step(2, speeds=both, on_cpu=on_cpu) for on_cpu in (False, True))
    assert there.communication == pytest.approx(max(0.0, here.communication - here.compute / 2))


def test_without_a_bandwidth_there_is_no_time_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="the bandwidth of all_reduce has not been measured"):
        step(2)


def test_what_is_sent_by_operation() -> None:
    cfg = compose([*MODEL, "train.backend=FSDP"])
    model = shapes_of(cfg.model, 128)
    found = traffic(cfg.backend, model, Strategy("x", cfg, layout(cfg.backend, 4, 4), (), True))
    sent = {each.operation: each.sent for each in found if each.ranks > 1}
    size = 4 * model.parameters * 3 / 4
    assert sent == {"all_gather": pytest.approx(2 * size), "reduce_scatter": pytest.approx(size)}


def test_the_plan_takes_both_files(tmp_path: Path) -> None:
    (tmp_path / "bandwidth.json").write_text(json.dumps({"results": ALL}))
    SPEEDS.save(tmp_path / "speeds.json")
    assert load_speeds(tmp_path / "speeds.json") == SPEEDS
    words = ["plan.device=cpu", "plan.devices=2", "plan.per_node=2", "plan.speeds=speeds.json", *MODEL]
    rows = {row.strategy.name: row.seconds for row in cli.plan(words).rows if hasattr(row, "seconds")}
    assert rows["DDP"] is None  # nothing is known about the network
    rows = {
        row.strategy.name: row.seconds
        for row in cli.plan([*words, "plan.bandwidth=bandwidth.json"]).rows
        if hasattr(row, "seconds")
    }
    assert rows["DDP"] == pytest.approx(step(2, speeds=replace(SPEEDS, bandwidth=ALL)).total)


def test_a_sites_network_and_a_devices_peak() -> None:
    rows = cli.plan(["plan.site=polaris", "plan.devices=8", "model=gpt2", "train.dtype=bf16"]).rows
    times = {row.strategy.name: row.seconds for row in rows if hasattr(row, "seconds")}
    assert 0.01 < (times["DDP"] or 0) < 10
    assert times["FSDP, offload"] is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{"size": 1}]}'])
def test_files_of_something_else_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    for load in (load_bandwidth, load_speeds):
        with pytest.raises(ConfigError, match=r"x\.json"):
            load(tmp_path / "x.json")


def test_speeds_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text('{"block_s": 1.0, "rest_s": 1.0, "split_s": 0.0}')
    with pytest.raises(ConfigError, match=r"speeds\.json was measured by another version of wordrun: remove it"):
        load_speeds(tmp_path / "speeds.json")


def test_calibration_of_one_rank(command: Command, tmp_path: Path) -> None:
    # Large enough that a block takes milliseconds: on a busy machine, others are lost in the noise.
    words = ("model.n_embd=128", "model.n_head=2", "model.block_size=64", "train.device=cpu", "train.dtype=fp32")
    done = command(sys.executable, "-m", "wordrun.study.calibrate", tmp_path / "speeds.json", *words, timeout=200)
    assert done.returncode == 0, done.stderr
    found = load_speeds(tmp_path / "speeds.json")
    assert min(found.block_s, found.update_s) > 0
    assert (found.dtype, found.crowd, found.bandwidth, found.copy_s) == ("fp32", 1.0, [], 0)
    assert found.split == []
