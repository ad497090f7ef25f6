"""Data parallelism with torch's DistributedDataParallel and wordrun.dist, under any launcher."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wordrun.dist as dist

BATCH = 32  # of all ranks together

with dist.session(seed=0) as world:
    inputs = torch.randn(512, 8)
    targets = inputs.square().sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1, bias=False)).to(world.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, 61):
        first = (step - 1) * BATCH % len(inputs)
        mine = slice(first + world.rank, first + BATCH, world.size)
        x, y = inputs[mine].to(world.device), targets[mine].to(world.device)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world.size
        torch.distributed.all_reduce(mean)
        if world.rank == 0 and step % 20 == 0:
            print(f"step {step}  loss {mean.item():.3f}", flush=True)
