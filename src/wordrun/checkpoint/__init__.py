"""Checkpoints on disk: folders that are whole or not there, written and read by all ranks.

``folder`` knows the files and needs no torch, ``pieces`` the tensors, ``saved`` what one process reads by itself.
"""
