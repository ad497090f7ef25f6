"""The training loop and what hangs off it."""
