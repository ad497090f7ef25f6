"""The sections of gpu.py that need no trainer: the peaks of the device, and generation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_common import Bench, spread


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(action: Callable[[], Any], repeats: int, inner: int = 1) -> list[float]:
    """Return the seconds of ``action`` on the device, ``repeats`` times, each the mean of ``inner`` calls."""
    for _ in range(3):
        action()
    found = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                action()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000 / inner)
        else:
            began = time.perf_counter()
            for _ in range(inner):
                action()
            found.append((time.perf_counter() - began) / inner)
    return found


def peak(bench: Bench) -> None:
    """The speed of a large bf16 matrix product and of a copy within device memory."""
    size, megabytes = (256, 8) if bench.tiny else (8192, 2048)
    generator = torch.Generator(bench.device).manual_seed(0)
    a, b = (torch.randn(size, size, device=bench.device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    with torch.no_grad():
        times = seconds_of(lambda: torch.mm(a, b, out=product), 50 if not bench.tiny else 3, 4)
    rates = [2 * size**3 / each / 1e12 for each in times]
    bench.add("device peaks", what=f"bf16 {size}^3 torch.mm, random data", unit="TFLOP/s", **spread(rates))
    with torch.no_grad():  # long enough to reach the power limit
        times = seconds_of(lambda: torch.mm(a, b, out=product), 300 if not bench.tiny else 4, 4)
    rates = [2 * size**3 / each / 1e12 for each in times[len(times) * 3 // 4 :]]
    bench.add("device peaks", what="the same after 1.5 s", unit="TFLOP/s, sustained", **spread(rates))
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = seconds_of(lambda: target.copy_(source), 20 if not bench.tiny else 3)
    rates = [2 * source.numel() / each / 1e9 for each in times]
    bench.add("device peaks", what=f"copy of {megabytes} MiB, read and write", unit="GB/s", **spread(rates))


def generate(bench: Bench) -> None:
    """Tokens per second of one text of 256 new tokens, by wordrun, nanoGPT and transformers, with the same weights."""
    from wordrun.model.construction import build
    from wordrun.model.generate import Cached, Graphed, generate as extend
    from wordrun.model.huggingface import huggingface_config, to_huggingface
    from wordrun.model.options import GPTConfig

    new, top_k, device = 16 if bench.tiny else 256, 200, bench.device
    shape, dtype = bench.shape, torch.float32 if bench.tiny else torch.bfloat16
    cfg = GPTConfig(
        name="gpt2",
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        bias=True,
        gelu="none",
    )
    ours = build(cfg, 50257, seed=1, device=device).eval()
    state = to_huggingface(ours.state_dict(), cfg)
    prompt = torch.randint(50257, (1, 8), generator=torch.Generator().manual_seed(0)).to(device)
    theirs = nanogpt_model(bench, ours, state)

    def nanogpt() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):  # as in its sample.py
            tokens: Tensor = theirs.generate(prompt, new, top_k=top_k)
        return tokens

    ours = ours.to(dtype)
    options: dict[str, Any] = {"block_size": cfg.block_size, "top_k": top_k}
    rate(bench, "wordrun, CUDA graph", lambda: extend(Graphed(ours), prompt.cpu(), new, **options), new)
    rate(bench, "wordrun, kernel by kernel", lambda: extend(Cached(ours), prompt, new, **options), new)
    rate(bench, "nanoGPT, model.generate", nanogpt, new)
    from transformers import GPT2Config, GPT2LMHeadModel

    peer: Any = GPT2LMHeadModel(GPT2Config(**huggingface_config(cfg, 50257)))
    peer.load_state_dict(state, strict=False)
    peer = peer.to(device, dtype).eval()
    sampling = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": top_k, "pad_token_id": 0}
    rate(bench, "transformers, dynamic cache", lambda: peer.generate(prompt, **sampling), new)
    static = {**sampling, "cache_implementation": "static"}
    rate(bench, "transformers, static cache", lambda: peer.generate(prompt, **static), new)


def nanogpt_model(bench: Bench, ours: Any, state: dict[str, Tensor]) -> Any:
    """Return nanoGPT's model with our weights."""
    sys.path.insert(0, str(bench.nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    cfg, device = ours.cfg, bench.device
    gpt = theirs.GPT(
        theirs.GPTConfig(
            n_layer=cfg.n_layer,
            n_head=cfg.n_head,
            n_embd=cfg.n_embd,
            block_size=cfg.block_size,
            bias=True,
            vocab_size=50257,
            dropout=0.0,
        )
    )
    gpt.load_state_dict({name: x.T if ".h." in name and x.dim() == 2 else x for name, x in state.items()})
    return gpt.to(device).eval()


def rate(bench: Bench, program: str, run: Callable[[], Tensor], new: int) -> None:
    """Add the tokens per second of three texts after one that is not counted."""
    rates = []
    for number in range(4):
        synchronize()
        began = time.perf_counter()
        text = run()
        synchronize()
        seconds = time.perf_counter() - began
        assert text.shape[1] == 8 + new, text.shape
        if number:
            rates.append(new / seconds)
    bench.add(f"tokens/s, one text of {new} new tokens, top_k=200", program=program, **spread(rates))
