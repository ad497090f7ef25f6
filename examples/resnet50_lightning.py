"""A ResNet-50 with Lightning under DDP, with its TensorBoard logger.

    launch -n 2 python examples/resnet50_lightning.py
    tensorboard --logdir tb_logs

From JSC's course (Getting Started with AI on Supercomputers), which trains torchvision's ResNet-50 on ImageNet. Here it
is transformers' ResNet-50, untrained, on scikit-learn's digits, which need no network. Compared with one GPU:

1. Trainer has to be told how many ranks there are, by node. launch sets the variables with these numbers.
2. TorchElasticEnvironment reads launch's other variables, whichever launcher started the ranks. The course relies on
   those of SLURM.
3. Lightning divides the data among the ranks. BATCH_SIZE is that of each rank, so a step sees more images.
4. sync_dist averages what is logged over the ranks. Only rank 0 writes the logs and the checkpoint.
"""

import os

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

BATCH_SIZE, STEPS = 16, 12


class DigitsDataModule(lightning.LightningDataModule):
    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32).expand(-1, 3, -1, -1)
        self.train = TensorDataset(interpolate(images, scale_factor=2), torch.tensor(digits.target))

    def train_dataloader(self):
        return DataLoader(self.train, BATCH_SIZE, shuffle=True, drop_last=True)


class ResNet50(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ResNetForImageClassification(ResNetConfig(num_labels=10))  # its defaults are ResNet-50's
        for stage in self.model.resnet.encoder.stages:
            for block in stage.layers:  # begins as the identity, which is easier to train
                nn.init.zeros_(block.layer[-1].normalization.weight)

    def training_step(self, batch):
        images, labels = batch
        loss = cross_entropy(self.model(images).logits, labels)
        self.log("training_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    world_size, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    lightning.seed_everything(0, verbose=False)
    model = ResNet50()
    trainer = lightning.Trainer(
        devices=per_node, num_nodes=world_size // per_node, strategy="ddp", plugins=TorchElasticEnvironment(),
        max_steps=STEPS, log_every_n_steps=1, logger=TensorBoardLogger("tb_logs", name="resnet50"),
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=DigitsDataModule())
    trainer.save_checkpoint("resnet50.ckpt", weights_only=True)
    loss, name = trainer.callback_metrics["training_loss"], model.device.type
    print(f"rank {trainer.global_rank} of {trainer.world_size} on {name}: training loss {loss:.5f}")


if __name__ == "__main__":
    main()
