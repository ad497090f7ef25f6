import torch
import torch.distributed as dist
from by_hand import train


def average(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


train(average)
