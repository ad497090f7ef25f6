"""The figures of a run: rates, device peaks and names."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from wordrun import dist
from wordrun.backend.base import StepResult
from wordrun.backend.step_timer import StepTimer
from wordrun.dist.collectives import all_max, all_mean, all_min, all_rows, all_sum
from wordrun.plan.devices import DEVICES
from wordrun.track.base import LEGEND
from wordrun.train.metrics import BINS, Meter, device_name, one_line, peak_flops
from wordrun.train.state import TrainState

CPU = torch.device("cpu")
RESULT = StepResult(torch.tensor(2.5), torch.tensor(0.75))


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L40", 181e12, 90.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA A40", 149.7e12, 37.4e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12),
        ("AMD Instinct MI250X", 191.5e12, 23.9e12),
        ("Intel(R) Data Center GPU Max 1550", 419e12, 22.9e12),
    ],
)
def test_the_peak_is_that_of_the_device(name: str, half: float, single: float) -> None:
    assert peak_flops(name, torch.bfloat16) == peak_flops(name, torch.float16) == half
    assert peak_flops(name, torch.float32) == single


@pytest.mark.parametrize(
    "name", ["cpu", "NVIDIA GeForce RTX 3090", "NVIDIA A1000 Laptop GPU", "NVIDIA RTX A4000", "NVIDIA A10G", ""]
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_no_longer_name_hides_behind_a_shorter_one() -> None:
    names = [device.model for device in DEVICES]
    assert [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a in b] == []


def test_half_precision_is_faster_than_single() -> None:
    assert all(d.peak_half > d.peak_fp32 > 1e12 for d in DEVICES if d.peak_half and d.peak_fp32)


def meter(ranks: int = 1) -> Meter:
    return Meter(CPU, torch.float32, ranks, tokens_per_example=64, flops_per_example=64 * 1000)


class Clock:
    """A clock that only ``sleep`` moves."""

    now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    time = monotonic = perf_counter


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Be a group of one rank, on whose clock nothing takes time but its ``sleep``."""
    clock = Clock()
    dist.setup(device="cpu")
    for module in ("wordrun.backend.step_timer", "wordrun.train.state"):
        monkeypatch.setattr(f"{module}.time", clock)
    yield clock
    dist.cleanup()


def two_steps(figures: Meter, clock: Clock) -> dict[str, float]:
    """Let ``figures`` see two steps of 30 ms each, 10 of them forward and 20 backward."""
    state = TrainState(step=7, position=7 * 24)
    state.start_clock()
    for _ in range(2):
        figures.clock.start()
        clock.sleep(0.01)
        figures.clock.lap("forward")
        clock.sleep(0.02)
        figures.clock.lap("backward")
        figures.add(RESULT, 0.001, 24)
    return figures.line(state)


def test_a_line_has_the_names_of_the_legend(alone: Clock) -> None:
    of_others = {"val_loss", "val_bpb", "val_NAME", "expert_load", "expert_load_max"}
    assert {*two_steps(meter(), alone), *of_others} == set(LEGEND)


def test_rates_fit_each_other(alone: Clock) -> None:
    line = two_steps(meter(ranks=4), alone)
    assert line["loss"] == 2.5
    assert line["grad_norm"] == 0.75
    assert line["dt"] == pytest.approx(0.030)  # of one step, not of both
    assert (line["dtf"], line["dtb"]) == pytest.approx((0.010, 0.020))
    assert line["dtf"] + line["dtb"] == pytest.approx(line["dt"], rel=1e-5)
    assert line["sps"] == pytest.approx(24 / line["dt"])
    assert line["tps"] == pytest.approx(64 * line["sps"])
    assert line["tps_per_gpu"] == pytest.approx(line["tps"] / 4)
    assert line["sps_per_gpu"] == pytest.approx(line["sps"] / 4)
    assert line["tokens"] == 7 * 24 * 64
    assert line["time"] == pytest.approx(2 * line["dt"])
    assert line["mfu"] is None


def test_mfu_is_the_share_of_all_devices_peaks(alone: Clock) -> None:
    figures = meter(ranks=4)
    figures.peak = 1e9
    line = two_steps(figures, alone)
    assert line["mfu"] == pytest.approx(100 * line["tps"] * 1000 / (4 * 1e9))
    assert f"tokens/s  MFU {line['mfu']:.1f} %  " in one_line(line, 10)


def test_a_line_starts_a_new_mean(alone: Clock) -> None:
    figures = meter()
    two_steps(figures, alone)
    figures.clock.start()
    for label in ("forward", "backward"):
        alone.sleep(0.002)
        figures.clock.lap(label)
    figures.add(RESULT, 0.001, 24)
    assert figures.line(TrainState(step=8))["dt"] == pytest.approx(0.004)


def test_the_phases_of_a_step_add_up(alone: Clock) -> None:
    figures = meter()
    times = {"hooks": 0.04, "data": 0.01, "forward": 0.02, "backward": 0.01, "communication": 0.02, "optimizer": 0.01}
    figures.clock.start()
    for label, seconds in times.items():
        with figures.clock.collective() if label in ("forward", "communication") else contextlib.nullcontext():
            alone.sleep(seconds)
        figures.clock.lap(label)
    figures.add(RESULT, 0.001, 24)
    line = figures.line(TrainState(step=1))
    # The collective within the forward pass, and the phase, of which the other collective is a part.
    expected = {"dt_hooks": 0.04, "dt_data": 0.01, "dt_optimizer": 0.01, "dt_comm": 0.04, "dtf": 0.0, "dtb": 0.01}
    assert {name: line[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    parts = ("dt_data", "dtf", "dtb", "dt_comm", "dt_optimizer")
    assert line["dt"] == pytest.approx(sum(line[name] for name in parts), rel=1e-5)
    assert (line["slowest_rank"], line["slowest_by"]) == (None, None)


@pytest.mark.parametrize(
    "own",
    [
        *([0.5, 0.2], [0.1] * 3, [0.3, 0.1, 0.2, 9.0], [0.01 * n for n in range(64)]),
        *([0.5, 0.2] * 33, [0.1] * 65, [0.3, 0.1, 0.2, 9.0] * 17, [0.01 * n for n in range(101)]),
    ],
)
def test_the_slowest_rank_is_compared_with_the_median(own: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is a rank. A line takes one collective, or with many ranks two; what is sent is always the same."""
    mine, together, calls = threading.local(), threading.Barrier(len(own), timeout=60), []
    sent = [torch.empty(0)] * len(own)

    def reduction(combine: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def collective(values: torch.Tensor) -> torch.Tensor:
            sent[mine.rank] = values
            if mine.rank == 0:
                calls.append((values.dtype, len(values)))
            together.wait()
            result = combine(torch.stack(sent))
            together.wait()
            return result

        return collective

    def reduce(rank: int) -> Any:
        mine.rank = rank
        return meter()._reduce([1.0, rank], own[rank], [0.25, rank, 0])

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: len(own))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: mine.rank)
    monkeypatch.setattr("wordrun.train.metrics.all_rows", reduction(lambda values: values))
    monkeypatch.setattr("wordrun.train.metrics.all_max", reduction(lambda values: values.amax(0)))
    monkeypatch.setattr("wordrun.train.metrics.all_sum", reduction(lambda values: values.sum(0)))
    with ThreadPoolExecutor(len(own)) as pool:
        found = list(pool.map(reduce, range(len(own))))
    assert all(each == found[0] for each in found)
    means, (*most, slowest, behind) = found[0]
    assert means == pytest.approx([1.0, (len(own) - 1) / 2])
    assert most == [0.25, len(own) - 1, 0]
    assert own[slowest] == max(own)
    median, spread = sorted(own)[(len(own) - 1) // 2], max(own) - min(own)
    many = len(own) > 64
    assert behind == pytest.approx(max(own) - median, abs=spread / BINS + 2e-6 if many else 1e-6)
    assert calls == ([(torch.int64, 5), (torch.float32, 2 + 2 * BINS)] if many else [(torch.float32, 6)])


def test_a_rank_alone_gets_the_same_without_a_collective(alone: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of gloo's is one thread waiting for another one, at each logged step."""
    values = torch.tensor([3.0, -1.5, float("nan")], requires_grad=True)
    of_gloo = []
    for operation in ("SUM", "SUM", "MIN", "MAX"):
        of_gloo.append(values.detach().clone())
        torch.distributed.all_reduce(of_gloo[-1], op=getattr(torch.distributed.ReduceOp, operation))
    rows = [torch.empty(3)]
    torch.distributed.all_gather(rows, values.detach())
    calls: list[Any] = []
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *given, **options: calls.append(given))
    found = [reduce(values) for reduce in (all_sum, all_mean, all_min, all_max, all_rows)]
    assert calls == []
    for each, expected in zip(found, [*of_gloo, torch.stack(rows)], strict=True):
        assert torch.equal(each.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert not each.requires_grad
        assert each.data_ptr() != values.data_ptr()


def test_time_before_the_start_is_not_counted() -> None:
    clock = StepTimer(CPU)
    clock.start()
    clock.lap("forward")
    time.sleep(0.02)
    clock.start()
    clock.lap("forward")
    assert clock.read()["forward"] < 0.01
    assert clock.read() == {}


def test_a_cpu_has_a_name_and_no_mfu() -> None:
    assert device_name(CPU) == "cpu"
    assert meter().peak is None


def test_people_read_the_same_figures(alone: Clock) -> None:
    line = two_steps(meter(), alone)
    begin = f"step 7/20  loss 2.5000  lr 1.00e-03  {line['tps']:,.0f} tokens/s  {line['memory']:.2f} GiB"
    assert one_line(line, 20) == begin
    assert one_line(line, 20, 4000.4) == f"{begin}  1:06:40 left"
