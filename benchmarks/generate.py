"""Generation against nanoGPT: tokens/s for 512 new tokens after a short prompt, with GPT-2's shapes on a CPU.

Both models have the same random weights and sample from the 200 most likely tokens. They alternate every few tokens, so
that other load slows both; first, their greedy tokens are checked to be equal. Prints a table.

On a busy machine, compare the processor time with --threads 1: several threads wait for each other.

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
from wordrun.model.generate import Cached, generate
from wordrun.model.huggingface import to_huggingface
from wordrun.model.options import GPTConfig
from wordrun.model.transformer import Transformer

GPT2 = GPTConfig(name="gpt2", n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=True, gelu="none")
VOCABULARY = 50257
PROMPT = 8
NEW = 512
TURN = 32
"""Tokens per turn."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 200}


def their_model(nanogpt: Path, ours: Transformer) -> Any:
    """Return nanoGPT's model with the weights of ``ours``."""
    sys.path.insert(0, str(nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    gpt = theirs.GPT(
        theirs.GPTConfig(
            n_layer=GPT2.n_layer,
            n_head=GPT2.n_head,
            n_embd=GPT2.n_embd,
            block_size=GPT2.block_size,
            bias=GPT2.bias,
            vocab_size=VOCABULARY,
            dropout=0.0,
        )
    )
    state = to_huggingface(ours.state_dict(), GPT2)
    gpt.load_state_dict({name: x.T if ".h." in name and x.dim() == 2 else x for name, x in state.items()})
    return gpt.eval()


Spent = tuple[float, float]
"""Wall seconds, and seconds of processor time, which exclude waiting for other programs."""


def timed(step: Callable[[Tensor], Tensor], text: Tensor) -> tuple[Tensor, Spent]:
    """Return what ``step`` makes of ``text``, and the time it took."""
    before = time.perf_counter(), time.process_time()
    text = step(text)
    return text, (time.perf_counter() - before[0], time.process_time() - before[1])


def in_turns(ours: Callable[[Tensor], Tensor], theirs: Any, prompt: Tensor, share: int) -> tuple[Spent, Spent]:
    """Return the tokens per second of both, for NEW tokens in turns; each of theirs continues our text.

    Args:
        ours: adds TURN tokens to a text.
        theirs: nanoGPT's model.
        prompt: (1, PROMPT).
        share: nanoGPT generates every Nth token only, in the middle of each turn, and its time is multiplied by N.
    """
    spent = [0.0, 0.0, 0.0, 0.0]
    text, count = prompt, TURN // share
    for start in range(PROMPT, PROMPT + NEW, TURN):
        text, mine = timed(ours, text)
        begun = text[:, : start + (TURN - count) // 2]
        _, other = timed(lambda begun: theirs.generate(begun, count, **SAMPLING), begun)
        spent = [a + b for a, b in zip(spent, (*mine, share * other[0], share * other[1]), strict=True)]
        print(f"  {start + TURN - PROMPT} tokens: wordrun {spent[0]:.1f} s, nanoGPT {spent[2]:.1f} s", flush=True)
    assert text.shape == (1, PROMPT + NEW)
    return (NEW / spent[0], NEW / spent[1]), (NEW / spent[2], NEW / spent[3])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3, help="texts per model (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per model")
    parser.add_argument(
        "--share", type=int, default=1, help="let nanoGPT generate only every Nth token, and scale its time (default 1)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours = models.build(GPT2, VOCABULARY, seed=1).eval()
    theirs = their_model(args.nanogpt.resolve(), ours)
    prompt = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    greedy = generate(Cached(ours), prompt, TURN, block_size=GPT2.block_size, top_k=1)
    assert greedy.equal(theirs.generate(prompt, TURN, top_k=1)), "the models differ"
    rounds = []
    for _ in range(args.rounds):
        extend = partial(generate, Cached(ours), length=TURN, block_size=GPT2.block_size, **SAMPLING)
        rounds.append(in_turns(extend, theirs, prompt, args.share))
    print(f"\n{args.threads} threads, {args.rounds} texts of {PROMPT} + {NEW} tokens")
    print("| tokens per second | wordrun | nanoGPT | wordrun / nanoGPT, median (each) |\n|---|---|---|---|")
    for index, kind in enumerate(("of time", "of processor time")):
        ratios = [mine[index] / other[index] for mine, other in rounds]
        medians = " | ".join(f"{statistics.median(both[side][index] for both in rounds):.2f}" for side in (0, 1))
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"| {kind} | {medians} | {statistics.median(ratios):.1f} ({each}) |")


if __name__ == "__main__":
    main()
