"""Models: plain ``nn.Module`` classes; backends add the parallelism."""

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute

if TYPE_CHECKING:
    from wordrun.model.base import LossesOf as LossesOf, Model as Model
    from wordrun.model.construction import (
        build as build,
        materialize as materialize,
        meta_model as meta_model,
        new_model as new_model,
    )
    from wordrun.model.draws import draw as draw
    from wordrun.model.gpt import GPT as GPT
    from wordrun.model.llama import Llama as Llama
    from wordrun.model.transformer import Transformer as Transformer

__all__ = [
    "GPT",
    "Llama",
    "LossesOf",
    "Model",
    "Transformer",
    "build",
    "draw",
    "materialize",
    "meta_model",
    "new_model",
]


def __getattr__(name: str) -> Any:
    return attribute(
        __name__,
        name,
        {
            "GPT": "wordrun.model.gpt",
            "Llama": "wordrun.model.llama",
            "LossesOf": "wordrun.model.base",
            "Model": "wordrun.model.base",
            "Transformer": "wordrun.model.transformer",
            "build": "wordrun.model.construction",
            "draw": "wordrun.model.draws",
            "materialize": "wordrun.model.construction",
            "meta_model": "wordrun.model.construction",
            "new_model": "wordrun.model.construction",
        },
    )
