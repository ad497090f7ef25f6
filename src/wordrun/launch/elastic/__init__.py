"""``launch --elastic``: a guardian on each node starts its ranks, again after a fault."""
