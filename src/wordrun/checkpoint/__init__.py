"""Checkpoints on disk: folders that are whole or not there, written and read by all ranks."""
