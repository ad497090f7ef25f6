"""Hooks: classes whose methods the trainer calls between steps, on every rank."""

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute

if TYPE_CHECKING:
    from wordrun.train.hooks.base import Hook as Hook, Training as Training

__all__ = ["Hook", "Training"]


def __getattr__(name: str) -> Any:
    return attribute(
        __name__,
        name,
        {
            "Hook": "wordrun.train.hooks.base",
            "Training": "wordrun.train.hooks.base",
        },
    )
