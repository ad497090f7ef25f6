"""What the ranks of a DDP run say to each other, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import torch
import torch.distributed as td
import wordrun
from wordrun import dist
from wordrun.dist.collectives import all_mean, all_sum
from wordrun.train.hooks import Hook

world = dist.identify()
with dist.guard(world):
    cfg = wordrun.compose([
        "data=sample", "tracker=jsonl", "train.sample_tokens=0", "optimizer.gas=3", "model.n_layer=1", "model.n_head=1",
        "model.n_embd=16", "model.block_size=16", "model.batch_size=2", "train.eval_iters=5", "train.max_iters=4",
        "model=nano",
        "train.eval_interval=0", f"model.dropout={sys.argv[1]}", "hydra.run.dir=run",
    ])
    class Draw(Hook):
        def at_end(self, trainer):
            self.noise = torch.rand(1)

    draw = Draw()
    with wordrun.Trainer(cfg, world, hooks=[draw]) as trainer:
        buckets = 0

        def count(state, bucket):
            global buckets
            buckets += 1
            fut = td.all_reduce(bucket.buffer().div_(world.size), async_op=True).get_future()
            return fut.then(lambda f: f.value()[0])

        trainer.backend.replica.register_comm_hook(None, count)
        before = trainer.evaluate()
        trainer.train()
        flat = torch.cat([p.detach().flatten() for p in trainer.backend.parameters])
        everyone = [torch.empty_like(flat) for _ in range(world.size)]
        td.all_gather(everyone, flat)
        modes = all_sum(torch.tensor(float(trainer.backend.parts[0].training)))
        noises = [torch.empty(1) for _ in range(world.size)]
        td.all_gather(noises, draw.noise)
        sys.stdout.write(json.dumps({
            "rank": world.rank, "buckets": buckets, "equal": all(torch.equal(flat, e) for e in everyone),
            "before": before, "modes": modes.item(), "noises": [n.item() for n in noises],
            "mean": all_mean(torch.tensor([1.0 + world.rank])).item(),
            "starts": [b.tokens.flatten().tolist() for b in trainer._micro_batches()],
        }) + "\\n")
"""


def run(ranks: Any, tmp_path: Path, dropout: float) -> list[dict[str, Any]]:
    """Run the script on two ranks and return what each of them found."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", str(dropout), under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each["rank"])


def test_two_ranks(ranks: Any, tmp_path: Path) -> None:
    first, second = run(ranks, tmp_path, 0.1)
    assert (first["rank"], second["rank"]) == (0, 1)
    # 4 steps of 3 micro-steps: gradients (one bucket) travel with the last micro-step alone.
    assert first["buckets"] == second["buckets"] == 4
    assert first["equal"], "the ranks' weights differ after training"
    assert first["before"] == second["before"], "the validation loss is reduced over the ranks"
    assert first["modes"] == 2, "all ranks are back in training mode after an evaluation"
    assert first["noises"][0] != first["noises"][1], "dropout must differ between ranks"
    assert first["mean"] == second["mean"] == 1.5
    assert not {tuple(s) for s in first["starts"]} & {tuple(s) for s in second["starts"]}, "ranks share no batch"
