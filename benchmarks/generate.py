"""Generation beside nanoGPT's: tokens/s of 512 new tokens after a short prompt, GPT-2's shapes, one text, on a CPU.

Both hold the same random weights and draw of the 200 likeliest tokens. They take turns, some tokens each, so that what
else the machine does slows both; a first check is that the likeliest tokens are the same. Prints a table.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/generate.py --nanogpt nanoGPT
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun import model as models
from wordrun.config import GPTConfig
from wordrun.model import Transformer
from wordrun.model.cache import Cached
from wordrun.model.generate import generate
from wordrun.model.huggingface import to_huggingface

GPT2 = GPTConfig(name="gpt2", n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=True, gelu="none")
VOCABULARY = 50257
PROMPT = 8
NEW = 512
TURN = 32
"""Tokens of one side's turn."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 200}


def their_model(nanogpt: Path, ours: Transformer) -> Any:
    """Return nanoGPT's model with the weights of ``ours``."""
    sys.path.insert(0, str(nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    gpt = theirs.GPT(theirs.GPTConfig(
        n_layer=GPT2.n_layer, n_head=GPT2.n_head, n_embd=GPT2.n_embd, block_size=GPT2.block_size, bias=GPT2.bias,
        vocab_size=VOCABULARY, dropout=0.0,
    ))  # fmt: skip
    state = to_huggingface(ours.state_dict(), GPT2)
    gpt.load_state_dict({name: x.T if ".h." in name and x.dim() == 2 else x for name, x in state.items()})
    return gpt.eval()


def in_turns(ways: dict[str, Callable[[Tensor], Tensor]], prompt: Tensor) -> dict[str, tuple[float, float]]:
    """Let each of ``ways`` add TURN tokens to a text of its own until they have added NEW.

    Returns:
        Tokens per second of each, and tokens per second of processor time, in which waiting for other programs is not.
    """
    spent = dict.fromkeys(ways, (0.0, 0.0))
    texts = dict.fromkeys(ways, prompt)
    for turn in range(NEW // TURN):
        for name, way in ways.items():
            before = time.perf_counter(), time.process_time()
            texts[name] = way(texts[name])
            wall, processor = spent[name]
            spent[name] = wall + time.perf_counter() - before[0], processor + time.process_time() - before[1]
        shown = ", ".join(f"{name} {wall:.1f} s" for name, (wall, _) in spent.items())
        print(f"  {(turn + 1) * TURN} tokens: {shown}", flush=True)
    assert all(text.shape == (1, PROMPT + NEW) for text in texts.values())
    return {name: (NEW / wall, NEW / processor) for name, (wall, processor) in spent.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3, help="texts by each (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours = models.build(GPT2, VOCABULARY, seed=1).eval()
    theirs = their_model(args.nanogpt.resolve(), ours)
    prompt = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    greedy = generate(Cached(ours), prompt, TURN, block_size=GPT2.block_size, top_k=1)
    assert greedy.equal(theirs.generate(prompt, TURN, top_k=1)), "the models differ"
    rounds = []
    for _ in range(args.rounds):
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "wordrun": partial(generate, Cached(ours), length=TURN, block_size=GPT2.block_size, **SAMPLING),
            "nanoGPT": partial(theirs.generate, max_new_tokens=TURN, **SAMPLING),
        }
        rounds.append(in_turns(ways, prompt))
    print(f"\n{args.threads} threads, {args.rounds} texts of {PROMPT} + {NEW} tokens")
    print("| tokens per second | wordrun | nanoGPT | wordrun / nanoGPT, median (each) |\n|---|---|---|---|")
    for place, kind in enumerate(("of time", "of processor time")):
        speeds = {name: [speed[name][place] for speed in rounds] for name in ("wordrun", "nanoGPT")}
        ratios = [a / b for a, b in zip(speeds["wordrun"], speeds["nanoGPT"], strict=True)]
        medians = " | ".join(f"{statistics.median(values):.2f}" for values in speeds.values())
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"| {kind} | {medians} | {statistics.median(ratios):.1f} ({each}) |")


if __name__ == "__main__":
    main()
