"""A torch script without wordrun: it reads torchrun's variables, and runs under ``launch`` unmodified.

launch -n 2 python benchmarks/plain_ddp.py
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train a small network for a few steps on all ranks, and check that they agree."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", init_method="env://")
    torch.manual_seed(rank)

    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        x = torch.randn(64, 16, device=device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())

    weights = torch.nn.utils.parameters_to_vector(net.parameters())
    largest = weights.detach().clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    if not torch.equal(weights, largest):
        raise SystemExit(f"rank {rank}: the ranks' weights differ")
    # One write including the newline: unbuffered, print makes two, and another rank's output could come between them.
    sys.stdout.write(f"rank {rank} of {size} on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}\n")
    sys.stdout.flush()
    torch.distributed.barrier()
    if rank == 0:
        print("ok", flush=True)
    # DDP is part of a reference cycle. As the last reference to the group, it would destroy it while holding the GIL,
    # which gloo's threads may need: a hang, or an abort while Python shuts down (both seen with torch 2.13).
    del model
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
