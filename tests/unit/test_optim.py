"""The learning rate and what is decayed."""

from __future__ import annotations

import math

import pytest
import torch

from wordrun import model as models
from wordrun.backend.optimizer_state import tensors_of
from wordrun.backend.param_groups import remember_ratios, set_learning_rate
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.registry import part_of
from wordrun.config.rules import check
from wordrun.model.options import GPTConfig
from wordrun.train.optim.adamw import adamw
from wordrun.train.optim.options import AdamWConfig, OptimizerConfig
from wordrun.train.options import LinearScheduleConfig, ScheduleConfig
from wordrun.train.schedule import learning_rate, unfinished_warmup

CFG = OptimizerConfig(learning_rate=1e-3, warmup_iters=100, min_lr=1e-4)
COSINE = ScheduleConfig()


def nanogpt(step: int, peak: float, lowest: float, warmup: int, end: int) -> float:
    """Return nanoGPT's learning rate at ``step``, by the formula of its get_lr."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > end:
        return lowest
    return lowest + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) * (peak - lowest)


@pytest.mark.parametrize("step", [0, 1, 50, 99, 100, 101, 700, 1050, 1999, 2000, 2001, 5000])
def test_the_schedule_is_nanogpts(step: int) -> None:
    assert learning_rate(CFG, COSINE, step, 2000) == pytest.approx(nanogpt(step, 1e-3, 1e-4, 100, 2000), rel=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(0, 1e-3 / 101), (100, 1e-3), (1050, 5.5e-4), (2000, 1e-4), (10_000, 1e-4)])
def test_the_schedule_warms_up_peaks_and_decays(step: int, rate: float) -> None:
    assert learning_rate(CFG, COSINE, step, 2000) == pytest.approx(rate, rel=1e-9)


def test_the_end_is_the_runs_unless_it_is_set() -> None:
    cfg = OptimizerConfig(warmup_iters=0)
    assert learning_rate(cfg, COSINE, 300, 300) == pytest.approx(cfg.learning_rate / 10)  # null: a tenth
    later = OptimizerConfig(warmup_iters=0, lr_decay_iters=600)
    assert learning_rate(later, COSINE, 300, 300) == pytest.approx(0.55 * cfg.learning_rate)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 4), ("linear", 16)])
def test_the_rate_grows_with_the_data_parallel_ranks(rule: str, factor: int) -> None:
    cfg = OptimizerConfig(learning_rate=1e-3, warmup_iters=100, scale_lr=rule)
    for step in (0, 60, 100, 1050, 2000):
        alone = learning_rate(cfg, COSINE, step, 2000)
        assert learning_rate(cfg, COSINE, step, 2000, dp=16) == pytest.approx(factor * alone)
        assert learning_rate(cfg, COSINE, step, 2000, dp=1) == alone
    floor = OptimizerConfig(learning_rate=1e-3, warmup_iters=0, min_lr=1e-4, scale_lr=rule)
    assert learning_rate(floor, COSINE, 2000, 2000, dp=16) == pytest.approx(1e-4)  # what is set stays


def test_the_constant_schedule_warms_up_and_stays() -> None:
    cfg, schedule = OptimizerConfig(warmup_iters=10), ScheduleConfig("constant")
    assert [learning_rate(cfg, schedule, step, 50) for step in (10, 30, 90)] == [cfg.learning_rate] * 3
    assert learning_rate(cfg, schedule, 0, 50) < cfg.learning_rate


def test_the_linear_schedule_is_stable_and_then_decays_over_its_last_steps() -> None:
    cfg, schedule = OptimizerConfig(warmup_iters=10, min_lr=0.0), LinearScheduleConfig(decay_iters=20)
    assert [learning_rate(cfg, schedule, step, 100) for step in (10, 50, 80)] == [cfg.learning_rate] * 3
    rates = [learning_rate(cfg, schedule, step, 100) / cfg.learning_rate for step in (85, 90, 100, 200)]
    assert rates == pytest.approx([0.75, 0.5, 0, 0])
    from_warmup = [learning_rate(cfg, LinearScheduleConfig(), step, 110) / cfg.learning_rate for step in (10, 60, 110)]
    assert from_warmup == pytest.approx([1, 0.5, 0])
    too_long = LinearScheduleConfig(decay_iters=500)
    assert learning_rate(cfg, too_long, 60, 110) == learning_rate(cfg, LinearScheduleConfig(), 60, 110)
    share = LinearScheduleConfig(decay_fraction=0.2)  # of 100 steps
    assert [learning_rate(cfg, share, step, 110) / cfg.learning_rate for step in (90, 100, 110)] == [1.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match=r"decay_iters=5 and schedule\.decay_fraction=0\.5 both set the decay"):
        check(compose(["schedule=linear", "schedule.decay_iters=5", "schedule.decay_fraction=0.5"]))
    earlier = OptimizerConfig(warmup_iters=10, min_lr=0.0, lr_decay_iters=60)
    assert learning_rate(earlier, schedule, 50, 100) == pytest.approx(0.5 * cfg.learning_rate)


@pytest.mark.parametrize("schedule", [COSINE, LinearScheduleConfig(), LinearScheduleConfig(decay_iters=3)])
@pytest.mark.parametrize(("warmup", "end"), [(0, 1), (10, 5), (5, 5), (5, 6)])
def test_short_runs_have_a_rate(warmup: int, end: int, schedule: ScheduleConfig) -> None:
    cfg = OptimizerConfig(warmup_iters=warmup)
    assert all(0 < learning_rate(cfg, schedule, step, end) <= cfg.learning_rate for step in range(end + 1))


@pytest.mark.parametrize(("steps", "reached"), [(50, "50%"), (99, "98%"), (4, "4.0%"), (100, ""), (101, "")])
def test_a_run_that_ends_during_its_warmup_is_told_so(steps: int, reached: str) -> None:
    said = unfinished_warmup(CFG, steps)
    expected = (
        f"the warm-up takes 100 steps (optimizer.warmup_iters), but the run has {steps}: the learning rate reaches "
        f"only {reached} of its peak; optimizer.warmup_iters={steps // 10} suits a run of this length"
    )
    assert said == (expected if reached else "")
    if reached:
        highest = max(learning_rate(CFG, COSINE, step, steps) for step in range(steps))
        assert highest / CFG.learning_rate == pytest.approx(float(reached.rstrip("%")) / 100, abs=0.005)


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    gpt = models.build(GPTConfig(n_layer=1, n_head=1, n_embd=8, bias=True), 11)
    optimizer = adamw(AdamWConfig(weight_decay=0.3, learning_rate=0.5, beta1=0.8, beta2=0.7), gpt.named_parameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in gpt.named_parameters()} == {
        name: 0.3 if p.dim() > 1 else 0.0 for name, p in gpt.named_parameters()
    }
    assert all(group["betas"] == (0.8, 0.7) for group in optimizer.param_groups)


def test_each_parameter_is_updated_once() -> None:
    gpt = models.build(GPTConfig(n_layer=1, n_head=1, n_embd=8), 11)
    optimizer = adamw(AdamWConfig(), gpt.named_parameters())
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in gpt.parameters()})


def test_a_step_is_adamws() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    weight, bias = (p.detach().clone() for p in (layer.weight, layer.bias))
    optimizer = adamw(
        AdamWConfig(learning_rate=0.01, weight_decay=0.5, beta1=0.9, beta2=0.99), layer.named_parameters()
    )
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    # The first step of Adam moves each figure by the rate, against the sign of its gradient (here 1).
    torch.testing.assert_close(layer.weight.detach(), weight * (1 - 0.01 * 0.5) - 0.01, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.bias.detach(), bias - 0.01, rtol=1e-5, atol=1e-6)


def test_the_former_name_of_a_constant_rate_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    cfg = compose(["optimizer.decay_lr=false"])
    assert cfg.schedule == ScheduleConfig("constant")
    assert "optimizer.decay_lr=false means schedule=constant" in caplog.text
    with pytest.raises(ConfigError, match=r"optimizer\.decay_lr=false means schedule=constant, not schedule=linear"):
        compose(["optimizer.decay_lr=false", "schedule=linear"])


def test_lion_steps_by_the_sign_of_its_mean() -> None:
    cfg = compose(["optimizer=lion", "optimizer.weight_decay=0.5"]).optimizer
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = part_of("optimizer", cfg).load()(cfg, [("weight", weight)])
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = torch.tensor([[3.0, -1e-3]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]))
    weight.grad = torch.tensor([[-0.2, 0.0]])
    optimizer.step()  # 0.9 of a mean of 0.03, and 0.1 of -0.2: still above 0
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.85 * 0.95 - 0.1, -1.8 * 0.95 + 0.1]]))
    torch.testing.assert_close(optimizer.state[weight]["mean"], torch.tensor([[0.03 * 0.99 - 0.002, -1e-5 * 0.99]]))


def test_sgd_is_torchs() -> None:
    cfg = compose(["optimizer=sgd", "optimizer.nesterov=true"]).optimizer
    layer = torch.nn.Linear(3, 2)
    optimizer = part_of("optimizer", cfg).load()(cfg, layer.named_parameters())
    assert type(optimizer) is torch.optim.SGD
    decay = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert decay == [(1e-4, 1), (0.0, 1)]
    assert all(group["momentum"] == 0.9 and group["nesterov"] for group in optimizer.param_groups)
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true needs momentum"):
        compose(["optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"])


def test_groups_keep_the_ratio_of_their_rates() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}], lr=0.1)
    set_learning_rate(remember_ratios(optimizer, 0.1), 0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, pytest.approx(0.03)]


def test_a_state_that_cannot_be_saved_is_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"keeps history of weight as list"):
        tensors_of(optimizer, [("weight", weight)])
