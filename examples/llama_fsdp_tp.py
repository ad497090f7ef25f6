"""LLaMA blocks under FSDP and tensor parallelism together.

    launch -n 4 python examples/llama_fsdp_tp.py

From MIT's Engaging recipes (fsdp_tp_example.py), whose data is random too. Compared with one process:

1. A mesh with two axes: "tp" between neighbors, which share a node's fast links, and "dp" (with -n 2, a single rank).
2. parallelize_module divides pairs of matrices over "tp", by columns, then by rows: one all-reduce for each pair.
3. fully_shard divides over "dp" what each rank of a "tp" group holds. Ranks of a "tp" group read the same sequences.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

VOCAB, LAYERS, HEADS, WIDTH, HIDDEN, LENGTH, BATCH_SIZE, TP_SIZE, STEPS = 64, 2, 4, 64, 192, 32, 8, 2, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (w(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


def rotate(x):  # the rotary position embedding of (B, heads, T, head size)
    a, b = x.chunk(2, -1)
    frequencies = 10_000 ** (-torch.arange(a.shape[-1], device=x.device) / a.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(dist.get_node_local_rank() % torch.accelerator.device_count())
dist.init_process_group()  # nccl on NVIDIA's GPUs, gloo on CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
tp_size = min(TP_SIZE, world_size)
mesh = dist.init_device_mesh(device.type, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
dp, tp = mesh["dp"], mesh["tp"]
torch.manual_seed(0)
blocks = [Block() for _ in range(LAYERS)]
model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Flatten(0, 1), nn.Linear(WIDTH, VOCAB))
model.to(device)
columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
rows = {name: RowwiseParallel() for name in ("out", "down")}
for block in blocks:
    parallelize_module(block, tp, columns | rows)
    fully_shard(block, mesh=dp)
fully_shard(model, mesh=dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
batch = torch.randint(VOCAB, (BATCH_SIZE, LENGTH + 1)).chunk(dp.size())[dp.get_local_rank()].to(device)
for step in range(STEPS):  # always the same batch, to be memorized
    loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(mean := loss.detach() / world_size)
    if rank == 0 and step in (0, STEPS - 1):
        print(f"step {step}: loss {mean.item():.5f}")
shape = tuple(model[1].q.weight.to_local().shape)
print(f"rank {rank} of {world_size} on {device.type}: holds {shape} of the {WIDTH} x {WIDTH} weights of q", flush=True)
dist.barrier()  # nobody leaves while others still communicate
dist.destroy_process_group()
os._exit(0)  # DTensor's caches keep the mesh's groups, and gloo's threads in them could abort Python while it ends
