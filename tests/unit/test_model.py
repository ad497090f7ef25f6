"""The model: what it computes, how it begins, what it costs, and what it writes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wordrun import model as models
from wordrun.config import ModelConfig
from wordrun.model import GPT
from wordrun.model.generate import generate

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)
V = 23


@pytest.fixture
def gpt() -> GPT:
    """A small model, the same in every test."""
    torch.manual_seed(1)
    return models.build(SMALL, V)


def tokens(B: int = 3, T: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def all_logits(gpt: GPT, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of every position, as those of the last one of each prefix."""
    return torch.stack([gpt(x[:, : t + 1]) for t in range(x.shape[1])], 1)


@pytest.mark.parametrize("T", [1, 5, 16])
def test_logits_are_those_of_the_last_token(gpt: GPT, T: int) -> None:
    assert gpt(tokens(T=T)).shape == (3, V)


def test_a_later_token_does_not_change_an_earlier_one(gpt: GPT) -> None:
    x = tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % V
    before, after = gpt.features(x), gpt.features(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-6


def test_the_order_of_the_tokens_matters(gpt: GPT) -> None:
    x = tokens()
    swapped = x[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(gpt(x), gpt(swapped), atol=1e-6)


def test_the_loss_of_a_sequence_is_the_mean_cross_entropy_of_its_tokens(gpt: GPT) -> None:
    x, y = tokens(), tokens(seed=1)
    losses = gpt(x, y)
    assert losses.shape == (3,)
    logits = all_logits(gpt, x)
    expected = torch.stack([F.cross_entropy(logits[b], y[b]) for b in range(3)])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_the_output_layer_is_the_embedding(gpt: GPT) -> None:
    assert gpt.head.weight is gpt.tokens.weight
    gpt(tokens(), tokens(seed=1)).mean().backward()
    x = torch.full((1, 1), 4)
    with torch.no_grad():
        gpt.tokens.weight[4] *= 2
    assert gpt.head.weight[4].equal(gpt.tokens(x)[0, 0])


def test_parameters_are_counted_once(gpt: GPT) -> None:
    C, L, T = 32, 2, 16
    assert gpt.num_parameters() == V * C + T * C + L * (12 * C * C + 2 * C) + C
    biased = models.build(ModelConfig(n_layer=L, n_head=2, n_embd=C, block_size=T, bias=True), V)
    assert biased.num_parameters() - gpt.num_parameters() == L * (9 * C + 2 * C) + C


def test_the_vocabulary_may_be_larger_than_the_tokenizers() -> None:
    assert models.build(ModelConfig(n_layer=1, n_embd=8, n_head=1, vocab_size=64), V)(tokens()).shape == (3, 64)


# How it begins


def test_weights_begin_as_nanogpts() -> None:
    torch.manual_seed(0)
    L = 3
    gpt = models.build(ModelConfig(n_layer=L, n_head=4, n_embd=256, bias=True), 500)
    for name, p in gpt.named_parameters():
        if p.dim() < 2:
            assert p.unique().tolist() == [1.0 if "norm" in name and name.endswith("weight") else 0.0], name
            continue
        # Both layers of a block that write into the residual stream, and nothing else, are narrower.
        narrow = name.endswith("proj.weight")
        assert p.std().item() == pytest.approx(0.02 / math.sqrt(2 * L) if narrow else 0.02, rel=0.03), name
        assert abs(p.mean().item()) < 5e-4, name
    assert sum(name.endswith("proj.weight") for name, _ in gpt.named_parameters()) == 2 * L


def test_an_untrained_model_knows_nothing(gpt: GPT) -> None:
    assert gpt(tokens(64), tokens(64, seed=1)).mean().item() == pytest.approx(math.log(V), rel=0.02)


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in models.build(SMALL, V).parameters()])

    assert weights(1).equal(weights(1))
    assert not weights(1).equal(weights(2))


def test_dropout_acts_in_training_alone() -> None:
    gpt = models.build(ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, dropout=0.3), V)
    x = tokens()
    assert not gpt(x).equal(gpt(x))
    gpt.eval()
    assert gpt(x).equal(gpt(x))


# What it costs


@pytest.mark.parametrize(
    "cfg",
    [
        SMALL,
        ModelConfig(),
        ModelConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, bias=True, vocab_size=100),
    ],
)
def test_flops_are_those_that_torch_counts(cfg: ModelConfig) -> None:
    """Agree to the last operation, on the attention that torch counts: as matrix products, mask not taken off.

    The fused kernel that training uses on a CPU is unknown to the counter, which would leave attention out.
    """
    B, T = 2, cfg.block_size
    gpt = models.build(cfg, V)
    x = torch.zeros(B, T, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(x, x).mean().backward()
    assert counter.get_total_flops() == B * T * gpt.flops_per_token()


# What it writes


def test_generation_is_decided_by_its_seed(gpt: GPT) -> None:
    first = generate(gpt, tokens(1, 4), 30, seed=5)
    torch.manual_seed(99)
    assert generate(gpt, tokens(1, 4), 30, seed=5).equal(first)
    assert not generate(gpt, tokens(1, 4), 30, seed=6).equal(first)
    assert first.shape == (1, 34)
    assert first[:, :4].equal(tokens(1, 4))


def test_the_likeliest_token_alone_is_greedy(gpt: GPT) -> None:
    x = tokens(2, 4)
    text = generate(gpt, x, 10, top_k=1, seed=3)
    for _ in range(10):
        x = torch.cat((x, gpt(x[:, -16:]).argmax(-1, keepdim=True)), 1)
    assert text.equal(x)


def test_a_low_temperature_is_greedy(gpt: GPT) -> None:
    x = tokens(1, 4)
    assert generate(gpt, x, 10, temperature=1e-6, seed=8).equal(generate(gpt, x, 10, top_k=1))


def test_only_the_likeliest_k_are_drawn(gpt: GPT) -> None:
    x = tokens(1, 4)
    likeliest = set(gpt(x)[0].topk(3).indices.tolist())
    drawn = {int(generate(gpt, x, 1, top_k=3, temperature=5.0, seed=s)[0, -1]) for s in range(60)}
    assert drawn == likeliest


def test_draws_follow_the_probabilities(gpt: GPT) -> None:
    N = 20_000
    x = tokens(1, 4).expand(N, 4)
    drawn = generate(gpt, x, 1, temperature=0.5, seed=1)[:, -1].bincount(minlength=V) / N
    with torch.no_grad():
        torch.testing.assert_close(drawn, (gpt(x[:1])[0] / 0.5).softmax(-1), atol=0.012, rtol=0)


def test_top_k_beyond_the_vocabulary_is_everything(gpt: GPT) -> None:
    x = tokens(1, 4)
    assert generate(gpt, x, 10, top_k=10 * V).equal(generate(gpt, x, 10, top_k=None))


def test_a_prompt_longer_than_the_block_is_read_from_its_end(gpt: GPT) -> None:
    long = tokens(1, 40)
    text = generate(gpt, long, 5, seed=2)
    assert text[:, :40].equal(long)
    assert text[:, 40:].equal(generate(gpt, long[:, -16:], 5, seed=2)[:, 16:])


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_everything_as_it_was(training: bool) -> None:
    gpt = models.build(ModelConfig(n_layer=1, n_head=1, n_embd=8, dropout=0.5), V).train(training)
    before = torch.get_rng_state()
    first, second = (generate(gpt, tokens(1, 4), 20, seed=5) for _ in range(2))
    assert first.equal(second)  # without dropout
    assert torch.get_rng_state().equal(before)
    assert gpt.training is training
