"""``train.backend=deepspeed``."""
