import torch
import torch.distributed as dist
from by_hand import train
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ShardedAdam:
    """Adam whose state is divided among the ranks (ZeRO stage 1); their number must divide the number of weights."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        flat = parameters_to_vector(self.parameters).detach()
        self.mine = flat.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_tensor(self.mine.grad, gradients)  # a rank needs the gradients of its part only
        self.mine.grad /= dist.get_world_size()
        self.adam.step()
        flat = torch.empty_like(gradients)
        dist.all_gather_into_tensor(flat, self.mine.detach())
        vector_to_parameters(flat, self.parameters)


train(average=lambda model: None, make_optimizer=ShardedAdam)
