"""Checkpoints in the memory of nodes (``train.memory_checkpoint_interval``)."""
