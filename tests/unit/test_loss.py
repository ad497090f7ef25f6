"""The cross entropy that keeps one copy of the logits, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from wordrun import kernels
from wordrun.model import loss

N, C, V, TOKENS = 60, 16, 128, 100


def both(dtype: torch.dtype, softcap: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return losses and gradients of torch's cross entropy and of ours, with a weight for each token."""
    torch.manual_seed(0)
    x, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    targets, weights = torch.randint(TOKENS, (N,)), torch.rand(N)
    results = []
    for ours in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            if ours:
                losses = loss.cross_entropy(x, weight, targets, TOKENS, softcap)
            else:
                logits = (x @ weight.t())[:, :TOKENS].float()
                logits = softcap * torch.tanh(logits / softcap) if softcap else logits
                losses = F.cross_entropy(logits, targets, reduction="none")
        gradients = torch.autograd.grad((losses * weights).sum(), [x, weight])
        results.append([losses.detach(), *gradients])
    return results[0], results[1]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_losses_and_gradients_are_torchs(
    dtype: torch.dtype, near: float, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 7 * V)  # chunks of 7 tokens, the last of 4
    for theirs, ours in zip(*both(dtype, softcap), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() < near * theirs.norm()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_padding_gets_no_gradient(softcap: float) -> None:
    _, (_, _, of_weight) = both(torch.float32, softcap)
    assert not of_weight[TOKENS:].any()
    assert of_weight[:TOKENS].any(1).all()


def test_without_gradients_no_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from memory_peak import peak

    monkeypatch.setattr(kernels, "CHUNK", 2**14)
    x, weight, targets = torch.randn(4096, C), torch.randn(V, C), torch.randint(V, (4096,))
    with torch.no_grad():
        assert peak(lambda: loss.cross_entropy(x, weight, targets, V)) < 4 * 4096 * V / 2


@pytest.mark.parametrize("chosen", [False, True])
def test_a_model_uses_it_for_many_logits_or_if_it_is_chosen(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from wordrun import model as models
    from wordrun.config import GPTConfig
    from wordrun.data.batch import Batch

    model = models.build(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=4), 50)
    tokens = torch.randint(50, (4, 8))
    usual = model.losses(Batch(tokens, tokens))
    if chosen:
        model.choose_loss(chunked=True)
    else:
        monkeypatch.setattr(kernels, "LARGE", 100)
    found = model.losses(Batch(tokens, tokens))
    steps = [found.grad_fn]
    while "_CrossEntropy" not in str(steps[-1]):
        steps.append(steps[-1].next_functions[0][0])  # type: ignore[union-attr]
        assert steps[-1] is not None
    torch.testing.assert_close(model.losses(Batch(tokens, tokens)), usual)


# In runs of the whole suite, compiling the model has raised this warning of torch's, which is an error here; never in a
# run of this file alone. Which earlier test it takes is not known.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiling_the_model_leaves_the_loss_to_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as a part of the model, it would be the chunked code for the uncompiled case, several times slower."""
    from wordrun import model as models
    from wordrun.backend.transforms import prepare
    from wordrun.config import Config, GPTConfig
    from wordrun.data.batch import Batch

    rows = []

    def kernel(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(logits))
        return loss._softmax(logits, *rest)

    cfg = Config(model=GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=4))
    cfg.train.compile, cfg.train.compile_scope = True, "model"
    monkeypatch.setattr(kernels, "LARGE", 100)
    monkeypatch.setattr(kernels, "CHUNK", 100)
    monkeypatch.setattr(loss, "_compiled", lambda: kernel)
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: whole(module, backend="eager"))
    model, usual = models.build(cfg.model, 50), models.build(cfg.model, 50)
    prepare(model, cfg)
    tokens = torch.randint(50, (4, 8))
    torch.testing.assert_close(model.losses(Batch(tokens, tokens)), usual.losses(Batch(tokens, tokens)))
    assert rows == [32]
