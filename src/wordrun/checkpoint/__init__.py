"""Checkpoints on disk: folders that are complete or absent, written and read by all ranks.

``folder`` handles files without torch, ``shards`` handles tensors, and ``saved`` loads in a single process.
"""
