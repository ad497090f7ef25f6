"""``python -m wordrun.plan``: what a model needs of each device under every backend, and which backend to choose."""
