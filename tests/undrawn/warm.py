"""Composes configs, for the process from which tests fork ranks: Hydra loads its plugins and the usual choices once."""

import composed_once

import wordrun

composed_once.start()
for data in (["data=sample"], ["data=text", "tokenizer=char"]):
    for backend in ("DDP", "FSDP", "TP", "PP"):
        wordrun.compose([*data, "data.path=text.txt", f"train.backend={backend}", "model=nano", "tracker=jsonl"])
