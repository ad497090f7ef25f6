"""``wordrun study``: measure a series of runs, and make a table, a figure and a page of them."""
