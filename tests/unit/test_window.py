"""Sliding-window attention: computed in parts, equal to attention under one large mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from wordrun import model as models
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.model.attention import causal_attention, document_mask
from wordrun.model.kv_cache import KVCache
from wordrun.model.options import LlamaConfig

WINDOWED = LlamaConfig(
    n_layer=4,
    n_head=4,
    n_kv_head=2,
    head_size=12,
    n_embd=32,
    n_hidden=48,
    block_size=24,
    qk_norm=True,
    window=5,
    global_every=2,
    tie=True,
)


@pytest.mark.parametrize("documents", [None, "mask", "lengths"])
@pytest.mark.parametrize(("queries", "window"), [(40, 7), (40, 1), (40, 39), (40, 40), (9, 4), (1, 6)])
def test_windows_are_those_of_one_mask(queries: int, window: int, documents: str | None) -> None:
    """Outputs and gradients, also for the last queries of a longer sequence, as in generation."""
    if documents and queries < 40:
        return  # documents are for training
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(2))
    ahead = torch.arange(40)[-queries:, None] - torch.arange(40)
    allowed, mask = ((ahead >= 0) & (ahead < window)).expand(2, 1, queries, 40), None
    if documents:
        lengths = (13, 20, 7, 2, 38)
        numbers = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths)).view(2, 40)
        within = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
        allowed, mask = allowed & within, (within if documents == "mask" else lengths)
    ours = causal_attention(q, k, v, 0.0, mask, None, window)
    whole = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    theirs = F.scaled_dot_product_attention(q, *whole, attn_mask=allowed)
    torch.testing.assert_close(ours, theirs)
    up = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v), up) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count", [1, 30])
@torch.no_grad()
def test_documents_and_windows_go_together(count: int) -> None:
    """Long documents are computed one by one, short ones under a mask."""
    numbers = torch.arange(120)[None] * count // 120
    assert isinstance(document_mask(numbers), tuple) == (count == 1)
    model = models.build(replace(WINDOWED, block_size=120), 61).eval()
    tokens = torch.randint(61, (1, 120), generator=torch.Generator().manual_seed(1))
    last = model(tokens, documents=numbers)[:, -4:]
    alone = model(tokens[:, numbers[0] == count - 1])[:, -4:]
    torch.testing.assert_close(last, alone, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_generation_with_a_cache_sees_what_a_whole_pass_sees() -> None:
    model = models.build(WINDOWED, 61).eval()
    tokens = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(0))
    caches = [KVCache() for _ in range(WINDOWED.n_layer)]
    pieces = [model(tokens[:, a:b], caches=caches) for a, b in [(0, 9), (9, 15), *((n, n + 1) for n in range(15, 24))]]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


def test_a_forward_pass_in_inference_mode_leaves_training_possible() -> None:
    model = models.build(WINDOWED, 61)
    tokens = torch.arange(24)[None]
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()


def test_flops_count_the_window() -> None:
    one, two = (
        models.meta_model(replace(WINDOWED, window=window, global_every=n), 61) for window, n in [(None, 0), (5, 2)]
    )
    assert one.flops_per_token() - two.flops_per_token() == 12 * 48 * 2 * (24 - 5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.window=0"], "model.window=0 should be"),
        (["model.global_every=2"], "model.global_every=2 is for blocks with a window: set model.window"),
    ],
)
def test_options_that_make_no_sense_are_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["model=llama_debug", *words])
    assert says in str(caught.value)
