"""wordrun: train language models and your own with one command, on a laptop, a SLURM cluster or a PBS supercomputer.

From Python::

    import wordrun

    cfg = wordrun.compose(["data=sample", "train.max_iters=20"])
    with wordrun.Trainer(cfg) as trainer:
        trainer.train()
        print(trainer.generate("ROMEO:"))
    model = wordrun.load("outputs/latest", checkpoint="best")

Importing this package does nothing else: no torch, no MPI, no files, no logging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute
from wordrun.common.version import __version__

if TYPE_CHECKING:
    from wordrun.api import load as load, load_tokenizer as load_tokenizer
    from wordrun.config.compose import compose as compose
    from wordrun.config.registry import register as register
    from wordrun.train.trainer import Trainer as Trainer

__all__ = ["Trainer", "__version__", "compose", "load", "load_tokenizer", "register"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `launch --help` pays neither for Hydra nor for torch.
    return attribute(
        __name__,
        name,
        {
            "Trainer": "wordrun.train.trainer",
            "compose": "wordrun.config.compose",
            "load": "wordrun.api",
            "load_tokenizer": "wordrun.api",
            "register": "wordrun.config.registry",
        },
    )
