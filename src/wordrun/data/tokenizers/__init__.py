"""Tokenizers, each a class with its options and a line in ``config/parts.py``."""

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers

if TYPE_CHECKING:
    from wordrun.data.tokenizers.construction import (
        build as build,
        from_checkpoint as from_checkpoint,
        from_json as from_json,
    )

__getattr__ = offers(__name__, {"wordrun.data.tokenizers.construction": "build from_checkpoint from_json"})
