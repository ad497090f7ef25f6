"""``train.backend=diloco``."""
