"""``python -m wordrun.prepare``: a data set to shards, in parallel, and a look at what came out."""
