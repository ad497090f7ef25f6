"""Run directories, read without torch: while a run is active, after it was killed, and from another machine."""
