"""``wordrun plan``: a model's memory per device under every backend, and which backend to choose."""
