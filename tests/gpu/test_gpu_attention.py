"""The kernels that attention runs on, and generation with a KV cache."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from gpu_runs import SMALL, Train

if TYPE_CHECKING:
    import torch


MODELS = {
    "gpt": ["model.n_head=4", "model.n_embd=256"],
    "llama": ["model=llama_debug", "model.n_layer=2", "model.n_head=8", "model.n_kv_head=2", "model.n_embd=512"],
}
FUSED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_attention_takes_a_flash_kernel(device: torch.device, model: list[str], dropout: float) -> None:
    """In both passes, and without copying the shared heads of grouped-query attention."""
    from torch.profiler import ProfilerActivity, profile

    from wordrun import compose
    from wordrun.train.trainer import Trainer

    words = [*model, f"model.dropout={dropout}", "model.block_size=256", "train.dtype=bf16", "hydra.run.dir=run"]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with Trainer(compose([*SMALL, *words])) as trainer:
        trainer._train_step(1e-3)
        with profile(activities=activities, acc_events=True) as recorded:
            trainer._train_step(1e-3)
    names = {event.name for event in recorded.events()}
    attention = sorted(name for name in names if "scaled_dot_product" in name)
    if device.type != "cuda":
        assert names
        return
    special = [name.removeprefix("aten::") for name in attention if name != "aten::scaled_dot_product_attention"]
    used = {name.removesuffix("_backward") for name in special}
    assert used, attention
    assert used <= {*FUSED, "_scaled_dot_product_fused_attention_overrideable"}, attention
    assert f"aten::{next(iter(used))}_backward" in names, attention
    assert "aten::repeat_interleave" not in names
    kernels = sorted({e.name for e in recorded.events() if e.device_type.name == "CUDA"})
    print("\n".join(kernels))  # shown when the test fails
    if kernels:  # some machines do not let users read them
        fused = [name for name in kernels if any(word in name.lower() for word in ("flash", "cudnn", "sdpa"))]
        assert len(fused) >= 2, "no flash kernel in both passes"
        assert not any("fmha_cutlass" in name or "AttentionKernel" in name for name in kernels)


@pytest.mark.parametrize("compile_", ["false", "true"])
def test_documents_need_no_dense_mask(
    train: Train, device: torch.device, compile_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention and a dense mask have the same losses; the first needs less memory for long sequences."""
    import torch

    from wordrun.model import attention, kernel_thresholds

    words = [
        *MODELS["llama"],
        *shlex.split("""
        tokenizer=byte data.mask_documents=true model.block_size=1024 model.batch_size=8
        model.window=200 model.global_every=2 train.dtype=bf16
    """),
        f"train.compile={compile_}",
        *(["train.max_iters=2"] if device.type == "cpu" else []),
    ]
    made: list[int] = []
    block_masks = attention.block_masks
    monkeypatch.setattr(attention, "block_masks", lambda *args: made.append(1) or block_masks(*args))
    found = {}
    for name, whole in (("flex", 0), ("dense", 2**40)):
        monkeypatch.setattr(kernel_thresholds, "SMALL_MASK", whole)
        found[name] = train(name, *words).losses
        assert bool(made) == (name == "flex" and device.type == "cuda")
        made.clear()
        torch.compiler.reset()
    assert found["flex"] == pytest.approx(found["dense"], rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_cache_changes_nothing(train: Train, device: torch.device, model: list[str], dtype: str) -> None:
    """Logits with the cache are those of the whole text, token by token; in fp32 the texts are equal."""
    import torch

    from wordrun.backend.mixed_precision import TORCH_DTYPES, choose_dtype
    from wordrun.checkpoint.load import find
    from wordrun.commands.generate import read_model
    from wordrun.model.generate import Cached, Graphed, generate

    folder = train("run", *model, "train.checkpoint_interval=20").folder
    kind = choose_dtype(dtype, device)
    net = read_model(find(folder), device, kind)
    assert {p.device for p in net.parameters()} == {device}
    assert {p.dtype for p in net.parameters()} == {TORCH_DTYPES[dtype] if device.type == "cuda" else kind}
    tokens = torch.randint(net.vocab_size, (3, 60), generator=torch.Generator().manual_seed(0)).to(device)
    graphed = Graphed(net)
    for cached in (Cached(net), graphed):
        with torch.no_grad():
            for end in (7, 8, 9, 20, 21, 22, 60):
                near = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {"rtol": 0.1, "atol": 0.1}
                given = tokens[:, :end].cpu() if cached is graphed else tokens[:, :end]
                got, expected = cached(given).float(), net(tokens[:, :end], at=-1).float()
                torch.testing.assert_close(got[:, : net.vocab_size], expected[:, : net.vocab_size], **near)
    assert (graphed.step != graphed.one_token) == (device.type == "cuda")  # a graph was recorded
    if kind == torch.float32:
        with torch.no_grad():
            texts = [
                generate(model, start, 40, block_size=net.cfg.block_size, top_k=1).cpu()
                for model, start in (
                    (lambda x: net(x, at=-1), tokens[:, :5]),
                    (Cached(net), tokens[:, :5]),
                    (Graphed(net), tokens[:, :5].cpu()),
                )
            ]
        assert texts[0].equal(texts[1])
        assert texts[0].equal(texts[2])


def test_the_command_generates_on_the_device(
    train: Train, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    from wordrun import cli

    folder = train("run", "train.checkpoint_interval=20", "train.sample_tokens=20").folder
    assert (folder / "samples.txt").read_text()
    words = [
        f"run={folder}",
        "length=30",
        "num_samples=2",
        "prompt=the",
        *(["device=cpu"] if device.type == "cpu" else []),
    ]
    assert cli.main(["generate", *words]) == 0
    shown = capsys.readouterr()
    assert f" on {device}" in shown.err
    assert "tokens/s" in shown.err
    assert "the" in shown.out
