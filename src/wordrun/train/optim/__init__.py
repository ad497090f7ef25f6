"""Optimizers, a file each. Each is made from its options and the named parameters; ``config/parts.py`` registers it."""
