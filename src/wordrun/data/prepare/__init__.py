"""Converts text to token shards on any number of ranks, and inspects the result."""
