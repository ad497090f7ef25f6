"""Studies, sweeps and searches: many runs of one command with different options, each a launch of its own."""
