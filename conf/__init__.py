"""Hydra's configuration tree, shipped in the wheel as ``wordrun.conf``."""
