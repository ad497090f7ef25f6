"""A small GPT-2 in plain torch, under DDP.

    launch -n 2 python examples/gpt2_ddp.py

From the Turing Institute's course (Practical MPI). Compared with gpt2.py:

1. Each rank chooses its own device and joins the process group. launch sets the variables that both steps read.
2. The ranks divide the micro-batches of a step, so that the batch stays the same. Their number must divide 4.
3. DistributedDataParallel averages the gradients, but only with the last micro-batch: no_sync() skips the others.
4. all_reduce adds up the losses, since each rank knows only those of its own micro-batches. One rank prints them.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from wordrun.data.prepare.sources.sample import sample_text

LAYERS, HEADS, WIDTH, BLOCK = 2, 4, 64, 64
STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 40, 4, 4  # a step's batch is 4 micro-batches of 4 sequences


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        # With norm_first and a causal mask, torch's encoder layer is GPT-2's block.
        block = partial(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(WIDTH, HEADS, 4 * WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        future = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, future, is_causal=True)
        return self.norm(x) @ self.token.weight.T


def next_token_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(dist.get_node_local_rank() % torch.accelerator.device_count())
dist.init_process_group()  # nccl on NVIDIA's GPUs, gloo on CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.frombuffer(bytearray(sample_text(60_000).encode()), dtype=torch.uint8).long()
sequences = text.unfold(0, BLOCK + 1, BLOCK)  # of BLOCK + 1 bytes each
micro_batches, test_data = sequences[:-32].split(MICRO_BATCH_SIZE), sequences[-32:]
model = DistributedDataParallel(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS)
mine = range(rank, MICRO_BATCHES, world_size)
for step in range(STEPS):
    step_loss = torch.zeros((), device=device)
    for micro in mine:
        with nullcontext() if micro == mine[-1] else model.no_sync():
            loss = next_token_loss(model, micro_batches[step * MICRO_BATCHES + micro].to(device)) / len(mine)
            loss.backward()
        step_loss += loss.detach()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    dist.all_reduce(step_loss)
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: loss {step_loss.item() / world_size:.5f}")
print(f"rank {rank} of {world_size} on {device.type}: test loss {next_token_loss(model, test_data.to(device)):.5f}")
dist.barrier()  # nobody leaves while others still communicate
dist.destroy_process_group()
