"""A convolutional network that reads handwritten digits, with Accelerate.

    launch -n 2 python examples/mnist_accelerate.py

From CMU's lecture on distributed training (14-763, lecture 15). Compared with mnist.py:

1. Accelerator() joins the process group and chooses the device. launch sets the variables that it reads, so neither
   `accelerate config` nor `accelerate launch` is needed.
2. prepare() divides the data among the ranks, wraps the model in DDP, and moves both to the device. split_batches
   divides the batch too, so that any number of ranks takes the same steps.
3. accelerator.backward(loss) replaces loss.backward().
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

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


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
torch.manual_seed(0)
train_data, test_data = load_data()
loader = DataLoader(train_data, BATCH_SIZE, shuffle=True)
model = ConvNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
before, _ = test(model, test_data, device)
for _epoch in range(EPOCHS):
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
after, accuracy = test(model, test_data, device)
print(f"rank {rank} of {world_size} on {device.type}: loss {before:.5f} -> {after:.5f}, accuracy {accuracy:.3f}")
accelerator.end_training()
