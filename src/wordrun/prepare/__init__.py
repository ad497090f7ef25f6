"""Writing: from text to shards of tokens, by any number of ranks, and a look at the result."""
