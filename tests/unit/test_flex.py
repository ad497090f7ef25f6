"""Attention within documents by FlexAttention, which GPUs use, in torch's reference implementation for CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map

from wordrun import model as models
from wordrun.backend.compile import compile_model
from wordrun.model import attention, kernel_thresholds
from wordrun.model.options import GPTConfig, LlamaConfig

T = 592  # of 5 blocks, the last with 80 tokens
NUMBERS = torch.stack(
    [
        torch.repeat_interleave(torch.arange(5), torch.tensor([205, 50, 15, 306, 16])),
        torch.repeat_interleave(torch.arange(2), torch.tensor([591, 1])),
    ]
)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use FlexAttention without its compiler, and its gradients, which torch has for CPUs but refuses."""
    monkeypatch.setattr(attention, "_compiled_flex_kernel", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)  # not in 2.8


@pytest.mark.parametrize("span", [T, 800, 171, 128, 1])
@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS * 0, NUMBERS[:, torch.randperm(T)]], ids=["some", "one", "mixed"])
def test_blocks_are_those_of_the_whole_mask(numbers: Tensor, span: int) -> None:
    """A block is left out if none of its tokens attend to each other, and computed without a mask if all do."""
    ((size, found),) = attention.block_masks(numbers, [span]).items()
    assert size == min(span, T)
    ahead = torch.arange(T)[:, None] - torch.arange(T)
    allowed = (numbers[:, :, None] == numbers[:, None]) & (ahead >= 0) & (ahead < span)
    padded = [F.pad(F.pad(allowed, (0, 48)), (0, 0, 0, 48), value=more) for more in (False, True)]  # the last queries
    some, every_one = (each.view(2, 5, 128, 5, 128).transpose(2, 3).flatten(3) for each in padded)
    needed, complete = some.any(-1), every_one.all(-1)
    every = [[found.kv_num_blocks, found.kv_indices], [found.full_kv_num_blocks, found.full_kv_indices]]
    partial, whole = (
        torch.stack(
            [
                torch.stack([torch.isin(torch.arange(5), row[:n]) for n, row in zip(a, b, strict=True)])
                for a, b in zip(counts[:, 0], indices[:, 0], strict=True)
            ]
        )
        for counts, indices in every
    )
    assert not (needed & ~(partial | whole)).any()
    assert not (whole & ~complete).any()
    assert not (partial & whole).any()
    if numbers is NUMBERS:  # in the order of the documents, nothing is computed in vain
        assert (partial | whole).equal(needed)
        assert whole.equal(complete & ~torch.eye(5, dtype=torch.bool))
    at = torch.arange(T)
    assert found.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None]).equal(allowed[0])


@pytest.mark.parametrize("window", [None, 171])
@pytest.mark.usefixtures("eager")
def test_flex_attention_is_attention_under_the_mask(window: int | None) -> None:
    """Outputs and gradients, with grouped heads."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, T, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, T, 16, requires_grad=True) for _ in range(2))
    dense = (NUMBERS[:, None, :, None] == NUMBERS[:, None, None, :]).tril()
    masks = attention.block_masks(NUMBERS, [T, 171])
    assert [*masks] == [171, T]
    masks = tree_map(lambda leaf: leaf, masks)  # as FSDP does with arguments, to cast those with a fraction
    ours = attention.causal_attention(q, k, v, 0.0, masks, 0.3, window)
    theirs = attention.causal_attention(q, k, v, 0.0, dense, 0.3, window)
    torch.testing.assert_close(ours, theirs)
    up = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v), up) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "cfg",
    [
        GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T),
        LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, n_hidden=48, block_size=T, window=139, global_every=2),
    ],
    ids=["gpt", "llama"],
)
@pytest.mark.usefixtures("eager")
def test_a_model_on_a_gpu_makes_no_dense_mask(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses and gradients are the same, and no block gets a mask of T x T values."""
    cfg = replace(cfg, dropout=0.0)
    monkeypatch.setattr(kernel_thresholds, "TRITON", True)  # as where there is a GPU
    numbers = NUMBERS.repeat(6, 1)  # so many that a mask of all would have more than 2^22 values
    tokens, targets = torch.randint(50, (2, 12, T), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        with monkeypatch.context() as patch:
            chosen = kernel_thresholds.skips_blocks(device, 12 * T * T, 0.0, 16)
            assert chosen == (device == "cuda")
            patch.setattr(attention, "skips_blocks", lambda _, *facts: kernel_thresholds.skips_blocks(device, *facts))  # noqa: B023
            model = models.build(cfg, 50)
            masks: list[Any] = []

            def note(block: Any, args: Any, given: Any, masks: list[Any] = masks) -> None:
                masks.append(given["mask"])

            for block in model.blocks.values():
                block.register_forward_pre_hook(note, with_kwargs=True)
            loss = model(tokens, documents=numbers, targets=targets).sum()
            loss.backward()
        assert len(masks) == 2
        assert all(isinstance(mask, dict) == chosen for mask in masks)
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_what_has_no_such_kernel_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_thresholds, "TRITON", True)
    large = kernel_thresholds.SMALL_MASK + 1
    assert kernel_thresholds.skips_blocks("cuda", large, 0.0, 64)
    for other in (("cuda", large, 0.1, 64), ("cuda", large, 0.0, 8), ("cuda", 4096, 0.0, 64), ("cpu", large, 0.0, 64)):
        assert not kernel_thresholds.skips_blocks(*other), other
    monkeypatch.setattr(kernel_thresholds, "TRITON", False)
    assert not kernel_thresholds.skips_blocks("cuda", large, 0.0, 64)


def test_a_cpu_makes_small_masks_only() -> None:
    """Of short documents together, wherever sequences end; the result is that under one large mask."""
    torch.manual_seed(0)
    lengths = [20, 30, 5, 300, 7] * 4
    numbers = torch.repeat_interleave(torch.arange(20), torch.tensor(lengths))
    numbers = torch.cat([numbers, torch.arange(88) // 2 + 20]).view(3, -1)
    assert numbers.shape == (3, 512)
    runs = attention.document_mask(numbers)
    assert isinstance(runs, tuple)
    assert isinstance(attention.document_mask(numbers, compiled=True), attention.UncompiledRuns)
    masks = [run for run in runs if isinstance(run, torch.Tensor)]
    assert masks
    assert all(mask.shape == (len(mask), len(mask)) and len(mask) <= 256 for mask in masks)
    q, k, v = (torch.randn(3, 2, 512, 8) for _ in range(3))
    dense = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
    for window in (None, 40):
        ours, theirs = (attention.causal_attention(q, k, v, 0.0, mask, None, window) for mask in (runs, dense))
        torch.testing.assert_close(ours, theirs)


# See test_loss.py.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_a_compiled_model_is_not_compiled_again_for_other_documents(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: whole(module, backend="eager"))
    model = models.build(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=512), 50)
    plain = models.build(model.cfg, 50)
    compile_model(model, scope)
    tokens, graphs = torch.arange(1024).view(2, 512) % 50, []
    for lengths in ([100, 412], [7] * 73 + [1], [300, 212]):
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
        torch.testing.assert_close(model(tokens, documents=numbers), plain(tokens, documents=numbers))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]
