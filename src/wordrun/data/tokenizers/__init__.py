"""Tokenizers, each a class with its options and a line in ``config/parts.py``."""

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute

if TYPE_CHECKING:
    from wordrun.data.tokenizers.construction import (
        build as build,
        from_checkpoint as from_checkpoint,
        from_json as from_json,
    )

__all__ = ["build", "from_checkpoint", "from_json"]


def __getattr__(name: str) -> Any:
    return attribute(
        __name__,
        name,
        {
            "build": "wordrun.data.tokenizers.construction",
            "from_checkpoint": "wordrun.data.tokenizers.construction",
            "from_json": "wordrun.data.tokenizers.construction",
        },
    )
