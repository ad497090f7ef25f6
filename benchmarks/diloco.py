"""Bytes sent against the final loss: DDP, and diloco with several intervals of the exchange.

    launch -n 2 --launcher torchrun python benchmarks/diloco.py [--png FILE] [--runs NAME ...] [OVERRIDE ...]

Every run trains on the same sequences. The bytes are those that the kernel has sent over the connections between
ranks during training (TCP_INFO of Linux), with all messages of the trainer (log lines, signals, evaluations), but
without the store, so use gloo: launch --launcher torchrun, on one machine. Rank 0's are shown.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shlex
import socket
import struct
import tempfile
from pathlib import Path

import torch

import wordrun
from wordrun import dist

MODEL = shlex.split("""
    data=shakespeare model=nano tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu
    train.sample_tokens=0 train.checkpoint_interval=0 train.save_best=false train.compile=false
    train.max_iters=900 train.eval_interval=900 train.eval_iters=20 train.log_interval=30
    model.n_layer=2 model.n_head=2 model.n_embd=64 model.block_size=64 model.batch_size=8
""")
RUNS = {
    "DDP": ["train.backend=DDP"],
    "diloco, every 10 steps": ["train.backend=diloco", "backend.sync_every=10"],
    "diloco, every 30 steps": ["train.backend=diloco"],
    "diloco, every 30, 3 fragments": ["train.backend=diloco", "backend.fragments=3"],
    "diloco, every 100 steps": ["train.backend=diloco", "backend.sync_every=100"],
}
BYTES_ACKED = 120
"""Where Linux's struct tcp_info has tcpi_bytes_acked, 64 bits."""


def sent() -> int:
    """Return the bytes that this process has sent over its connections so far, except those of the store."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
        if not link.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as one:
            try:
                ports = {one.getsockname()[1], one.getpeername()[1]}
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except (OSError, IndexError, TypeError):  # not TCP, or not connected
                continue
            if int(os.environ["MASTER_PORT"]) not in ports:
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def train(words: list[str], world: dist.World) -> dict[str, float]:
    """Train, and return the validation loss and the bytes sent per step."""
    cfg = dist.broadcast(wordrun.compose(words, ranks=world.size) if world.rank == 0 else None, world)
    with wordrun.Trainer(cfg, world) as trainer:
        gc.collect()  # closes the connections of the run before
        before = sent()
        summary = trainer.train()
        parameters = sum(p.numel() for part in trainer.backend.parts for p in part.parameters())
        after = sent()
        dist.broadcast(None, world)  # the others have kept their ends of the connections until rank 0 has counted
        return {"loss": summary.val_loss or 0.0, "bytes": (after - before) / summary.steps, "parameters": parameters}


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the losses over the bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, each), marker in zip(found.items(), itertools.cycle("os^Dv<>P")):
        axes.plot(each["bytes"] / 1000, each["loss"], marker, label=name)
    axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", xlabel="kB sent by each rank per step", ylabel="validation loss at the end")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="draw the figure into this file")
    parser.add_argument("--json", type=Path, help="write the results into this file, and add to those in it")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS, metavar="NAME", help="default: all")
    args, overrides = parser.parse_known_args()
    with dist.session() as world, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
        for number, name in enumerate(args.runs):
            place = f"hydra.run.dir={dist.broadcast(folder, world)}/{number}"
            found[name] = train([*MODEL, *overrides, *RUNS[name], place], world)
            if args.json and world.rank == 0:
                args.json.write_text(json.dumps(found))
        if world.rank == 0:
            base = found["DDP"]
            print("| run | validation loss | vs. DDP | bytes per step | vs. DDP |\n|---|---|---|---|---|")
            for name, each in found.items():
                loss, share = each["loss"] / base["loss"] - 1, base["bytes"] / each["bytes"]
                print(f"| {name} | {each['loss']:.4f} | {loss:+.2%} | {each['bytes']:,.0f} | 1/{share:.1f} |")
            if args.png:
                draw(found, args.png)


if __name__ == "__main__":
    main()
