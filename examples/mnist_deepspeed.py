"""A convolutional network that reads handwritten digits, with DeepSpeed's ZeRO.

    launch -n 2 python examples/mnist_deepspeed.py

ALCF's workshop and the Turing Institute's course explain ZeRO; the program is CMU's. Compared with mnist.py:

1. init_distributed joins the process group, by launch's variables; initialize chooses the device and wraps the model.
2. A DistributedSampler divides the images among the ranks. The batch is divided too, so the number of steps stays.
3. ZeRO stage 2 leaves each rank a part of the gradients and of the optimizer's state.
4. engine.backward(loss) and engine.step() replace backward() of the loss, and step() and zero_grad() of the optimizer.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from wordrun.backend.deepspeed.compat import quiet_deepspeed

if not torch.accelerator.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
import deepspeed

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


quiet_deepspeed()  # on CPUs it would spend a minute on compiling an operation that it can do without
deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(0)
train_data, test_data = load_data()
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, BATCH_SIZE // world_size, sampler=sampler)
model = ConvNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
settings = {
    "train_batch_size": BATCH_SIZE,
    "gradient_clipping": 0.0,  # none; the default is 1
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # SGD is not on DeepSpeed's list
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
device = engine.device
before, _ = test(engine, test_data, device)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in loader:
        loss = cross_entropy(engine(images.to(device)), labels.to(device))
        engine.backward(loss)
        engine.step()
after, accuracy = test(engine, test_data, device)
print(f"rank {rank} of {world_size} on {device.type}: loss {before:.5f} -> {after:.5f}, accuracy {accuracy:.3f}")
engine.destroy()
torch.distributed.destroy_process_group()
