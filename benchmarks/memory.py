"""Peak memory of training steps at GPT-2's shapes: wordrun, nanoGPT, and a plain loop of torch's own modules.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/memory.py --nanogpt nanoGPT

Each program takes two steps in fp32 on a CPU, in a process of its own. The table has the process's peak (ru_maxrss)
minus what it had before it made its model: weights, gradients, AdamW's state, activations and logits.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCAB = 50304
GOAL = 0.8
"""Most times nanoGPT's memory."""


def peak() -> int:
    """Return the most bytes that this process has had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def wordrun(args: argparse.Namespace) -> int:
    """Train with wordrun; return the peak before."""
    from wordrun import Trainer, compose

    with tempfile.TemporaryDirectory() as folder:
        cfg = compose(
            [
                "data=sample",
                "tokenizer=char",
                "model=gpt2",
                f"model.vocab_size={VOCAB}",
                "model.dropout=0",
                f"model.n_layer={args.layers}",
                f"model.batch_size={args.batch}",
                f"model.block_size={args.block}",
                *shlex.split("""
            train.max_iters=2 train.eval_interval=0 train.sample_tokens=0 train.sample_interval=0
            train.checkpoint_interval=0 train.dtype=fp32 train.device=cpu tracker=jsonl
        """),
                f"train.backend={args.backend}",
                f"hydra.run.dir={folder}/run",
            ]
        )
        before = peak()
        with Trainer(cfg) as trainer:
            trainer.train()
    return before


def steps(model: Any, optimizer: Any, args: argparse.Namespace) -> None:
    """Take two steps of ``model``, which returns logits and the loss."""
    import torch

    for _ in range(2):
        tokens = torch.randint(VOCAB, (args.batch, args.block + 1))
        _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def nanogpt(args: argparse.Namespace) -> int:
    """Train nanoGPT's model with its optimizer; return the peak before."""
    sys.path.insert(0, str(args.nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    before = peak()
    cfg = theirs.GPTConfig(block_size=args.block, vocab_size=VOCAB, n_layer=args.layers, dropout=0.0)
    gpt = theirs.GPT(cfg)
    steps(gpt, gpt.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu"), args)
    return before


def torch(args: argparse.Namespace) -> int:
    """Train a model of torch's own modules; return the peak before."""
    from torch import Tensor, arange, nn, optim

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCAB, 768), nn.Embedding(args.block, 768)
            layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, args.layers, nn.LayerNorm(768), enable_nested_tensor=False)
            self.head = nn.Linear(768, VOCAB, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            x = self.tokens(tokens) + self.positions(arange(args.block))
            mask = nn.Transformer.generate_square_subsequent_mask(args.block)
            logits = self.head(self.blocks(x, mask, is_causal=True))
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    before = peak()
    model = Plain()
    steps(model, optim.AdamW(model.parameters()), args)
    return before


PROGRAMS = {"wordrun": wordrun, "nanoGPT": nanogpt, "torch": torch}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--backend", default="DDP", help="wordrun's backend")
    parser.add_argument("--only", choices=PROGRAMS, help="measure this program in this process, and print bytes")
    args = parser.parse_args()
    if args.only:
        before = PROGRAMS[args.only](args)
        print(f"bytes {peak() - before}")
        return
    found = {}
    for name in PROGRAMS:
        command = [sys.executable, *sys.argv, "--only", name]
        found[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        print(f"{name}: {found[name] / 2**30:.2f} GiB", flush=True)
    print(f"\nGPT-2, {args.layers} layers, batch {args.batch}, block {args.block}; goal: at most {GOAL} of nanoGPT's")
    print("| | GiB | times nanoGPT's |\n|---|---|---|")
    for name, size in found.items():
        print(f"| {name} | {size / 2**30:.2f} | {size / found['nanoGPT']:.2f} |")


if __name__ == "__main__":
    main()
