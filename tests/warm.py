"""Composes a config, for the process from which tests fork ranks: Hydra parses its grammar and files only once."""

import wordrun

wordrun.compose(["data=sample"])
