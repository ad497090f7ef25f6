import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def pass_on(part, received):
    """Send a part to the next rank while receiving one from the previous rank."""
    sending = dist.isend(part, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()


def ring_all_reduce(tensor):
    """Replace a tensor by its sum over all ranks."""
    parts = list(tensor.chunk(size))
    for round in range(size - 1):  # reduce-scatter: afterwards, this rank has the sum of part rank + 1
        index = (rank - round) % size
        received = torch.empty_like(parts[index - 1])
        pass_on(parts[index], received)
        parts[index - 1] += received
    for round in range(size - 1):  # all-gather
        index = (rank + 1 - round) % size
        pass_on(parts[index], parts[index - 1])


x = torch.arange(8.0) + rank
expected = x.clone()
dist.all_reduce(expected)
ring_all_reduce(x)
print(f"rank {rank}: {'equal' if torch.equal(x, expected) else 'different'}", flush=True)
dist.barrier()
dist.destroy_process_group()
