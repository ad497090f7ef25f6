"""A small GPT-2 in plain torch, in one process.

    python examples/gpt2.py

The Turing Institute's course (Practical MPI) begins with this program, in GPT-2's real size and on FineWeb. Here the
tokens are the bytes of wordrun's synthetic text. gpt2_ddp.py and gpt2_lightning.py are the same program on several
ranks: diff shows what each of them changes.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wordrun.data.prepare.sources.sample import sample_text

LAYERS, HEADS, WIDTH, BLOCK = 2, 4, 64, 64
STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 40, 4, 4  # a step's batch is 4 micro-batches of 4 sequences


class GPT(nn.Module):
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


def next_token_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
torch.manual_seed(0)
text = torch.frombuffer(bytearray(sample_text(60_000).encode()), dtype=torch.uint8).long()
sequences = text.unfold(0, BLOCK + 1, BLOCK)  # of BLOCK + 1 bytes each
micro_batches, test_data = sequences[:-32].split(MICRO_BATCH_SIZE), sequences[-32:]
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS)
for step in range(STEPS):
    step_loss = 0.0
    for micro in range(MICRO_BATCHES):
        loss = next_token_loss(model, micro_batches[step * MICRO_BATCHES + micro].to(device)) / MICRO_BATCHES
        loss.backward()
        step_loss += loss.item()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {step_loss:.5f}")
test_loss = next_token_loss(model, test_data.to(device)).item()
print(f"{device.type}: test loss {test_loss:.5f}")
