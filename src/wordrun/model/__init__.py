"""Models: plain ``nn.Module`` classes; backends add the parallelism."""

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers

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

__getattr__ = offers(
    __name__,
    {
        "wordrun.model.gpt": "GPT",
        "wordrun.model.llama": "Llama",
        "wordrun.model.base": "LossesOf Model",
        "wordrun.model.transformer": "Transformer",
        "wordrun.model.construction": "build materialize meta_model new_model",
        "wordrun.model.draws": "draw",
    },
)
