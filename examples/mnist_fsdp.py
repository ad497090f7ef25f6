"""A convolutional network that reads handwritten digits, under FSDP2.

    launch -n 2 python examples/mnist_fsdp.py

From MIT's Engaging recipes. They use FSDP1, which refuses CPUs; fully_shard does not. Compared with mnist.py:

1. Each rank chooses its own device and joins the process group. launch sets the variables that both steps read.
2. A DistributedSampler gives each rank its own part of the images. The batch is divided too, so that any number of
   ranks takes the same steps.
3. fully_shard leaves each rank a part of every weight, gradient and optimizer state. It gathers a layer's weights just
   before they are needed. During backward(), it averages the gradients and leaves each rank its part.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE = 5, 64  # the batch of all ranks together


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def load_data():
    """Return 1,536 images and labels to train on, and 261 to test with."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


@torch.no_grad()
def test(model, data, device):
    """Return the loss and the accuracy on all of ``data``."""
    images, labels = (tensor.to(device) for tensor in data.tensors)
    outputs = model(images)
    return cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()


device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(dist.get_node_local_rank() % torch.accelerator.device_count())
dist.init_process_group()  # nccl on NVIDIA's GPUs, gloo on CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train_data, test_data = load_data()
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, BATCH_SIZE // world_size, sampler=sampler)
model = ConvNet().to(device)
for part in (*(layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)), model):
    fully_shard(part)
    part.set_force_sum_reduction_for_comms(True)  # on CPUs, torch 2.8 would not divide the sum by the number of ranks
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
before, _ = test(model, test_data, device)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in loader:
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
after, accuracy = test(model, test_data, device)
mine = sum(weight.to_local().numel() for weight in model.parameters())
print(f"rank {rank} holds {mine} of {sum(weight.numel() for weight in model.parameters())} weights")
print(f"rank {rank} of {world_size} on {device.type}: loss {before:.5f} -> {after:.5f}, accuracy {accuracy:.3f}")
dist.barrier()  # nobody leaves while others still communicate
dist.destroy_process_group()
