"""A small GPT-2 with Lightning.

    launch -n 2 python examples/gpt2_lightning.py

From the Turing Institute's course (Practical MPI). Compared with gpt2.py:

1. GPT becomes a LightningModule, with the steps and the optimizer as methods. Trainer has the loop, moves tensors to
   the device, divides the data among the ranks (and shuffles it), and averages the gradients.
2. Trainer has to be told how many ranks there are, by node. launch sets the variables with these numbers, and
   TorchElasticEnvironment reads the others, whichever launcher started the ranks.
3. Trainer accumulates gradients. The ranks divide the micro-batches of a step, so their number must divide 4.
"""

import os
from functools import partial

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from wordrun.data.prepare.sources.sample import sample_text

LAYERS, HEADS, WIDTH, BLOCK = 2, 4, 64, 64
STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 40, 4, 4  # a step's batch is 4 micro-batches of 4 sequences


class GPT(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        # With norm_first and a causal mask, torch's encoder layer is GPT-2's block.
        block = partial(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(WIDTH, HEADS, 4 * WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        future = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, future, is_causal=True)
        return self.norm(x) @ self.token.weight.T

    def training_step(self, tokens):
        return next_token_loss(self, tokens)

    def test_step(self, tokens):
        self.log("test_loss", next_token_loss(self, tokens), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def next_token_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


world_size, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
lightning.seed_everything(0, verbose=False)
text = torch.frombuffer(bytearray(sample_text(60_000).encode()), dtype=torch.uint8).long()
sequences = text.unfold(0, BLOCK + 1, BLOCK)  # of BLOCK + 1 bytes each
train_data, test_data = sequences[:-32], sequences[-32:]
model = GPT()
trainer = lightning.Trainer(
    devices=per_node, num_nodes=world_size // per_node, strategy="ddp", plugins=TorchElasticEnvironment(),
    max_steps=STEPS, accumulate_grad_batches=MICRO_BATCHES // world_size,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(train_data, MICRO_BATCH_SIZE))
(result,) = trainer.test(model, DataLoader(test_data, len(test_data)), verbose=False)
name = model.device.type
print(f"rank {trainer.global_rank} of {trainer.world_size} on {name}: test loss {result['test_loss']:.5f}")
