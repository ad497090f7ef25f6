"""Reading: from prepared tokens to batches, in an order that is the same for any number of ranks."""
