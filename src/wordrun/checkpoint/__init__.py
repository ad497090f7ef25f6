"""Checkpoints on disk: folders that are complete or absent, written and read by all ranks.

``folder`` knows the files and needs no torch, ``shards`` the tensors, ``saved`` what one process reads by itself.
"""
