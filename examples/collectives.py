"""The collectives of MPI and of torch.distributed, side by side.

    launch -n 4 python examples/collectives.py

ALCF's workshop shows them as pictures (AI training on supercomputers: all-reduce, reduce, broadcast, all-gather,
scatter). Each runs twice here, in mpi4py on numpy arrays and in torch on tensors, and must give the same
results. Compared with one process, each rank has to call every collective, or the others wait for it forever.
"""

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI


def show(name, of_mpi, of_torch):
    """Print one result of all ranks, in order, after comparing the two libraries."""
    assert np.array_equal(of_mpi, of_torch.numpy()), f"{name}: {of_mpi} in MPI, {of_torch} in torch"
    everyone = MPI.COMM_WORLD.gather(of_mpi.tolist(), root=0)
    if everyone is not None:
        print(f"{name}: {everyone}")


def main():
    comm = MPI.COMM_WORLD
    dist.init_process_group("gloo")
    rank, size = comm.rank, comm.size
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    last = size - 1  # the rank that receives from, or sends to, all the others

    x = np.array([rank + 1.0])  # 1 on rank 0, 2 on rank 1, ...

    result, tensor = np.zeros(1), torch.tensor(x)
    comm.Allreduce(x, result, MPI.SUM)
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    show("all-reduce, the sum on every rank", result, tensor)

    result, tensor = x.copy(), torch.tensor(x)
    comm.Reduce(x, result, MPI.SUM, root=last)
    dist.reduce(tensor, last, dist.ReduceOp.SUM)
    if rank != last:  # torch leaves an intermediate result there
        tensor = torch.tensor(x)
    show("reduce, the sum on the last rank", result, tensor)

    result, tensor = x.copy(), torch.tensor(x)
    comm.Bcast(result, root=last)
    dist.broadcast(tensor, last)
    show("broadcast, from the last rank", result, tensor)

    result, tensors = np.zeros(size), list(torch.zeros(size, 1, dtype=torch.float64))
    comm.Allgather(x, result)
    dist.all_gather(tensors, torch.tensor(x))
    show("all-gather, everything on every rank", result, torch.cat(tensors))

    parts = np.arange(size) * 10.0 if rank == last else None
    result, tensor = np.zeros(1), torch.zeros(1, dtype=torch.float64)
    comm.Scatter(parts, result, root=last)
    dist.scatter(tensor, list(torch.tensor(parts)[:, None]) if rank == last else None, src=last)
    show("scatter, a part for each rank", result, tensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
