"""Generation with a cache of keys and values: the same tokens as without one, at the cost of the new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from wordrun import model as models
from wordrun.config import GPTConfig, LlamaConfig, ModelConfig
from wordrun.model import Transformer
from wordrun.model.cache import Cached, Past
from wordrun.model.generate import draw, generate

V = 23
BLOCK = 16
CONFIGS: dict[str, ModelConfig] = {
    "gpt": GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK, bias=True),
    "llama": LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, block_size=BLOCK),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Transformer:
    """A small model that is sure of what follows: its weights are far from their first values."""
    model = models.build(CONFIGS[request.param], V, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6)
    return model.eval()


def tokens(B: int = 3, T: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_k": 5, "temperature": 0.8}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9, "slide": 6}],
    ids=["greedy", "top-k", "top-p", "sliding by 6"],
)
@pytest.mark.parametrize("T", [1, 4, 40])
def test_tokens_are_those_without_a_cache(model: Transformer, options: dict[str, Any], T: int) -> None:
    """Three texts at once, far across the limit of block_size."""
    without = generate(lambda x: model(x, at=-1), tokens(T=T), 3 * BLOCK, block_size=BLOCK, seed=2, **options)
    cached = Cached(model)
    assert cached(tokens(T=2)).shape == (3, V)  # of another text, which must leave nothing behind
    assert generate(cached, tokens(T=T), 3 * BLOCK, block_size=BLOCK, seed=2, **options).equal(without)
    assert without[:, T:].unique().numel() > 5


def test_logits_are_those_without_a_cache_however_many_tokens_come_at_once(model: Transformer) -> None:
    x, cached = tokens(T=BLOCK), Cached(model)
    for T in (3, 4, 9, 10, BLOCK):  # 3, 1, 5, 1, 6 new ones
        expected = model(x[:, :T], at=-1)
        assert expected.std() > 0.3
        torch.testing.assert_close(cached(x[:, :T]), expected, rtol=1e-5, atol=1e-5)


def test_the_model_reads_each_token_once_until_the_text_outgrows_it(model: Transformer) -> None:
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(Cached(model), tokens(T=6), BLOCK + 1, block_size=BLOCK)
    assert widths == [6, *[1] * (BLOCK - 6), *[BLOCK] * 6]
    widths.clear()
    generate(Cached(model), tokens(T=6), BLOCK + 4, block_size=BLOCK, slide=8)
    # Full after 10 further tokens: the last 9 are read again, and each new one once, until it is full again.
    assert widths == [6, *[1] * 10, 9, *[1] * 7, 9]


def test_a_text_that_differs_is_read_from_its_beginning(model: Transformer) -> None:
    cached, x = Cached(model), tokens(T=6)
    cached(x)
    other = torch.cat((tokens(T=6, seed=1), tokens(T=1)), 1)
    for text in (other, x[:1], x[:1, :3], torch.cat((x, tokens(T=2)), 1)):
        torch.testing.assert_close(cached(text), model(text, at=-1), rtol=1e-5, atol=1e-5)


def test_each_part_of_a_pipeline_has_pasts_of_its_own(model: Transformer) -> None:
    cfg = replace(model.cfg, n_layer=2)
    parts = [models.outline(cfg, V, [layer]) for layer in (0, 1)]
    for part in parts:
        part.load_state_dict({name: model.state_dict()[name] for name in part.state_dict()}, assign=True)
    x, pasts = tokens(T=9), [[Past()], [Past()]]
    for start, end in ((0, 5), (5, 6), (6, 9)):
        hidden = parts[0](x[:, start:end], pasts=pasts[0])
        logits = parts[1](hidden, at=-1, pasts=pasts[1])
        torch.testing.assert_close(logits, model(x[:, :end], at=-1), rtol=1e-5, atol=1e-5)


def test_a_past_gives_back_all_it_was_given() -> None:
    past, stream = Past(), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 40, 8, generator=stream)
    start = 0
    for T in (1, 1, 5, 1, 20, 12):
        k, v = past.add(keys[:, :, start : start + T], values[:, :, start : start + T])
        start += T
        assert past.length == start
        assert k.equal(keys[:, :, :start])
        assert v.equal(values[:, :, :start])


def test_tokens_are_handed_out_as_they_are_drawn(model: Transformer) -> None:
    columns: list[torch.Tensor] = []
    reads: list[int] = []

    def logits_of(text: torch.Tensor) -> torch.Tensor:
        reads.append(len(columns))
        return model(text, at=-1)  # type: ignore[no-any-return]

    text = generate(logits_of, tokens(), 5, block_size=BLOCK, on_tokens=columns.append)
    assert reads == [0, 1, 2, 3, 4]
    assert torch.stack(columns, 1).equal(text[:, 4:])


# Which tokens are drawn


def drawn(probabilities: list[list[float]], top_k: int | None = None, top_p: float = 1.0) -> list[set[int]]:
    """Return the tokens that 2000 draws from each of ``probabilities`` give."""
    stream = torch.Generator().manual_seed(1)
    logits = torch.tensor(probabilities).log()
    draws = torch.cat([draw(logits, top_k, top_p, stream) for _ in range(2000)], 1)
    return [set(row.tolist()) for row in draws]


def test_the_fewest_likeliest_tokens_that_reach_top_p_are_drawn() -> None:
    rows = [[0.1, 0.5, 0.1, 0.3], [0.25, 0.2, 0.3, 0.25], [0.97, 0.01, 0.01, 0.01]]
    assert drawn(rows, top_p=0.4) == [{1}, {0, 2}, {0}]
    assert drawn(rows, top_p=0.6) == [{1, 3}, {0, 2, 3}, {0}]
    assert drawn(rows, top_p=0.001) == [{1}, {2}, {0}]
    assert drawn(rows, top_p=1.0) == [{0, 1, 2, 3}] * 3


def test_top_p_is_of_what_top_k_leaves() -> None:
    # Of the likeliest two the first has 5 / 8.
    assert drawn([[0.1, 0.5, 0.1, 0.3]], top_k=2, top_p=0.6) == [{1}]
    assert drawn([[0.1, 0.5, 0.1, 0.3]], top_k=2, top_p=0.7) == [{1, 3}]


def test_draws_from_top_p_follow_the_probabilities() -> None:
    N = 20_000
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3]).log().expand(N, 4)
    shares = draw(logits, None, 0.7, torch.Generator().manual_seed(0))[:, 0].bincount(minlength=4) / N
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.625, 0.0, 0.375]), atol=0.012, rtol=0)
