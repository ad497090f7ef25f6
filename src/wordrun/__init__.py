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

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers
from wordrun.common.version import __version__

if TYPE_CHECKING:
    from wordrun.api import load as load, load_tokenizer as load_tokenizer
    from wordrun.config.compose import compose as compose
    from wordrun.config.registry import register as register
    from wordrun.train.trainer import Trainer as Trainer

__all__ = ["Trainer", "__version__", "compose", "load", "load_tokenizer", "register"]


# Lazy, so that `launch --help` pays neither for Hydra nor for torch.
__getattr__ = offers(
    __name__,
    {
        "wordrun.train.trainer": "Trainer",
        "wordrun.config.compose": "compose",
        "wordrun.api": "load load_tokenizer",
        "wordrun.config.registry": "register",
    },
)
