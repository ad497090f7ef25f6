"""Reads prepared tokens and builds batches, in an order that does not depend on the number of ranks."""
