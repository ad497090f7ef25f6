"""Run directories, read without torch: while a run is going, after it was killed, and from another machine."""
