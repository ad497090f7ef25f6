import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, up, down = torch.randn(4, 8), nn.Linear(8, 64), nn.Linear(64, 1)
expected = down(torch.tanh(up(x)))

units = slice(rank * 64 // size, (rank + 1) * 64 // size)
hidden = torch.tanh(nn.functional.linear(x, up.weight[units], up.bias[units]))  # the columns of this rank
output = nn.functional.linear(hidden, down.weight[:, units])  # the rows of this rank: a part of each sum
dist.all_reduce(output)
output = output + down.bias
print(f"rank {rank}: {'equal' if torch.allclose(output, expected, atol=1e-6) else 'different'}", flush=True)
dist.barrier()
dist.destroy_process_group()
