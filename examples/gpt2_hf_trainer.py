"""A small GPT-2 with Hugging Face's Trainer.

    launch -n 2 python examples/gpt2_hf_trainer.py

The Turing Institute's program (Practical MPI), with the GPT-2 of transformers. What changes from one process to many is
only the batch: per_device_train_batch_size has to be divided to keep the total the same. TrainingArguments joins the
process group and chooses the device, from variables that launch sets; Trainer divides the data among the ranks,
averages the gradients and the evaluation's loss, and writes on rank 0 alone.
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from wordrun.data.prepare.sources.sample import sample_text

BLOCK, STEPS, BATCH_SIZE = 64, 40, 16  # the batch of all ranks together


def load_sequences():
    """Return sequences of BLOCK bytes: to train on, and 32 to evaluate with."""
    text = torch.frombuffer(bytearray(sample_text(60_000).encode()), dtype=torch.uint8).long()
    sequences = [{"input_ids": tokens, "labels": tokens} for tokens in text.unfold(0, BLOCK, BLOCK)]
    return sequences[:-32], sequences[-32:]


def main():
    set_seed(0)
    train_data, test_data = load_sequences()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK, n_layer=2, n_head=4, n_embd=64, **ends))
    arguments = TrainingArguments(
        "gpt2-hf", max_steps=STEPS, learning_rate=5e-3, logging_steps=10, save_strategy="no", report_to="none",
        per_device_train_batch_size=BATCH_SIZE // int(os.environ["WORLD_SIZE"]), disable_tqdm=True,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=train_data, eval_dataset=test_data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after, rank = trainer.evaluate()["eval_loss"], arguments.process_index
    print(f"rank {rank} of {arguments.world_size} on {arguments.device.type}: test loss {before:.5f} -> {after:.5f}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
