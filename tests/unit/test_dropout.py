"""Dropout on a CPU: the right share, the right scale, the right gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from wordrun.model.attention import causal_attention
from wordrun.model.dropout import Dropout, dropout, keep_mask
from wordrun.model.kernel_thresholds import SHORT, SHORT_FP32


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_the_share_that_is_dropped(p: float) -> None:
    torch.manual_seed(0)
    n = 400_003  # not a multiple of the four that share a draw
    keep = keep_mask(torch.empty(n), p)
    deviation = (p * (1 - p) / n) ** 0.5
    assert (~keep).float().mean().item() == pytest.approx(p, abs=4 * deviation + 2**-16)
    neighbors = (~keep[1:] & ~keep[:-1]).float().mean().item()
    assert neighbors == pytest.approx(p * p, abs=6 * deviation + 2**-16)  # neighbors are dropped independently


def test_it_draws_from_torchs_stream() -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(keep_mask(torch.empty(5, 7), 0.5))
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_scaled_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    x = torch.full((64, 65), 3.0, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert y.dtype == dtype
    assert set(y.detach().unique().tolist()) == {0.0, 4.0}
    assert x.grad is not None
    assert x.grad.equal(y.detach() / 3)


def test_the_module_acts_in_training_alone() -> None:
    x = torch.ones(1000)
    module = Dropout(0.5)
    assert not module(x).equal(x)
    assert module.eval()(x).equal(x)
    assert repr(module) == "Dropout(p=0.5)"


@pytest.mark.parametrize("heads_of_keys", [1, 2, 6])
def test_attention_with_dropout_is_torchs_attention_on_average(heads_of_keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 9, 8)
    k, v = torch.randn(2, 2, heads_of_keys, 9, 8)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(causal_attention(q, k, v, 1e-9), right, atol=1e-6)  # nothing dropped
    mean = torch.stack([causal_attention(q, k, v, 0.3) for _ in range(4000)]).mean(0)
    assert torch.allclose(mean, right, atol=0.08)


@pytest.mark.parametrize("heads_of_keys", [2, 6])
@pytest.mark.parametrize("tokens", [SHORT // 8, SHORT + 8])  # without the fused kernel and with it
def test_attention_in_bf16_is_that_in_fp32_within_its_precision(tokens: int, heads_of_keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 6, tokens, 8, requires_grad=True)
    k, v = (torch.randn(1, heads_of_keys, tokens, 8, requires_grad=True) for _ in range(2))
    up = torch.randn_like(q)
    half = causal_attention(*(x.bfloat16() for x in (q, k, v)), 0.0)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert half.dtype == torch.bfloat16
    ours, exact = (torch.autograd.grad(y, (q, k, v), up.to(y.dtype)) for y in (half, right))
    for a, b in zip((half.float(), *ours), (right, *exact), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "tokens", "fused"),
    [
        (FP32, 9, False),
        (FP32, SHORT_FP32, False),
        (FP32, SHORT_FP32 + 1, True),
        (BF16, SHORT, False),
        (BF16, SHORT + 1, True),
    ],
)
def test_compiled_attention_over_short_sequences_is_not_fused(dtype: torch.dtype, tokens: int, fused: bool) -> None:
    torch.manual_seed(0)
    found: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        found.append(graph.code)
        return graph

    q = torch.randn(2, 6, tokens, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 2, tokens, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    ours = torch.compile(causal_attention, backend=compiler, fullgraph=True, dynamic=False)(q, k, v, 0.0)
    assert len(found) == 1
    assert ("scaled_dot_product_attention" in found[0]) == fused
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    up = torch.randn_like(right)
    gradients = (torch.autograd.grad(y, (q, k, v), up) for y in (ours, right))
    for a, b in zip((ours, *next(gradients)), (right, *next(gradients)), strict=True):
        assert (a - b).norm() < (1e-6 if dtype == FP32 else 0.02) * b.norm()


def test_heads_of_queries_that_share_keys_are_those_that_follow_each_other() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 9, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(2))
    shared = causal_attention(q, k, v, 0.0)
    whose = [0, 0, 0, 1, 1, 1]
    spread = causal_attention(q, k[:, whose], v[:, whose], 0.0)
    torch.testing.assert_close(shared, spread)
    up = torch.randn_like(shared)
    for a, b in zip(
        torch.autograd.grad(shared, (q, k, v), up), torch.autograd.grad(spread, (q, k, v), up), strict=True
    ):
        torch.testing.assert_close(a, b)
