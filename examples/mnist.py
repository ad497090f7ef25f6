"""A convolutional network that reads handwritten digits, in one process.

    python examples/mnist.py

CMU's lecture on distributed training (14-763, lecture 15) and MIT's Engaging recipes begin with this program. They use
MNIST; here it is scikit-learn's 1,797 images of 8x8 pixels, which need no network. mnist_ddp.py, mnist_fsdp.py,
mnist_accelerate.py and mnist_deepspeed.py are the same program on several ranks: diff shows what each of them changes.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE = 5, 64


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
torch.manual_seed(0)
train_data, test_data = load_data()
loader = DataLoader(train_data, BATCH_SIZE, shuffle=True)
model = ConvNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
before, _ = test(model, test_data, device)
for _epoch in range(EPOCHS):
    for images, labels in loader:
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
after, accuracy = test(model, test_data, device)
print(f"{device.type}: loss {before:.5f} -> {after:.5f}, accuracy {accuracy:.3f}")
