"""The cross entropy that keeps one copy of the logits, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from wordrun.model import output_layer

N, C, V, TOKENS = 60, 16, 128, 100
LARGE = 2**20
"""A vocabulary of which 32 tokens are computed at once, and 17 are enough for a model to use this cross entropy."""


def both(
    dtype: torch.dtype, softcap: float = 0.0, vocabulary: int = V, tokens: int = N
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return losses and gradients of torch's cross entropy and of ours, with a weight for each token."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, C, requires_grad=True), torch.randn(vocabulary, C, requires_grad=True)
    targets, weights = torch.randint(TOKENS, (tokens,)), torch.rand(tokens)
    results = []
    for ours in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            if ours:
                losses = output_layer.chunked_cross_entropy(x, weight, targets, TOKENS, softcap)
            else:
                logits = (x @ weight.t())[:, :TOKENS].float()
                logits = softcap * torch.tanh(logits / softcap) if softcap else logits
                losses = F.cross_entropy(logits, targets, reduction="none")
        gradients = torch.autograd.grad((losses * weights).sum(), [x, weight])
        results.append([losses.detach(), *gradients])
    return results[0], results[1]


@pytest.mark.parametrize(("vocabulary", "tokens"), [(V, N), (LARGE, 40)], ids=["at once", "in two parts"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_losses_and_gradients_are_torchs(
    dtype: torch.dtype, near: float, softcap: float, vocabulary: int, tokens: int
) -> None:
    for theirs, ours in zip(*both(dtype, softcap, vocabulary, tokens), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() < near * theirs.norm()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_padding_gets_no_gradient(softcap: float) -> None:
    _, (_, _, of_weight) = both(torch.float32, softcap)
    assert not of_weight[TOKENS:].any()
    assert of_weight[:TOKENS].any(1).all()


def test_without_gradients_no_logits_are_kept() -> None:
    from memory_peak import peak

    tokens, vocabulary = 4096, 2**16
    x, weight, targets = torch.randn(tokens, C), torch.randn(vocabulary, C), torch.randint(vocabulary, (tokens,))
    with torch.no_grad():
        assert (
            peak(lambda: output_layer.chunked_cross_entropy(x, weight, targets, vocabulary))
            < 4 * tokens * vocabulary / 2
        )


@pytest.mark.parametrize(("vocabulary", "chosen"), [(50, False), (50, True), (LARGE, False)])
def test_a_model_uses_it_for_many_logits_or_if_it_is_chosen(vocabulary: int, chosen: bool) -> None:
    from wordrun import model as models
    from wordrun.data.batch import Batch
    from wordrun.model.options import GPTConfig

    model = models.build(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=4), vocabulary)
    tokens = torch.randint(50, (4, 8))
    usual = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none").view(4, 8).mean(1)
    if chosen:
        model.choose_loss(chunked=True)
    found = model.losses(Batch(tokens, tokens))
    torch.testing.assert_close(found, usual)
    steps: list[Any] = [found.grad_fn]
    for step in steps:
        steps += [before for before, _ in step.next_functions if before]
    assert any("_CrossEntropy" in str(step) for step in steps) == (chosen or vocabulary == LARGE)


# In runs of the whole suite, compiling the model has raised this warning of torch's, which is an error here; never in a
# run of this file alone. Which earlier test it takes is not known.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiling_the_model_leaves_the_loss_to_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as a part of the model, it would be the chunked code for the uncompiled case, several times slower."""
    from wordrun import model as models
    from wordrun.backend.compile import prepare
    from wordrun.config.schema import Config
    from wordrun.data.batch import Batch
    from wordrun.model.options import GPTConfig

    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    cfg = Config(model=GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=4))
    cfg.train.compile, cfg.train.compile_scope, cfg.train.chunked_loss = True, "model", True
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: compile_(call, **{"backend": "eager", **options}))
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: whole(module, backend=backend))
    model, usual = models.build(cfg.transformer, 50), models.build(cfg.transformer, 50)
    prepare(model, cfg)
    tokens = torch.randint(50, (4, 8))
    torch.testing.assert_close(model.losses(Batch(tokens, tokens)), usual.losses(Batch(tokens, tokens)))
    assert any("layer_norm" in code for code in graphs)
    assert not any("log_softmax" in code for code in graphs)
