"""``wordrun plan``: the memory that a model needs per device under every backend, and which backend to choose."""
